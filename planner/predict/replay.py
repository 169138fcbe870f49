"""Simulates an assignment with its true micro-batch sizes and cache lengths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from llmpq.cost_model import Phase
from llmpq.planner.costs.cost_book import decode_times
from llmpq.planner.costs.links import Floats, Hops
from llmpq.planner.formulation.microbatch import sizes_of
from llmpq.planner.formulation.outcome import Assignment, Stage
from llmpq.planner.formulation.problem import Problem
from llmpq.planner.predict.pipeline_time import PhaseTimes
from llmpq.planner.predict.simulate import simulate


def replay(p: Problem, a: Assignment) -> PhaseTimes:
    """Return the simulated times of an assignment."""
    work = p.workload
    prefill_sizes = sizes_of(work.batch, a.prefill_microbatch)
    decode_sizes = sizes_of(work.batch, a.decode_microbatch)
    prefill = cache(lambda size: prefill_ring(p, a, size))
    decode = cache(lambda size: _rings_by_step(p, a, size))
    return simulate(
        lambda i, t: prefill(prefill_sizes[i]),
        lambda i, t: decode(decode_sizes[i])[t - 1],
        mp=len(prefill_sizes),
        md=len(decode_sizes),
        n=work.gen_len,
    )


Ring = list[tuple[float, float]]
"""(occupied, total) seconds of every stage and of the hop behind it."""


def prefill_ring(p: Problem, a: Assignment, size: int) -> Ring:
    """Return the times of a prefill micro-batch of `size` requests."""
    x = p.numbers(size, a.decode_microbatch)
    stages = [sum(float(x.prefill_s[i, s.cls, b]) for i, b in _layers(s)) for s in a.stages]
    stages[0] += float(x.ends_prefill_s[a.stages[0].cls, 0])
    stages[-1] += float(x.ends_prefill_s[a.stages[-1].cls, 1])
    return _ring(stages, _ways(a, x.hop_prefill, x.back_prefill))


def decode_ring(p: Problem, a: Assignment, size: int) -> tuple[Floats, Ring]:
    """Return the stages' times [J, n-1] at every step t = 1..n-1, and the hops behind them.

    A job of one token has one column.
    """
    x = p.numbers(a.prefill_microbatch, size)
    lengths = p.workload.prompt_len + np.arange(1, max(p.workload.gen_len, 2), dtype=np.float64)
    rows = [_decode_rows(p, a, position, size, lengths) for position in range(len(a.stages))]
    return np.array(rows), _ways(a, x.hop_decode, x.back_decode)


def _rings_by_step(p: Problem, a: Assignment, size: int) -> list[Ring]:
    rows, ways = decode_ring(p, a, size)
    return [_ring(stages, ways) for stages in rows.T.tolist()]


def _layers(stage: Stage) -> zip[tuple[int, int]]:
    return zip(range(stage.start, stage.end), stage.choices, strict=True)


def _ways(a: Assignment, hop: Hops, back: Hops) -> Ring:
    """Return (occupied, total) of the hop behind every stage; the last one goes to the first."""
    order = [stage.cls for stage in a.stages]
    if len(order) == 1:
        return [(0.0, 0.0)]
    ends = (order[-1], order[0])
    ways = [
        (float(hop.busy_s[link]), float(hop.total_s[link]))
        for link in zip(order, order[1:], strict=False)
    ]
    return [*ways, (float(back.busy_s[ends]), float(back.total_s[ends]))]


def _ring(stages: Sequence[float], ways: Sequence[tuple[float, float]]) -> Ring:
    """Interleave stages with the hops behind them."""
    ring: Ring = []
    for seconds, way in zip(stages, ways, strict=True):
        ring += [(seconds, seconds), way]
    return ring


def _decode_rows(
    p: Problem, a: Assignment, position: int, size: int, lengths: np.ndarray
) -> np.ndarray:
    """Time of one stage at every decode step."""
    stage, work = a.stages[position], p.workload
    device = p.classes[stage.cls].first
    total = np.zeros(len(lengths))
    for group, b in _layers(stage):
        start, end = p.groups[group]
        entry = p.costs.entry(device, "layer", Phase.DECODE, work, p.choices[b])
        total += (end - start) * decode_times(entry, lengths, size)
    if position == 0:
        entry = p.costs.entry(device, "embedding", Phase.DECODE, work)
        total += decode_times(entry, lengths, size)
    if position == len(a.stages) - 1:
        total += decode_times(p.costs.entry(device, "head", Phase.DECODE, work), lengths, size)
    return total * p.costs.factor(device)
