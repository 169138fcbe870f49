"""Replays a plan micro-batch by micro-batch: the slow, plain check of the closed form.

A pipeline is a ring of resources (stage, hop, stage, ..., stage, hop back); each serves one
micro-batch at a time, in order of arrival. The pure latency of a hop delays its own micro-batch
only. Prefill ends before decode starts. Micro-batches may be ragged, and every decode step uses its
true cache length.

Beside it, without events, how long a plan takes step by step: what the closed form of the search
leaves out. The search takes a stage's mean time over all tokens, and a smaller last micro-batch
where it counts most (objective.py). Here every token has the slowest stage of its own cache length
- a mean of the slowest is not below the slowest mean - and the last micro-batch its true size.

    prefill  every chunk of every micro-batch through the stages, first come first served
    decode   for every token the larger of a round trip and the fullest stage's work for all; the
             last token of every micro-batch as chunks are
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from llmpq.costs.cost_model import Phase
from llmpq.planner.costs.cost_book import chunk_times, decode_times
from llmpq.planner.costs.links import Floats, Hops
from llmpq.planner.evaluate.objective import PhaseTimes, job_time
from llmpq.planner.problem.numbers import sizes_of
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.workload import prompt_chunks

Times = Callable[[int, int], Sequence[tuple[float, float]]]
"""(micro-batch index, decode step t) -> at each resource, seconds it is occupied and seconds until
the micro-batch is at the next one; the last resource is the hop back."""


def simulate(prefill: Times, decode: Times, *, mp: int, md: int, n: int) -> PhaseTimes:
    """Return when the first and the last token of the whole batch are known."""
    free: list[float] = []
    done = 0.0
    for i in range(mp):
        times = prefill(i, 0)
        free = free or [0.0] * len(times)
        done = max(done, _walk(times if n > 1 else times[:-1], free, 0.0))
    if n < 2:
        return PhaseTimes(prefill_s=done, decode_s=0.0)
    start = done
    ready = [start] * md
    free = [start] * len(decode(0, 1))
    for t in range(1, n):
        for i in range(md):
            times = decode(i, t)
            ready[i] = _walk(times if t < n - 1 else times[:-1], free, ready[i])
    return PhaseTimes(prefill_s=start, decode_s=max(ready) - start)


def _walk(times: Sequence[tuple[float, float]], free: list[float], now: float) -> float:
    """Send one micro-batch through the resources; update when each is free; return its arrival."""
    for k, (occupied, total) in enumerate(times):
        begin = max(now, free[k])
        free[k] = begin + occupied
        now = begin + total
    return now


def replay(p: Problem, a: Assignment) -> PhaseTimes:
    """Return the simulated times of an assignment."""
    work = p.workload
    prefill_sizes = sizes_of(work.batch, a.prefill_microbatch)
    decode_sizes = sizes_of(work.batch, a.decode_microbatch)
    prefill = cache(lambda size: prefill_rings(p, a, size))
    chunks = p.chunks_of_prompt
    decode = cache(lambda size: _rings_by_step(p, a, size))
    return simulate(
        lambda i, t: prefill(prefill_sizes[i // chunks])[i % chunks],
        lambda i, t: decode(decode_sizes[i])[t - 1],
        mp=len(prefill_sizes) * chunks,
        md=len(decode_sizes),
        n=work.gen_len,
    )


Ring = list[tuple[float, float]]
"""(occupied, total) seconds of every stage and of the hop behind it."""


def prefill_rings(p: Problem, a: Assignment, size: int) -> list[Ring]:
    """Return the times of each step that the prompts of `size` requests take together."""
    work, last = p.workload, len(a.stages) - 1
    chunks = prompt_chunks(work.prompt_len, p.chunk)
    rows = np.zeros((len(a.stages), len(chunks)))
    for position, stage in enumerate(a.stages):
        device = p.classes[stage.cls].first
        ends = [part for part, at in (("embedding", 0), ("head", last)) if at == position]
        entries = [p.costs.entry(device, part, Phase.PREFILL, work) for part in ends]  # type: ignore[arg-type]
        for group, b in _layers(stage):
            layer = p.costs.entry(device, "layer", Phase.PREFILL, work, p.choices[b])
            entries += [layer] * (p.groups[group][1] - p.groups[group][0])
        times = {id(entry): chunk_times(entry, work, size, p.chunk) for entry in entries}
        rows[position] = sum(times[id(entry)] for entry in entries) * p.costs.factor(device)
    row, back = p.spec.hop_features * work.dtype_bytes, p.class_links.hops(size * 8)
    hops = [p.class_links.hops(size * tokens * row) for _, tokens in chunks]
    rings = zip(rows.T.tolist(), hops, strict=True)
    return [_ring(stages, _ways(a, hop, back)) for stages, hop in rings]


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


REPORTED_DIFFERENCE = 0.005
"""Relative distance of the closed form above which a plan predicts its time step by step."""


def step_by_step_time(p: Problem, a: Assignment) -> PhaseTimes:
    """Return the times of an assignment with its true micro-batch sizes and cache lengths."""
    n, batch = p.workload.gen_len, p.workload.batch
    sizes = sizes_of(batch, a.prefill_microbatch)
    whole, last = (np.array(prefill_rings(p, a, size)) for size in (sizes[0], sizes[-1]))
    ways = slice(None) if n > 1 else slice(-1)
    prefill = _drained([*[whole[:, ways]] * (len(sizes) - 1), last[:, ways]])
    if n < 2:
        return PhaseTimes(prefill_s=prefill, decode_s=0.0)
    sizes = sizes_of(batch, a.decode_microbatch)
    whole_t, last_t = (_by_step(p, a, size) for size in (sizes[0], sizes[-1]))
    held = (len(sizes) - 1) * whole_t[..., 0] + last_t[..., 0]
    periods = np.maximum(held.max(axis=1), whole_t[..., 1].sum(axis=1))[:-1]
    drained = _drained([*[whole_t[-1:, :-1]] * (len(sizes) - 1), last_t[-1:, :-1]])
    return PhaseTimes(prefill_s=prefill, decode_s=float(periods.sum()) + drained)


def reported_time(p: Problem, a: Assignment) -> PhaseTimes:
    """Return what a plan predicts: the closed form, or where that is not true what is."""
    predicted, stepwise = job_time(p, a), step_by_step_time(p, a)
    far = abs(stepwise.total_s - predicted.total_s) > REPORTED_DIFFERENCE * predicted.total_s
    return stepwise if far else predicted


def step_note(p: Problem, a: Assignment, known: PhaseTimes | None = None) -> str:
    """Return what a plan says where it predicts another time than the search's, or nothing.

    `known`: what it predicts, where that was computed before.
    """
    closed, reported = job_time(p, a).total_s, (known or reported_time(p, a)).total_s
    if reported == closed:
        return ""
    above = reported > closed
    why = (
        "the slowest stage is not the same for all chunks of a prompt and all tokens"
        if above
        else "the last micro-batch or chunk is smaller"
    )
    return (
        f"the time is predicted step by step, {abs(reported / closed - 1):.1%} "
        f"{'more' if above else 'less'} than the search counts: {why}"
    )


def _by_step(p: Problem, a: Assignment, size: int) -> Floats:
    """[n-1, 2 J, 2] (occupied, total) of every stage and hop at every step t = 1..n-1."""
    rows, ways = decode_ring(p, a, size)
    ring = np.empty((rows.shape[1], 2 * len(rows), 2))
    ring[:, 0::2, :] = rows.T[:, :, None]
    ring[:, 1::2, :] = np.array(ways)[None]
    return ring


def _drained(rings: Sequence[Floats]) -> float:
    """Return when the last of many steps is through: each [steps, 2 J, 2] occupied and total.

    A resource is free again after step i at  max over j <= i of (j's arrival + occupied j to i).
    """
    steps = np.concatenate(rings)
    arrival = np.zeros(len(steps))
    for occupied, total in steps.transpose(1, 2, 0):
        until = np.cumsum(occupied)
        free = until + np.maximum.accumulate(arrival - until + occupied)
        arrival = free - occupied + total
    return float(arrival.max())
