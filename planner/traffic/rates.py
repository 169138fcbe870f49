"""The highest rate of a traffic that engines keep within limits, by simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.planner.traffic.simulated import EngineModel, simulate
from llmpq.service_measures import ATTAINMENT, ServiceLimits, ServiceMeasures
from llmpq.traffic import Arrival, at_rate

RATE_STEP = 0.03
"""Relative distance to which the highest rate is found."""
MOST_TRIES = 12


@dataclass(frozen=True, kw_only=True)
class RateFound:
    """The highest rate that was seen within the limits, and how requests are served at it."""

    rate_per_s: float
    """0 where not even requests far apart are within the limits."""
    measures: ServiceMeasures


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
) -> RateFound:
    """Return the highest rate at which `ATTAINMENT` of the requests are within the limits.

    Without limits it is the rate at which all are done where they all come at once, which is the
    most with limits, too: more often than that no few requests show what many would wait. Found
    by bisection, from a guess where there is one.
    """
    at_once = measured_at(models, traffic, limits, math.inf)
    most = at_once.requests_per_s
    if limits.ttft_s is None and limits.tpot_s is None:
        return RateFound(rate_per_s=most, measures=at_once)
    most = max(most, guess_per_s or 0.0)
    low, high, best = 0.0, math.inf, None
    rate = guess_per_s or most
    for _ in range(MOST_TRIES):
        found = measured_at(models, traffic, limits, rate)
        if found.attained >= ATTAINMENT:
            low, best = rate, found
        else:
            high, worst = rate, found
        if low >= most or (low and high - low <= RATE_STEP * high):
            break
        middle = (low + high) / 2 if low else high / 2
        rate = min(most, low * 1.5) if math.isinf(high) else middle
    if best is None:
        return RateFound(rate_per_s=0.0, measures=worst)
    return RateFound(rate_per_s=low, measures=best)
