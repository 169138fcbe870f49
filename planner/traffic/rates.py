"""The highest rate of a traffic that engines keep within limits, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmpq.planner.simulated import EngineModel, simulate
from llmpq.planner.work_clock import now_s, spend_s
from llmpq.service_measures import ATTAINMENT, ServiceLimits, ServiceMeasures
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.traffic import Arrival, at_rate, repeated

RATE_STEP = 0.05
"""Relative distance to which the highest rate is found."""
MOST_TRIES = 12
DOWN = 0.7
"""Of a rate that is too high, the next to try until one is kept."""
ASKED_APART = 2
"""Rates that are too high before requests are tried alone."""
FAR_DOWN = 0.4
"""Of a rate that is too high behind those."""
STEP_S = 2e-4
"""Seconds of work of a simulated step (0.22 ms of a core, 2026-11)."""
GENERATIONS = 3
"""Requests by which a rate is found, in those that run at once: fewer show no queue."""


@dataclass(frozen=True, kw_only=True)
class RateFound:
    """The highest rate that was seen within the limits, and how requests are served at it."""

    rate_per_s: float
    """0 where not even requests far apart are within the limits."""
    measures: ServiceMeasures
    """Of the traffic as long as it is."""


APART = 1e-4
"""Of a rate: requests at it are alone."""


def kept_apart(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    rate_per_s: float,
    *,
    deadline_s: float = math.inf,
) -> bool:
    """Whether requests are within the limits where each is served alone; if not, at no rate."""
    alone = measured_at(models, traffic, limits, APART * rate_per_s, deadline_s=deadline_s)
    return alone.attained >= ATTAINMENT


def _too_many_late(
    models: Sequence[EngineModel], traffic: Sequence[Arrival], limits: ServiceLimits
) -> bool:
    """Whether more prompts than may be are late even alone: whether the shortest of so many is.

    Not of prompts that begin alike: what the prefix cache has of a long one makes it quick.
    """
    if limits.ttft_s is None or any(one.blocks for one in traffic):
        return False
    longest_first = sorted(traffic, key=lambda one: one.prompt_tokens, reverse=True)
    may_be_late = int((1 - ATTAINMENT) * len(traffic) + 1e-9)
    alone = measured_at(models, [longest_first[min(may_be_late, len(traffic) - 1)]], limits)
    return alone.ttft_s.mean > limits.ttft_s


def measured_at(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    rate_per_s: float | None = None,
    *,
    deadline_s: float = math.inf,
) -> ServiceMeasures:
    """Return how engines serve a traffic, at another rate than its own if one is given."""
    moved = traffic if rate_per_s is None else at_rate(traffic, rate_per_s)
    return ServiceMeasures.of(simulate(models, moved, late=_late_after(deadline_s)), limits)


def requests_at_once(models: Sequence[EngineModel], traffic: Sequence[Arrival]) -> int:
    """Return how many requests of a traffic engines run at once: by their rows, by their pools."""
    mean = sum(one.prompt_tokens + one.output_tokens for one in traffic) / len(traffic)
    pools = (one.limits.num_blocks * BLOCK_TOKENS / mean for one in models)
    return sum(
        max(1, min(one.limits.max_rows, int(room))) for one, room in zip(models, pools, strict=True)
    )


def highest_rate(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    *,
    guess_per_s: float | None = None,
    deadline_s: float = math.inf,
) -> RateFound:
    """Return the highest rate at which `ATTAINMENT` of the requests are within the limits.

    Without limits it is the rate at which requests end that all arrive at once. With limits it is
    a rate that lasts: a traffic that ends before engines are full says nothing of it, so it is
    repeated to `GENERATIONS` times the requests that run at once, of which the first are left out,
    and no rate counts that is above the one at which requests end in full engines. Found by
    bisection that begins at `guess_per_s`, a guess of that highest rate. `deadline_s`: of
    the clock of searches, from when on the best rate so far is returned, or `TimeoutError` is
    raised where none was found. The measures are of the traffic itself at the rate.
    """
    if limits.ttft_s is None and limits.tpot_s is None:
        at_once = measured_at(models, traffic, limits, math.inf, deadline_s=deadline_s)
        return RateFound(rate_per_s=at_once.requests_per_s, measures=at_once)
    if _too_many_late(models, traffic, limits):
        never = measured_at(models, traffic, limits, guess_per_s, deadline_s=deadline_s)
        return RateFound(rate_per_s=0.0, measures=never)
    low, rate = _bisected(models, traffic, limits, guess_per_s, deadline_s)
    return RateFound(
        rate_per_s=low, measures=measured_at(models, traffic, limits, low if low else rate)
    )


def _bisected(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    guess_per_s: float | None,
    deadline_s: float,
) -> tuple[float, float]:
    """Return the highest rate that lasts, 0 where there is none, and the last that was tried."""
    running = requests_at_once(models, traffic)
    long = repeated(traffic, GENERATIONS * running)
    most = _full_rate(models, long, running, deadline_s)
    rate = most if guess_per_s is None else min(most, guess_per_s)
    low, high = 0.0, math.inf
    for tries in range(MOST_TRIES):
        try:
            lasts = _lasts(models, at_rate(long, rate), limits, running, deadline_s)
            never = not (lasts or low) and tries == ASKED_APART
            if never and not kept_apart(models, traffic, limits, rate, deadline_s=deadline_s):
                break
        except TimeoutError:
            if low:
                break
            raise
        low, high = (rate, high) if lasts else (low, rate)
        if low >= most or (low and high - low <= RATE_STEP * high):
            break
        down = DOWN if tries < ASKED_APART else FAR_DOWN
        rate = min(most, low / DOWN, (low + high) / 2) if low else high * down
    return low, rate


def _full_rate(
    models: Sequence[EngineModel], long: Sequence[Arrival], running: int, deadline_s: float
) -> float:
    """Return the rate at which requests end while engines are full: none lasts above it."""
    served = simulate(models, at_rate(long, math.inf), late=_late_after(deadline_s))
    ends = sorted(one.end_s for one in served)
    last = running * (len(ends) // running - 1)
    return (last - running) / max(ends[last] - ends[running], 1e-9)


def _lasts(
    models: Sequence[EngineModel],
    long: Sequence[Arrival],
    limits: ServiceLimits,
    running: int,
    deadline_s: float,
) -> bool:
    """Whether the limits are kept behind the first requests, which find engines empty."""
    settled = simulate(models, long, late=_late_after(deadline_s))[running:]
    return ServiceMeasures.of(settled, limits).attained >= ATTAINMENT


def _late_after(deadline_s: float) -> Callable[[], bool]:
    """Return what counts a simulated step, and says whether the time is over."""

    def late() -> bool:
        spend_s(STEP_S)
        return now_s() > deadline_s

    return late
