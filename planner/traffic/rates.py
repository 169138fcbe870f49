"""The highest rate of a traffic that engines keep within limits, by simulation."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.planner.traffic.simulated import EngineModel, simulate
from llmpq.service_measures import ATTAINMENT, ServiceLimits, ServiceMeasures
from llmpq.traffic import Arrival, at_rate

RATE_STEP = 0.05
"""Relative distance to which the highest rate is found."""
MOST_TRIES = 12
DOWN = 0.7
"""Of a rate that is too high, the next to try until one is kept."""


@dataclass(frozen=True, kw_only=True)
class RateFound:
    """The highest rate that was seen within the limits, and how requests are served at it."""

    rate_per_s: float
    """0 where not even requests far apart are within the limits."""
    measures: ServiceMeasures


APART = 1e-4
"""Of a rate: requests at it are alone."""


def kept_apart(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    rate_per_s: float,
) -> bool:
    """Whether requests are within the limits where each is served alone; if not, at no rate."""
    alone = measured_at(models, traffic, limits, APART * rate_per_s)
    return alone.attained >= ATTAINMENT


def measured_at(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    rate_per_s: float | None = None,
) -> ServiceMeasures:
    """Return how engines serve a traffic, at another rate than its own if one is given."""
    moved = traffic if rate_per_s is None else at_rate(traffic, rate_per_s)
    return ServiceMeasures.of(simulate(models, moved), limits)


def highest_rate(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    *,
    guess_per_s: float | None = None,
    deadline_s: float = math.inf,
) -> RateFound:
    """Return the highest rate at which `ATTAINMENT` of the requests are within the limits.

    Without limits it is the rate at which requests end that all arrive at once. With limits no
    higher rate is tried either: beyond it a queue grows for ever, which a short trace does not
    show. Found by bisection that begins at `guess_per_s`, a guess of that highest rate.
    `deadline_s`: the time of `time.perf_counter` from which the best rate so far is returned.
    """
    unlimited = limits.ttft_s is None and limits.tpot_s is None
    if unlimited or guess_per_s is None:
        at_once = measured_at(models, traffic, limits, math.inf)
        guess_per_s = at_once.requests_per_s
        if unlimited:
            return RateFound(rate_per_s=guess_per_s, measures=at_once)
    most = rate = guess_per_s
    low, high, best = 0.0, math.inf, None
    for _ in range(MOST_TRIES):
        found = measured_at(models, traffic, limits, rate)
        if found.attained >= ATTAINMENT:
            low, best = rate, found
        else:
            high, worst = rate, found
            if not low and rate == most and not kept_apart(models, traffic, limits, rate):
                break
        near = high - low <= RATE_STEP * high or time.perf_counter() > deadline_s
        if low >= most or (low and near):
            break
        rate = (low + high) / 2 if low else high * DOWN
    if best is None:
        return RateFound(rate_per_s=0.0, measures=worst)
    return RateFound(rate_per_s=low, measures=best)
