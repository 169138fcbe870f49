"""This machine as the nodes of a plan: without a Ray it stands for all of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from llmpq.devices.cluster import Cluster
from llmpq.devices.this_machine import read_gpus, visible
from llmpq.errors import StageLostError
from llmpq.plans.plan import Plan
from llmpq.plans.plan_nodes import nodes_of
from llmpq.runtime.launch.nodes.node_match import RayNode, WantedNode, lacks, plain_address
from llmpq.runtime.launch.stages.stage_host import (
    LOCAL_HOST,
    addresses_of,
    is_loopback,
    own_addresses,
)


def wanted_nodes(plan: Plan, cluster: Cluster | None) -> list[WantedNode]:
    """Return the nodes of a plan that have stages, their hosts resolved here."""
    return [
        WantedNode(
            node=node,
            addresses=frozenset() if node.host is None else addresses_of(node.host),
            stages=tuple(stage for stage in plan.places if stage.node == node.name),
        )
        for node in nodes_of(plan, cluster)
    ]


def all_here(wanted: Sequence[WantedNode], here: RayNode) -> dict[str, RayNode]:
    """Return this machine for every node of a plan; `StageLostError` for one that is another."""
    local = {plain_address(one) for one in local_addresses()}
    for want in wanted:
        named = {plain_address(one) for one in want.addresses}
        elsewhere = want.node.host is not None and not any(
            is_loopback(address) or address in local for address in named
        )
        if elsewhere or any(here.labels.get(k) != v for k, v in want.node.labels.items()):
            raise StageLostError(
                f"the plan's node {want.shown()} is another machine than this one: start Ray on "
                "all of them (ray start --head here, ray start --address HOST:PORT there) and give "
                "--ray-address HOST:PORT"
            )
    stages = tuple(stage for want in wanted for stage in want.stages)
    whole = WantedNode(node=wanted[0].node, addresses=frozenset(), stages=stages)
    missing = lacks(whole, here)
    if missing is not None:
        names = ", ".join(stage.device for stage in whole.gpu_stages)
        raise StageLostError(
            f"the plan needs {len(whole.gpu_stages)} GPUs ({names}), this machine is "
            f"{here.shown()}; start Ray on all machines and give --ray-address HOST:PORT, or "
            "re-plan for the devices there are"
        )
    return {want.node.name: here for want in wanted}


def this_node() -> RayNode:
    """Return this machine as a node, without a Ray."""
    gpus = visible(read_gpus())
    return RayNode(
        id="",
        address=LOCAL_HOST,
        hostname=socket.gethostname(),
        num_gpus=len(gpus),
        gpu_kinds=frozenset(gpu.kind for gpu in gpus if gpu.kind is not None),
        is_here=True,
    )


def local_addresses() -> list[str]:
    """Return the addresses of this machine, loopback's among them."""
    return [address for found in own_addresses().values() for address in found]
