"""`gpu_memory_utilization`: the share of each GPU's memory that weights, KV and the rest may take.

vLLM's meaning: of all the memory that a card has, whatever others hold of it. A `reserve` that
leaves less stays. CPUs are not bounded by it.
"""

from __future__ import annotations

from collections.abc import Callable

from llmpq.devices.cluster import Cluster, DeviceGroup, Node, resolve
from llmpq.errors import DoesNotFitError
from llmpq.plans.plan import Plan, StagePlan
from llmpq.units import format_size

GPU_SHARE_HELP = "of each GPU's memory, used at most, such as 0.9 (default: all that is free)"


def require_share(share: object) -> float:
    """Return a share of a GPU's memory; `ValueError` for what is none."""
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0.0 < share <= 1.0:  # type: ignore[operator]
        raise ValueError(
            f"--gpu-memory-utilization must be above 0 and at most 1, got {share!r}: the share of "
            "each GPU's memory that may be used"
        )
    return float(share)  # type: ignore[arg-type]


def with_groups(
    cluster: Cluster, changed: Callable[[Node, DeviceGroup], DeviceGroup], *, where: str
) -> Cluster:
    """Return a cluster with every group of devices replaced; `where` names it in errors."""
    nodes = [
        node.model_copy(
            update={
                "devices": tuple(changed(node, group) for group in node.groups()),
                "accelerators": None,
            }
        )
        for node in cluster.nodes
    ]
    data = cluster.model_copy(update={"nodes": tuple(nodes)})
    return Cluster.parse_data(data.model_dump(by_alias=True), where=where)


def cluster_within(cluster: Cluster, share: float | None) -> Cluster:
    """Return a cluster of whose GPUs a share may be used, the whole one where it is None."""
    if share is None:
        return cluster
    part = require_share(share)

    def within(node: Node, group: DeviceGroup) -> DeviceGroup:
        device = resolve(node, group, 0, {})
        if device.spec.is_cpu:
            return group
        reserve = max(device.reserve_bytes, device.memory_bytes - int(part * device.memory_bytes))
        return group.model_copy(update={"reserve": reserve})

    return with_groups(cluster, within, where="--gpu-memory-utilization")


def plan_within(plan: Plan, share: float | None) -> Plan:
    """Return a plan of whose GPUs a share may be used.

    Live requests then share a smaller pool; `DoesNotFitError` where a stage is planned with more.
    """
    if share is None:
        return plan
    part = require_share(share)
    stages = [_within(stage, part) for stage in plan.stages]
    if any(s.memory and s.memory.total_bytes > s.memory.limit_bytes for s in stages):
        stages = [_without_prefixes(stage) for stage in stages]
    return plan.model_copy(update={"stages": tuple(stages)})


def _without_prefixes(stage: StagePlan) -> StagePlan:
    if stage.memory is None:
        return stage
    return stage.model_copy(update={"memory": stage.memory.with_prefix_bytes(0)})


def _within(stage: StagePlan, share: float) -> StagePlan:
    memory = stage.memory
    if stage.is_cpu or memory is None:
        return stage
    whole = memory.limit_bytes + memory.reserve_bytes
    limit = min(memory.limit_bytes, int(share * whole))
    if memory.least_bytes > limit:
        raise DoesNotFitError(
            f"the plan has {format_size(memory.least_bytes)} on {stage.device}, and "
            f"--gpu-memory-utilization {share:g} leaves {format_size(limit)} of its "
            f"{format_size(whole)}; re-plan with llmpq-algo --gpu-memory-utilization {share:g}"
        )
    own = memory.model_copy(update={"limit_bytes": limit, "reserve_bytes": whole - limit})
    return stage.model_copy(update={"memory": own})
