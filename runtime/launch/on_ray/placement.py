"""Ray for placement: find each node of a plan, reserve one bundle per stage.

A bundle that no node can hold stays pending for ever without a word, so the nodes are found first,
by node_match.py, and every wait has a deadline. A bundle names its node by Ray's own id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from llmpq.cluster import Cluster
from llmpq.errors import PlanMismatchError, StageLostError
from llmpq.plan import Plan, StagePlan
from llmpq.runtime.launch.nodes.local_node import all_here, local_addresses, wanted_nodes
from llmpq.runtime.launch.nodes.node_match import (
    RayNode,
    Unmatched,
    WantedNode,
    match_nodes,
    ray_nodes,
)

NODE_ID = "ray.io/node-id"
"""The label that Ray gives every node."""
_CPU_SHARE = 0.001
"""CPU a CPU stage's bundle asks for: a bundle may not be empty, and stages may share cores."""
_NAMED_AFTER_S = 3.0
"""How long a node may be missing before it is named."""
_PLACED_LOOK_S = 2.0
"""How often to look whether the nodes of stages that are being placed are still there."""
_LOOK_S = 0.5

_log = logging.getLogger("llmpq.placement")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Reserved bundles, and the node of each stage."""

    group: PlacementGroup
    nodes: tuple[RayNode, ...]


def bundle_of(stage: StagePlan) -> dict[str, float]:
    """Return the resources of a stage's bundle: a GPU, or a token share of a CPU."""
    if stage.is_cpu:
        return {"CPU": _CPU_SHARE}
    return {"GPU": 1, "CPU": _CPU_SHARE}


def reserve(
    plan: Plan, cluster: Cluster | None, *, joined: bool, wait_s: float, timeout_s: float
) -> Placement:
    """Find every node of the plan and reserve one bundle per stage, in stage order.

    `joined`: the Ray is one that somebody started on one or more machines, so that every node of
    the plan is one of it; else this machine stands for all. Nodes may join for `wait_s` seconds.
    `StageLostError` names what is missing, `PlanMismatchError` devices of another kind.

    A host that was cut off and has joined again is two nodes until Ray finds the former one dead:
    where that one was chosen, its successor is looked for.
    """
    wanted = wanted_nodes(plan, cluster)
    bundles = [bundle_of(stage) for stage in plan.places]
    while True:
        found = wait_for_nodes(wanted, wait_s) if joined else all_here(wanted, _own_node())
        nodes = tuple(found[stage.node] for stage in plan.places)
        selectors = [{NODE_ID: node.id} for node in nodes]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        gone = _wait_placed(group, nodes, timeout_s)
        if gone is None:
            return Placement(group=group, nodes=nodes)
        remove_placement_group(group)
        if not gone:
            raise StageLostError(
                f"the {len(bundles)} stages could not be placed within {timeout_s:.0f} s: "
                f"{_asked(plan, nodes)}; {_offered()}. Add nodes, free resources "
                "or re-plan with llmpq-algo --cluster"
            )
        _log.warning("%s has left the Ray; looking for its host again", gone[0].shown())


def _wait_placed(
    group: PlacementGroup, nodes: Sequence[RayNode], timeout_s: float
) -> list[RayNode] | None:
    """Return None once a group is placed, else those of its nodes that have left the Ray."""
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > 0:
        if group.wait(timeout_seconds=min(_PLACED_LOOK_S, left_s)):
            return None
        alive = {node.id for node in alive_nodes()}
        gone = [node for node in nodes if node.id not in alive]
        if gone:
            return gone
    return []


def wait_for_nodes(wanted: Sequence[WantedNode], wait_s: float) -> dict[str, RayNode]:
    """Return the Ray node of every node of a plan, by name; it may join for `wait_s` seconds."""
    begun_s, named = time.monotonic(), ""
    while True:
        try:
            return match_nodes(wanted, alive_nodes(), local_addresses())
        except Unmatched as missing:
            text, passed_s = str(missing), time.monotonic() - begun_s
            if missing.for_good:
                raise PlanMismatchError(text) from None
            if passed_s >= wait_s:
                waited = f" (waited {wait_s:.0f} s, --deadlines wait_nodes)" if wait_s else ""
                raise StageLostError(f"{text}{waited}") from None
            if text != named and passed_s >= min(_NAMED_AFTER_S, wait_s / 2):
                _log.warning("waiting up to %.0f s: %s", wait_s - passed_s, text)
                named = text
        time.sleep(min(_LOOK_S, max(0.0, begun_s + wait_s - time.monotonic())))


def alive_nodes() -> list[RayNode]:
    """Return the nodes of the Ray that this process has joined, its own first."""
    return ray_nodes(ray.nodes(), ray.get_runtime_context().get_node_id())


def _own_node() -> RayNode:
    """Return this host, where it alone is the Ray."""
    nodes = alive_nodes()
    if not nodes:
        raise StageLostError("no node of this process's Ray is alive; start Ray again")
    return nodes[0]


def own_raylet() -> tuple[str, int]:
    """Return where Ray's process on this host listens."""
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)
    return node["NodeManagerAddress"], int(node["NodeManagerPort"])


def _asked(plan: Plan, nodes: Sequence[RayNode]) -> str:
    parts = []
    for stage, node in zip(plan.places, nodes, strict=True):
        what = "a CPU" if stage.is_cpu else "1 GPU"
        parts.append(f"{stage.device} needs {what} of {node.shown()}")
    return ", ".join(parts)


def _offered() -> str:
    total: Mapping[str, float] = ray.cluster_resources()
    free: Mapping[str, float] = ray.available_resources()
    return "; ".join(
        f"{name}: {free.get(name, 0):g} free of {total.get(name, 0):g}" for name in ("CPU", "GPU")
    )
