"""Ray for placement: find each node of a plan, reserve a bundle for every stage.

A bundle that no node can hold stays pending for ever without a word, so the nodes are found first,
by node_match.py, and every wait has a deadline. A bundle names its node by Ray's own id.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmpq.devices.cluster import Cluster
from llmpq.errors import PlanMismatchError, StageLostError
from llmpq.plans.plan import Plan, StagePlan
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
class Reserved:
    """The bundle of one stage: a group of its own, which goes with the stage, and its node."""

    group: PlacementGroup
    node: RayNode

    def options(self, stage: StagePlan, **more: Any) -> dict[str, Any]:
        """Return the options of an actor in the bundle."""
        return {
            "num_cpus": 0,
            "num_gpus": 0 if stage.is_cpu else 1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=0
            ),
            **more,
        }


def bundle_of(stage: StagePlan) -> dict[str, float]:
    """Return the resources of a stage's bundle: a GPU, or a token share of a CPU."""
    if stage.is_cpu:
        return {"CPU": _CPU_SHARE}
    return {"GPU": 1, "CPU": _CPU_SHARE}


def reserve(
    plan: Plan,
    cluster: Cluster | None,
    *,
    joined: bool,
    wait_s: float,
    timeout_s: float,
    held: Mapping[int, RayNode] = MappingProxyType({}),
) -> dict[int, Reserved]:
    """Find every node of the plan and reserve a bundle for every stage, by the stages' numbers.

    `joined`: the Ray is one that somebody started on one or more machines, so that every node of
    the plan is one of it; else this machine stands for all. Nodes may join for `wait_s` seconds.
    `held`: the nodes of stages that have their bundles, and are not reserved for.
    `StageLostError` names what is missing, `PlanMismatchError` devices of another kind.

    A host that was cut off and has joined again is two nodes until Ray finds the former one dead:
    where that one was chosen, its successor is looked for.
    """
    wanted = wanted_nodes(plan, cluster)
    chosen = {plan.places[index].node: node for index, node in held.items()}
    stages = {i: stage for i, stage in enumerate(plan.places) if i not in held}
    while stages:
        here = None if joined else _own_node()
        found = all_here(wanted, here) if here else wait_for_nodes(wanted, wait_s, chosen)
        nodes = {index: found[stage.node] for index, stage in stages.items()}
        groups: dict[int, PlacementGroup] = {}
        gone: list[RayNode] | None = []
        try:
            for index, stage in stages.items():
                groups[index] = placement_group(
                    [bundle_of(stage)],
                    strategy="PACK",
                    bundle_label_selector=[{NODE_ID: nodes[index].id}],
                )
            gone = _wait_placed([*groups.values()], [*nodes.values()], timeout_s)
        finally:
            if gone is not None:  # also where a signal ends the wait
                give_back(groups.values())
        if gone is None:
            return {i: Reserved(group=groups[i], node=node) for i, node in nodes.items()}
        if not gone:
            raise StageLostError(
                f"the {len(stages)} stages could not be placed within {timeout_s:.0f} s: "
                f"{_asked(stages.values(), nodes.values())}; {_offered()}. Add nodes, free "
                "resources or re-plan with llmpq-algo --cluster"
            )
        ids = {node.id for node in gone}
        chosen = {name: node for name, node in chosen.items() if node.id not in ids}
        _log.warning("%s has left the Ray; looking for its host again", gone[0].shown())
    return {}


def give_back(groups: Iterable[PlacementGroup]) -> None:
    """Remove the groups of bundles that are not needed any more."""
    for group in groups:
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def _wait_placed(
    groups: Sequence[PlacementGroup], nodes: Sequence[RayNode], timeout_s: float
) -> list[RayNode] | None:
    """Return None once all groups are placed, else those of their nodes that have left the Ray."""
    end_s = time.monotonic() + timeout_s
    waiting = list(groups)
    while (left_s := end_s - time.monotonic()) > 0:
        if waiting[0].wait(timeout_seconds=min(_PLACED_LOOK_S, left_s)):
            del waiting[0]
            if not waiting:
                return None
            continue
        alive = {node.id for node in alive_nodes()}
        gone = [node for node in nodes if node.id not in alive]
        if gone:
            return gone
    return []


def wait_for_nodes(
    wanted: Sequence[WantedNode],
    wait_s: float,
    chosen: Mapping[str, RayNode] = MappingProxyType({}),
) -> dict[str, RayNode]:
    """Return the Ray node of every node of a plan, by name; it may join for `wait_s` seconds.

    `chosen`: those that are known, of which each stays what it is while it is alive.
    """
    begun_s, named = time.monotonic(), ""
    while True:
        try:
            return _matched(wanted, alive_nodes(), chosen)
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


def _matched(
    wanted: Sequence[WantedNode], alive: Sequence[RayNode], chosen: Mapping[str, RayNode]
) -> dict[str, RayNode]:
    """Return the Ray node of every node of a plan; `Unmatched` says which is missing."""
    there = {node.id for node in alive}
    stay = {name: node for name, node in chosen.items() if node.id in there}
    taken = {node.id for node in stay.values()}
    left = [want for want in wanted if want.node.name not in stay]
    free = [node for node in alive if node.id not in taken]
    return stay | match_nodes(left, free, local_addresses())


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


def _asked(stages: Iterable[StagePlan], nodes: Iterable[RayNode]) -> str:
    parts = []
    for stage, node in zip(stages, nodes, strict=True):
        what = "a CPU" if stage.is_cpu else "1 GPU"
        parts.append(f"{stage.device} needs {what} of {node.shown()}")
    return ", ".join(parts)


def _offered() -> str:
    total: Mapping[str, float] = ray.cluster_resources()
    free: Mapping[str, float] = ray.available_resources()
    return "; ".join(
        f"{name}: {free.get(name, 0):g} free of {total.get(name, 0):g}" for name in ("CPU", "GPU")
    )
