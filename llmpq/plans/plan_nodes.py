"""Nodes of a cluster as a plan stores them, so that it runs without the cluster file."""

from __future__ import annotations

from collections.abc import Collection

from llmpq.devices.cluster import Cluster
from llmpq.plans.plan import NodePlan, Plan


def node_plans(cluster: Cluster, used: Collection[str]) -> tuple[NodePlan, ...]:
    """Return the nodes among `used` of which the file says more than their devices."""
    return tuple(
        NodePlan(name=node.name, host=node.host, labels=node.labels, model_dir=node.model_dir)
        for node in cluster.nodes
        if node.name in used and (node.host is not None or node.labels or node.model_dir)
    )


def nodes_of(plan: Plan, cluster: Cluster | None) -> tuple[NodePlan, ...]:
    """Return every node that has stages, in their order; what a cluster file says comes first."""
    used = list(dict.fromkeys(stage.node for stage in plan.stages))
    known = {node.name: node for node in plan.nodes}
    if cluster is not None:
        known = {node.name: node for node in node_plans(cluster, used)}
    return tuple(known.get(name, NodePlan(name=name)) for name in used)
