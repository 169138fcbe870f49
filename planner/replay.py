"""Simulates an assignment with its true micro-batch sizes and cache lengths."""

from __future__ import annotations

from functools import cache

import numpy as np

from llmpq.cost_model import Phase
from llmpq.planner.costs import decode_times
from llmpq.planner.microbatch import sizes_of
from llmpq.planner.outcome import Assignment, Stage
from llmpq.planner.pipeline_time import PhaseTimes
from llmpq.planner.problem import Problem
from llmpq.planner.simulate import simulate


def replay(p: Problem, a: Assignment) -> PhaseTimes:
    """Return the simulated times of an assignment."""
    work = p.workload
    prefill_sizes = sizes_of(work.batch, a.prefill_microbatch)
    decode_sizes = sizes_of(work.batch, a.decode_microbatch)
    lengths = work.prompt_len + np.arange(1, max(work.gen_len, 2), dtype=np.float64)

    @cache
    def prefill_ring(size: int) -> tuple[float, ...]:
        x = p.numbers(size, a.decode_microbatch)
        stages = [sum(float(x.prefill_s[i, s.cls, b]) for i, b in _layers(s)) for s in a.stages]
        stages[0] += float(x.ends_prefill_s[a.stages[0].cls, 0])
        stages[-1] += float(x.ends_prefill_s[a.stages[-1].cls, 1])
        return _ring(a, stages, x.hop_prefill_s, x.back_prefill_s)

    @cache
    def decode_ring(size: int) -> np.ndarray:
        x = p.numbers(a.prefill_microbatch, size)
        rows = [_decode_rows(p, a, position, size, lengths) for position in range(len(a.stages))]
        ring = _ring(a, [0.0] * len(a.stages), x.hop_decode_s, x.back_decode_s)
        table = np.repeat(np.array(ring)[:, None], len(lengths), axis=1)
        table[: 2 * len(rows) : 2] = rows
        return table

    return simulate(
        lambda i, t: prefill_ring(prefill_sizes[i]),
        lambda i, t: decode_ring(decode_sizes[i])[:, t - 1].tolist(),
        mp=len(prefill_sizes),
        md=len(decode_sizes),
        n=work.gen_len,
    )


def _layers(stage: Stage) -> zip[tuple[int, int]]:
    return zip(range(stage.start, stage.end), stage.choices, strict=True)


def _ring(
    a: Assignment, stages: list[float], hops: np.ndarray, back: np.ndarray
) -> tuple[float, ...]:
    """Interleave stages with the hops behind them; the last hop goes back to the first stage."""
    ring: list[float] = []
    for position, seconds in enumerate(stages):
        ring.append(seconds)
        if position + 1 < len(stages):
            ring.append(float(hops[a.stages[position].cls, a.stages[position + 1].cls]))
    alone = len(stages) == 1
    ring.append(0.0 if alone else float(back[a.stages[-1].cls, a.stages[0].cls]))
    return tuple(ring)


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
