"""What stages keep of recurrent layers' states for prefixes found again, as a plan states it.

A run keeps as many on every stage, or none: where one device has no room beside what the requests
need themselves, no prefix is found, and the plan is as good as any. The bytes are counted after a
plan is found, so that they never refuse one.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan, StagePlan
from llmpq.sizes.pool_size import num_snapshots
from llmpq.sizes.state_size import state_bytes
from llmpq.units import format_size
from llmpq.workload import Workload


def with_prefix_states(
    stages: Sequence[StagePlan],
    spec: ModelSpec,
    workload: Workload,
    *,
    beside: Sequence[int] = (),
) -> tuple[StagePlan, ...]:
    """Return the stages with the bytes of kept states, if all have room for them.

    None are counted where devices share a stage: a run keeps theirs beside the plan. `beside`:
    bytes that drafts take of each stage's device.
    """
    layers = [range(*stage.layers) for stage in stages]
    slots, dtype_bytes = num_snapshots(spec, workload), workload.dtype_bytes
    each = [state_bytes(spec, own, slots=slots, dtype_bytes=dtype_bytes) for own in layers]
    taken = beside or [0] * len(stages)
    has_room = not any(stage.shares for stage in stages) and all(
        stage.memory.least_bytes + drafts + size <= stage.memory.limit_bytes
        for stage, drafts, size in zip(stages, taken, each, strict=True)
        if stage.memory is not None
    )
    return tuple(
        stage
        if stage.memory is None
        else stage.model_copy(update={"memory": stage.memory.with_prefix_bytes(size * has_room)})
        for stage, size in zip(stages, each, strict=True)
    )


def prefix_notes(plan: Plan, spec: ModelSpec) -> list[str]:
    """Say that a run finds no prefixes for want of room; nothing where it does, or never would."""
    counted = [stage.memory for stage in plan.stages if stage.memory is not None]
    slots = num_snapshots(spec, plan.workload)
    shared = any(stage.shares for stage in plan.stages)
    if not counted or not slots or shared or any(memory.prefix_bytes for memory in counted):
        return []
    layers, dtype_bytes = range(spec.num_layers), plan.workload.dtype_bytes
    size = state_bytes(spec, layers, slots=slots, dtype_bytes=dtype_bytes)
    return [
        f"no prefix cache: not every stage has room for {slots} states of its recurrent layers "
        f"({format_size(size)} in all) beside its requests"
    ]
