"""Time one call: warm-up, then repeats until a share of a second is spent; medians, never means.

On a GPU the call is captured in a CUDA graph where it can be, as the runtime does in decode, and
replayed between events; otherwise the host runs ahead between two events.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from llmpq.profiler.timing.cases import CaseTime

WARM_UP = 2
MAX_REPEATS = 1000
LONG_S = 4e-4
"""Calls on a GPU from which its power, and with it its clocks, may be those of load."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long one case is repeated."""

    seconds: float
    min_repeats: int
    rest_s: float = 0.0
    """Pause before every call on a CPU: a stage that has waited starts with cold caches."""
    sustain_s: float = 0.0
    """Load before a call of `LONG_S` is timed on a GPU, as prompts make it in a run."""


def time_call(
    call: Callable[[], object], *, device: torch.device, effort: Effort, layers: int, graph: bool
) -> CaseTime:
    """Return the median seconds of `call`, divided by the `layers` it goes through."""
    if device.type == "cuda":
        how: Literal["eager", "graph"] = "graph" if graph else "eager"
        samples = _cuda_samples(call, effort, graph=graph)
    else:
        how, samples = "eager", _cpu_samples(call, effort)
    return summarise([s / layers for s in samples], layers=layers, how=how)


def summarise(
    samples: list[float], *, layers: int = 1, how: Literal["eager", "graph"] = "eager"
) -> CaseTime:
    """Return the median and the quartiles of repeated times."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return CaseTime(
        seconds=statistics.median(ordered),
        low_s=ordered[last // 4],
        high_s=ordered[last - last // 4],
        repeats=len(ordered),
        layers=layers,
        how=how,
    )


def _cpu_samples(call: Callable[[], object], effort: Effort) -> list[float]:
    """Time each call alone; a call longer than the whole effort is not warmed up more than once.

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


def _cuda_samples(call: Callable[[], object], effort: Effort, *, graph: bool) -> list[float]:
    """Time bursts between events, so that launch gaps of the host do not count.

    Weights, caches and indices are still being made on the caller's stream when this begins, and
    their memory is taken again there afterwards, also when a call failed: each stream waits for
    the other.
    """
    stream, callers = _timing_stream(), torch.cuda.current_stream()
    stream.wait_stream(callers)
    try:
        with torch.cuda.stream(stream):
            return _samples_on(stream, call, effort, graph=graph)
    finally:
        callers.wait_stream(stream)


def _samples_on(
    stream: torch.cuda.Stream, call: Callable[[], object], effort: Effort, *, graph: bool
) -> list[float]:
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        call()
        stream.synchronize()
        if time.perf_counter() - begin > effort.seconds:
            break
    run = _captured(call) if graph else call
    once = _burst(run, stream, 1)
    sustained = once > LONG_S and effort.sustain_s > 0
    if sustained:
        _burst(run, stream, max(1, int(effort.sustain_s / once)))
    burst = max(1, min(50, int(effort.seconds / max(once, 1e-6) / effort.min_repeats)))
    samples = [once] if graph and burst == 1 and not sustained else []
    begin = time.perf_counter()
    while _goes_on(samples, time.perf_counter() - begin, effort):
        samples.append(_burst(run, stream, burst))
    return samples


def capture(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return what replays `call` on the current stream of a GPU, captured after warming up."""
    stream, callers = _timing_stream(), torch.cuda.current_stream(device)
    stream.wait_stream(callers)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
        stream.synchronize()
        replay = _captured(call)
    callers.wait_stream(stream)
    held = (call, replay)  # the graph reads tensors that only the call holds
    return lambda: held[1]()


@functools.cache
def _timing_stream() -> torch.cuda.Stream:
    """Return the stream of all timings: freed memory is kept and reused by stream."""
    return torch.cuda.Stream()


@functools.cache
def _pool_keeper() -> torch.cuda.CUDAGraph:
    """Return a graph whose memory all others share; one at a time is used, this one never."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")
    graph.capture_end()
    return graph


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """Record a call on the current stream; `torch.cuda.graph` would also empty the caches."""
    captured = torch.cuda.CUDAGraph()
    captured.capture_begin(pool=_pool_keeper().pool(), capture_error_mode="thread_local")
    try:
        call()
    finally:
        captured.capture_end()
    return captured.replay


def _burst(run: Callable[[], object], stream: torch.cuda.Stream, count: int) -> float:
    """Return the device seconds of one of `count` back-to-back runs."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record(stream)
    for _ in range(count):
        run()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
