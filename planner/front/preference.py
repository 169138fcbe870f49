"""Which plan of the front of time and quality loss to take, without a unit: `--prefer`.

A plan's score is

    time * exp(weight * sum omega / omega of all layers at 4 bits)

so 1 % of time is worth 1 % / weight of what 4 bits everywhere would lose. At weight 1 (balanced)
this is the knee of the front: to its left less time costs relatively more quality than it saves, to
its right more quality costs relatively more time. The score compares two plans by their ratios
only, so neither the indicator's unit, nor the length of the job, nor a third plan that is allowed
as well changes which of them is preferred.

The logarithm of the score is concave in (time, omega): the least score is at a plan that also has
the least time + theta omega for some theta. Each solve at a theta proves a line below which there
is no plan; where these lines are below the best score's curve a better plan may lie, and the next
theta is the slope of the chord of the curve over that range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from llmpq.errors import DoesNotFitError
from llmpq.planner.problem.problem import Problem
from llmpq.plans.plan import Prefer

WEIGHTS: dict[Prefer, float] = {"quality": 300.0, "balanced": 1.0, "speed": 0.01}
"""What losing as much as 4 bits everywhere counts for, in the logarithm of time."""
TOLERANCE = 0.01
"""Relative distance of a score from the least one up to which thetas are no longer searched."""
MOST_SOLVES = 6
STEEPEST = 1000.0
"""Largest theta, relative to the one at which the best plan's score has its slope."""

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Scored(Generic[Found]):
    """A plan that is the best one for its theta, or the best that was found."""

    plan: Found
    theta: float
    time_s: float
    omega: float
    bound: float | None
    """No plan has a lower time + theta omega."""


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Time and sum of omega of some plan, or near those of one."""

    time_s: float
    omega: float


@dataclass(frozen=True, kw_only=True)
class Corner:
    """What is known before any solve: no plan is faster, or outside this range of sum omega."""

    time_s: float
    omega_low: float
    omega_high: float


def preferred(
    solve: Callable[[float], Scored[Found]],
    *,
    price: float,
    guess: StartPoint,
    corner: Corner | None,
    late: Callable[[], bool] = lambda: False,
) -> Scored[Found]:
    """Return the plan with the least time * exp(price * omega), within TOLERANCE of it.

    `solve` returns the best plan at a theta, `guess` gives the first one. Without a `corner`, or
    where solves prove nothing, thetas follow the best plan until it stays the same.
    """
    curve = _Curve(price, _Curve(price, 0.0).score(guess.time_s, guess.omega))
    lines = None if corner is None else _Lines(corner)
    best: Scored[Found] | None = None
    tried: list[float] = []
    tangent = price * guess.time_s
    slope = tangent if lines is None else lines.next_slope(curve)
    theta: float | None = tangent if slope is None else min(slope, STEEPEST * tangent)
    while theta is not None:
        tried.append(theta)
        try:
            found = solve(theta)
        except DoesNotFitError:
            if best is None:
                raise
            break  # out of time
        if best is None or curve.score(found.time_s, found.omega) < curve.score(
            best.time_s, best.omega
        ):
            best = found
        if price == 0.0 or len(tried) == MOST_SOLVES or late():
            break
        curve = _Curve(price, curve.score(best.time_s, best.omega))
        slope = tangent = price * best.time_s
        if lines is not None and found.bound is not None:
            lines.known.append((theta, found.bound))
            slope = lines.next_slope(curve)
        theta = None if slope is None else _untried(min(slope, STEEPEST * tangent), tangent, tried)
    assert best is not None, "the first theta is always solved"
    return best


def _untried(theta: float, tangent: float, tried: Sequence[float]) -> float | None:
    """Return the first of two thetas that is far from those tried, if any is."""
    for wanted in (theta, tangent):
        if not any(abs(wanted - old) <= 1e-3 * old for old in tried):
            return wanted
    return None


def look_around(problems: Sequence[Problem], price: float) -> tuple[StartPoint, Corner | None]:
    """Return the best simple plan of problems that differ by their KV precision, and a corner.

    No corner where layers differ in shape: the quick bounds are of layers that are alike.
    """
    from llmpq.planner.evaluate.fits import fits
    from llmpq.planner.evaluate.objective import sum_omega, value
    from llmpq.planner.exact.bounds.pairs import PairTables, quick_bound
    from llmpq.planner.exact.start.starts import first_plans

    free = [p.with_changes(theta=0.0) for p in problems]
    finite = [np.where(p.open, p.omega, np.nan) for p in free]
    corner = Corner(
        time_s=min(quick_bound(p) for p in free),
        omega_low=min(float(np.nanmin(table, axis=1).sum()) for table in finite),
        omega_high=max(float(np.nanmax(table, axis=1).sum()) for table in finite),
    )
    if not all(p.numbers(*p.pairs[0]).uniform for p in free):
        return StartPoint(time_s=corner.time_s, omega=corner.omega_high), None
    found = [
        StartPoint(time_s=value(p, plan), omega=sum_omega(p, plan))
        for p in free
        for plan in first_plans(p, PairTables(p))
        if fits(p, plan)
    ]
    curve = _Curve(price, 0.0)
    best = min(found, key=lambda guess: curve.score(guess.time_s, guess.omega), default=None)
    return best or StartPoint(time_s=corner.time_s, omega=corner.omega_high), corner


@dataclass(frozen=True)
class _Curve:
    """Points (omega, time) of one score, given as its logarithm."""

    price: float
    level: float

    def score(self, time_s: float, omega: float) -> float:
        """Return the logarithm of the score of a point."""
        return math.log(max(time_s, 1e-12)) + self.price * omega

    def time_s(self, omega: float) -> float:
        """Return the curve's time at a sum of omega, a little below it."""
        return math.exp(min(self.level - TOLERANCE - self.price * omega, 600.0))


