"""Ways to ask for quality: a budget on the sum of omega, or the front of time against omega.

For any theta >= 0, min (time + theta omega) - theta Q is a lower bound of the fastest time within a
budget Q; the best theta is found by bisection on the class relaxation, and the label search then
closes what is left. The front's supported points are the optima of some theta; between two known
points the theta that makes them equal finds the next one, or proves that there is none.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from llmpq.planner.exact.columns import TooManyColumns
from llmpq.planner.exact.completion import MAX_STATES, Space, num_states
from llmpq.planner.exact.form import make_form
from llmpq.planner.exact.relaxation import ClassRelaxation
from llmpq.planner.exact.search import Search, solve_exact
from llmpq.planner.ilp import solve_ilp
from llmpq.planner.outcome import OPTIMAL_GAP, Infeasible, Outcome
from llmpq.planner.pipeline_time import sum_omega, value
from llmpq.planner.problem import Problem

BISECTIONS = 14
MAX_POINTS = 25
"""Points of the front to list at most."""


def solve_budget(
    p: Problem, budget: float, *, time_limit_s: float = 60.0, gap: float = 1e-6
) -> Outcome:
    """Return the fastest plan whose sum of omega is at most `budget`, with its proof."""
    start = time.perf_counter()
    exact = num_states(p) <= MAX_STATES and p.numbers(*p.pairs[0]).uniform
    free = p.with_changes(theta=0.0)
    if not exact:
        return solve_ilp(free, time_limit_s=time_limit_s, gap=gap, budget=budget)
    theta = best_theta(p, budget)
    priced = p.with_changes(theta=theta)
    try:
        search = Search(priced, Space(p), start + time_limit_s, gap, budget=budget)
    except TooManyColumns:
        return solve_ilp(free, time_limit_s=time_limit_s, gap=gap, budget=budget)
    finest = 1e6 / max(float(p.omega.max()), 1e-9)
    for candidate in (theta, theta * 1.05, theta * 1.5, theta * 4.0, finest):
        try:
            found = solve_exact(p.with_changes(theta=candidate), time_limit_s=5.0, gap=1e-3)
        except Infeasible:
            break
        search.offer(found.assignment)
        if search.best is not None:
            break
    bound = search.run() - theta * budget
    if search.best is None and search.stuck:
        raise Infeasible(
            f"no plan with a sum of omega of at most {budget:g} was found within "
            f"{time_limit_s:g} s; give a longer --time-limit"
        )
    if search.best is None:
        raise Infeasible(f"no plan has a sum of omega of at most {budget:g}")
    seconds = value(free, search.best)
    return Outcome(
        method="exact",
        status="optimal" if seconds - bound <= OPTIMAL_GAP * seconds else "feasible",
        assignment=search.best,
        value=seconds,
        bound=bound,
        seconds=time.perf_counter() - start,
        note=f"fastest with sum omega <= {budget:g} (theta at the budget {theta:.3g})",
    )


def best_theta(p: Problem, budget: float) -> float:
    """Return the multiplier that gives the largest relaxed bound within the budget."""

    def bound(theta: float) -> float:
        priced = p.with_changes(theta=theta)
        relaxation = ClassRelaxation(priced)
        values = [relaxation.solve(make_form(priced, *pair)).value for pair in pairs]
        return min(values) - theta * budget

    pairs = _best_pairs(p)
    low, high = 0.0, 1.0
    while bound(2 * high) > bound(high) and high < 1e9:
        high *= 2
    high *= 2
    for _ in range(BISECTIONS):  # the bound is concave in theta
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if bound(left) < bound(right):
            low = left
        else:
            high = right
    return (low + high) / 2


def _best_pairs(p: Problem, most: int = 4) -> list[tuple[int, int]]:
    """Return the pairs with the smallest relaxations: the bound is theirs."""
    relaxation = ClassRelaxation(p)
    values = {pair: relaxation.solve(make_form(p, *pair)).value for pair in p.pairs}
    return sorted(p.pairs, key=lambda pair: values[pair])[:most]


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A plan that is optimal for `theta`."""

    theta: float
    time_s: float
    omega: float
    outcome: Outcome


def pareto_front(p: Problem, *, time_limit_s: float = 60.0) -> list[FrontPoint]:
    """Return the supported points of the front, fastest first."""
    deadline = time.perf_counter() + time_limit_s
    fast = _point(p, 1e-9 / max(float(p.omega.max()), 1e-9), deadline)
    fine = _point(p, 1e6 / max(float(p.omega.max()), 1e-9), deadline)
    points = [fast] if fast.omega <= fine.omega * (1 + 1e-9) else [fast, fine]
    gaps = list(zip(points, points[1:], strict=False))
    while gaps and len(points) < MAX_POINTS and time.perf_counter() < deadline:
        gaps.sort(
            key=lambda pair: (pair[0].omega - pair[1].omega) * (pair[1].time_s - pair[0].time_s)
        )
        left, right = gaps.pop()
        theta = (right.time_s - left.time_s) / (left.omega - right.omega)
        if not 0 < theta < math.inf:
            continue
        found = _point(p, theta, deadline)
        line = left.time_s + theta * left.omega
        if found.time_s + theta * found.omega < line * (1 - 1e-4):
            points.append(found)
            gaps += [(left, found), (found, right)]
    return sorted(points, key=lambda point: point.time_s)


def _area(left: FrontPoint, right: FrontPoint) -> float:
    return (left.omega - right.omega) * (right.time_s - left.time_s)


def _point(p: Problem, theta: float, deadline: float) -> FrontPoint:
    priced = p.with_changes(theta=theta)
    left = max(1.0, min(10.0, deadline - time.perf_counter()))
    outcome = solve_exact(priced, time_limit_s=left, gap=1e-4)
    free = p.with_changes(theta=0.0)
    seconds = value(free, outcome.assignment)
    omega = sum_omega(p, outcome.assignment)
    return FrontPoint(theta=theta, time_s=seconds, omega=omega, outcome=outcome)
