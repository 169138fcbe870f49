"""Where the memory of a stage's device goes, part by part: what every picture of a plan draws."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from llmpq.precision import Precision
from llmpq.sizes.state_size import state_bytes

if TYPE_CHECKING:
    from llmpq.plans.plan import Plan, StagePlan


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Bytes of one purpose."""

    name: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Consecutive layers of one precision, and their share of the stage's weights."""

    first: int
    last: int
    precision: Precision
    share: float

    @property
    def count(self) -> int:
        """Number of layers."""
        return self.last - self.first + 1


def memory_parts(plan: Plan, index: int) -> list[MemoryPart]:
    """Return what a stage's device holds, from its weights to what is free and in reserve.

    Their sum is the device's memory. Empty for a plan whose memory is not counted.
    """
    memory = plan.stages[index].memory
    if memory is None:
        return []
    states = stage_state_bytes(plan, index)
    named = (
        ("weights", memory.weights_bytes),
        ("embedding, head", memory.embedding_bytes),
        ("KV cache", memory.kv_bytes - states),
        ("recurrent state", states),
        ("states of prefixes", memory.prefix_bytes),
        ("workspace", memory.workspace_bytes),
        ("framework", memory.context_bytes),
        ("free", memory.limit_bytes - memory.total_bytes),
        ("left to others", memory.reserve_bytes),
    )
    return [MemoryPart(name=name, nbytes=size) for name, size in named if size > 0]


def stage_state_bytes(plan: Plan, index: int) -> int:
    """Return which of a stage's KV bytes are recurrent states of its requests."""
    if plan.inputs is None or plan.pool is None or not plan.pool.state_bytes:
        return 0
    work = plan.workload
    layers = range(*plan.stages[index].layers)
    return state_bytes(plan.inputs.model, layers, slots=work.batch, dtype_bytes=work.dtype_bytes)


def layer_runs(stage: StagePlan) -> list[LayerRun]:
    """Return a stage's layers as runs of one precision."""
    total = sum(p.weight_bits for p in stage.precisions)
    runs, first = [], stage.layers[0]
    for precision, same in groupby(stage.precisions):
        count = len(list(same))
        share = count * precision.weight_bits / total
        runs.append(LayerRun(first=first, last=first + count - 1, precision=precision, share=share))
        first += count
    return runs


def device_bytes(stage: StagePlan) -> int:
    """Return the memory of a stage's device, reserve included; 0 where it is not counted."""
    memory = stage.memory
    return 0 if memory is None else memory.limit_bytes + memory.reserve_bytes
