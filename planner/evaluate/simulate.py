"""Replays a plan micro-batch by micro-batch: the slow, plain check of the closed form.

A pipeline is a ring of resources (stage, hop, stage, ..., stage, hop back); each serves one
micro-batch at a time, in order of arrival. What a hop only delays keeps nobody else waiting.
Prefill ends before decode starts. Micro-batches may be ragged, and every decode step uses its true
cache length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmpq.planner.evaluate.pipeline_time import PhaseTimes

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
