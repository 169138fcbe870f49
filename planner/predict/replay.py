"""Simulates an assignment with its true micro-batch sizes and cache lengths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from llmpq.cost_model import Phase
from llmpq.planner.costs.cost_book import decode_times
from llmpq.planner.costs.links import Hops
from llmpq.planner.microbatch import sizes_of
from llmpq.planner.outcome import Assignment, Stage
from llmpq.planner.predict.pipeline_time import PhaseTimes
from llmpq.planner.predict.simulate import simulate
from llmpq.planner.problem import Problem


def replay(p: Problem, a: Assignment) -> PhaseTimes:
    """Return the simulated times of an assignment."""
    work = p.workload
    prefill_sizes = sizes_of(work.batch, a.prefill_microbatch)
    decode_sizes = sizes_of(work.batch, a.decode_microbatch)
    lengths = work.prompt_len + np.arange(1, max(work.gen_len, 2), dtype=np.float64)

    @cache
    def prefill_ring(size: int) -> list[tuple[float, float]]:
        x = p.numbers(size, a.decode_microbatch)
        stages = [sum(float(x.prefill_s[i, s.cls, b]) for i, b in _layers(s)) for s in a.stages]
        stages[0] += float(x.ends_prefill_s[a.stages[0].cls, 0])
        stages[-1] += float(x.ends_prefill_s[a.stages[-1].cls, 1])
        return _ring(stages, _ways(a, x.hop_prefill, x.back_prefill))

    @cache
    def decode_rings(size: int) -> list[list[tuple[float, float]]]:
        x = p.numbers(a.prefill_microbatch, size)
        rows = [_decode_rows(p, a, position, size, lengths) for position in range(len(a.stages))]
        ways = _ways(a, x.hop_decode, x.back_decode)
        return [_ring(stages, ways) for stages in np.array(rows).T.tolist()]

    return simulate(
        lambda i, t: prefill_ring(prefill_sizes[i]),
        lambda i, t: decode_rings(decode_sizes[i])[t - 1],
        mp=len(prefill_sizes),
        md=len(decode_sizes),
        n=work.gen_len,
    )


def _layers(stage: Stage) -> zip[tuple[int, int]]:
    return zip(range(stage.start, stage.end), stage.choices, strict=True)


def _ways(a: Assignment, hop: Hops, back: Hops) -> list[tuple[float, float]]:
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


def _ring(
    stages: Sequence[float], ways: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Interleave stages with the hops behind them."""
    ring: list[tuple[float, float]] = []
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