class _Lines:
    """Lower bounds of time by sum omega: the corner's and those that solves proved."""

    def __init__(self, corner: Corner) -> None:
        self.corner = corner
        self.known: list[tuple[float, float]] = [(0.0, corner.time_s)]

    def next_slope(self, curve: _Curve) -> float | None:
        """Return the slope of the curve's chord where a better plan may lie, None if nowhere."""
        points = self._turns()
        worst = min(points, key=lambda omega: self._above(curve, omega))
        if self._above(curve, worst) >= 0:
            return None
        at = points.index(worst)
        low, high = self._edge(curve, points[at::-1]), self._edge(curve, points[at:])
        if not high - low > 1e-12 * max(high, 1e-300):
            return curve.price * curve.time_s(low)
        return (curve.time_s(low) - curve.time_s(high)) / (high - low)

    def least_time_s(self, omega: float) -> float:
        """Return a time below which there is no plan of this sum of omega."""
        return max(bound - theta * omega for theta, bound in self.known)

    def _above(self, curve: _Curve, omega: float) -> float:
        """Return how far the lines are above the curve, in the logarithm of time."""
        return math.log(max(self.least_time_s(omega), 1e-12)) - math.log(
            max(curve.time_s(omega), 1e-300)
        )

    def _turns(self) -> list[float]:
        """Return every sum of omega at which two lines cross, and the corner's."""
        low, high = self.corner.omega_low, self.corner.omega_high
        found = {low, high}
        for i, (theta, bound) in enumerate(self.known):
            for other, its in self.known[:i]:
                if theta != other:
                    found.add((bound - its) / (theta - other))
        return sorted(omega for omega in found if low <= omega <= high)

    def _edge(self, curve: _Curve, points: list[float]) -> float:
        """Walk from a point below the curve; return where the lines cross it, else the end."""
        for inside, outside in zip(points, points[1:], strict=False):
            if self._above(curve, outside) >= 0:
                for _ in range(60):
                    middle = (inside + outside) / 2
                    if self._above(curve, middle) >= 0:
                        outside = middle
                    else:
                        inside = middle
                return inside
        return points[-1]
