"""Time one call: warm-up, then repeats until a share of a second is spent; medians, never means.

On a GPU the host runs ahead between two events, as the engine does: what is timed is the longer of
the device's work and the host's. A call that is not timed goes before, so that the device has work
while the host issues the first timed one.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from llmpq.profiler.timing.cases import CaseTime, Effort

WARM_UP = 2
MAX_REPEATS = 1000
LONG_BURST_S = 0.05
"""Calls on a GPU from which what the host does before its first kernel is nothing: none goes before
them."""
LONG_S = 4e-4
"""Calls on a GPU from which its power, and with it its clocks, may be those of load."""


def time_call(
    call: Callable[[], object], *, device: torch.device, effort: Effort, layers: int
) -> CaseTime:
    """Return the median seconds of `call`, divided by the `layers` it goes through."""
    samples = (_cuda_samples if device.type == "cuda" else _cpu_samples)(call, effort)
    return summarise([s / layers for s in samples], layers=layers)


def summarise(samples: list[float], *, layers: int = 1) -> CaseTime:
    """Return the median and the quartiles of repeated times."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return CaseTime(
        seconds=statistics.median(ordered),
        low_s=ordered[last // 4],
        high_s=ordered[last - last // 4],
        repeats=len(ordered),
        layers=layers,
    )


def _cpu_samples(call: Callable[[], object], effort: Effort) -> list[float]:
    """Time each call by itself; one longer than the whole effort is warmed up once.

    A call of one thread is timed by the thread's own clock, which stands still while another
    program has the core; more threads are timed by the wall clock.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for _ in range(WARM_UP):
        call()
        if clock() - begin > effort.seconds:
            break
    samples: list[float] = []
    begin = time.perf_counter()
    while _goes_on(samples, time.perf_counter() - begin, effort):
        if effort.rest_s:
            time.sleep(effort.rest_s)
        start = clock()
        call()
        samples.append(clock() - start)
    return samples


def _goes_on(samples: list[float], spent: float, effort: Effort) -> bool:
    """Whether another repeat is due: long calls stop after two, the rest after `min_repeats`."""
    if spent > 10 * effort.seconds and len(samples) >= 2:
        return False
    return len(samples) < effort.min_repeats or (
        spent < effort.seconds and len(samples) < MAX_REPEATS
    )


def _cuda_samples(call: Callable[[], object], effort: Effort) -> list[float]:
    """Time bursts between events, so that launch gaps of the host do not count.

    Weights, caches and indices are still being made on the caller's stream when this begins, and
    their memory is taken again there afterwards, also when a call failed: each stream waits for
    the other.
    """
    stream, callers = _timing_stream(), torch.cuda.current_stream()
    stream.wait_stream(callers)
    try:
        with torch.cuda.stream(stream):
            return _samples_on(stream, call, effort)
    finally:
        callers.wait_stream(stream)


def _samples_on(
    stream: torch.cuda.Stream, call: Callable[[], object], effort: Effort
) -> list[float]:
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        call()
        stream.synchronize()
        if time.perf_counter() - begin > effort.seconds:
            break
    once = _burst(call, stream, 1)
    sustained = once > LONG_S and effort.sustain_s > 0
    if sustained:
        _burst(call, stream, max(1, int(effort.sustain_s / once)))
    long = once >= LONG_BURST_S
    burst = max(1, min(50, int(effort.seconds / max(once, 1e-6) / effort.min_repeats)))
    samples = [once] if long and not sustained else []
    begin = time.perf_counter()
    while _goes_on(samples, time.perf_counter() - begin, effort):
        samples.append(_burst(call, stream, burst, follows=not long))
    return samples


@functools.cache
def _timing_stream() -> torch.cuda.Stream:
    """Return the stream of all timings: freed memory is reused by stream."""
    return torch.cuda.Stream()


def _burst(
    call: Callable[[], object], stream: torch.cuda.Stream, count: int, *, follows: bool = False
) -> float:
    """Return the device seconds of one of `count` back-to-back runs; `follows`: behind another."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    if follows:
        call()
    start.record(stream)
    for _ in range(count):
        call()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
