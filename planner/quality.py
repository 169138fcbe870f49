"""The fastest plan within a budget of the sum of omega (the front of both: planner/front.py).

For any theta >= 0, min (time + theta omega) - theta Q is a lower bound of the fastest time within a
budget Q; the best theta is found by bisection on the class relaxation, and the label search then
closes what is left.

A sum of omega depends in its last digits on the order of its terms. A plan whose sum is the budget
is within it, whichever way it is added up.
"""

from __future__ import annotations

import time

from llmpq.planner.exact.columns import TooManyColumns
from llmpq.planner.exact.completion import MAX_STATES, Space, num_states
from llmpq.planner.exact.form import make_form
from llmpq.planner.exact.relaxation import ClassRelaxation
from llmpq.planner.exact.search import Search, solve_exact
from llmpq.planner.ilp import solve_ilp
from llmpq.planner.outcome import (
    BUDGET_ROUNDING,
    OPTIMAL_GAP,
    Assignment,
    Infeasible,
    Outcome,
    Unfinished,
)
from llmpq.planner.pipeline_time import value
from llmpq.planner.problem import Problem

BISECTIONS = 14


def solve_budget(
    p: Problem,
    budget: float,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
    theta: float | None = None,
    known: Assignment | None = None,
) -> Outcome:
    """Return the fastest plan whose sum of omega is at most `budget`, with its proof.

    Its sum may exceed the budget by BUDGET_ROUNDING of it. A `theta` near the price at the budget
    and a `known` plan within it, where the caller has them, save looking for them.
    """
    start = time.perf_counter()
    exact = num_states(p) <= MAX_STATES and p.numbers(*p.pairs[0]).uniform
    free = p.with_changes(theta=0.0)
    if not exact:
        return solve_ilp(free, time_limit_s=time_limit_s, gap=gap, budget=budget)
    theta = best_theta(p, budget) if theta is None else theta
    priced = p.with_changes(theta=theta)
    limit = budget * (1 + BUDGET_ROUNDING / 2)
    try:
        search = Search(priced, Space(p), start + time_limit_s, gap, budget=limit)
    except TooManyColumns:
        return solve_ilp(free, time_limit_s=time_limit_s, gap=gap, budget=budget)
    if known is not None:
        search.offer(known)
    if search.best is None:
        _offer_priced(p, search, theta)
    bound = search.run() - theta * limit
    if search.best is None and search.stuck:
        raise Unfinished(
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


def _offer_priced(p: Problem, search: Search, theta: float) -> None:
    """Offer the best plan of a theta, larger and larger, until one keeps the budget."""
    finest = 1e6 / max(float(p.omega.max()), 1e-9)
    for candidate in (theta, theta * 1.05, theta * 1.5, theta * 4.0, finest):
        try:
            found = solve_exact(p.with_changes(theta=candidate), time_limit_s=5.0, gap=1e-3)
        except Infeasible:
            return
        search.offer(found.assignment)
        if search.best is not None:
            return


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
