"""The fastest plan within a budget of the sum of omega (the front of both: planner/front.py).

For any theta >= 0, min (time + theta omega) - theta Q is a lower bound of the fastest time within a
budget Q; the best theta is found by bisection on the class relaxation, and the label search then
closes what is left.

A sum of omega depends in its last digits on the order of its terms. A plan whose sum is the budget
is within it, whichever way it is added up.
"""

from __future__ import annotations

import math
import time

from llmpq.planner.exact.columns import TooManyColumns
from llmpq.planner.exact.completion import MAX_STATES, Space, num_states
from llmpq.planner.exact.form import make_form
from llmpq.planner.exact.relaxation import ClassRelaxation, quick_bound
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
THETA_SHARE = 0.25
"""Share of the time that looking for theta may take."""
LONGEST_OFFER_S = 5.0
"""Seconds that looking for one first plan within the budget may take."""


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
    if theta is None:
        theta = best_theta(p, budget, start + THETA_SHARE * time_limit_s)
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
        left = max(0.0, search.deadline - time.perf_counter())
        if left == 0.0 and candidate != finest:
            continue
        limit = min(LONGEST_OFFER_S, left / 2)
        try:
            found = solve_exact(p.with_changes(theta=candidate), time_limit_s=limit, gap=1e-3)
        except Infeasible:
            return
        search.offer(found.assignment)
        if search.best is not None:
            return


def best_theta(p: Problem, budget: float, deadline: float = math.inf) -> float:
    """Return the multiplier that gives the largest relaxed bound within the budget.

    Past the deadline it is the best one so far: any theta >= 0 gives a valid bound.
    """

    def bound(theta: float) -> float:
        priced = p.with_changes(theta=theta)
        relaxation = ClassRelaxation(priced)
        values = [relaxation.solve(make_form(priced, *pair)).value for pair in pairs]
        return min(values) - theta * budget

    def late() -> bool:
        return time.perf_counter() > deadline

    pairs = _best_pairs(p, deadline)
    low, high = 0.0, 1.0
    while not late() and bound(2 * high) > bound(high) and high < 1e9:
        high *= 2
    high *= 2
    for _ in range(BISECTIONS):  # the bound is concave in theta
        if late():
            break
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if bound(left) < bound(right):
            low = left
        else:
            high = right
    return (low + high) / 2


def _best_pairs(p: Problem, deadline: float, most: int = 4) -> list[tuple[int, int]]:
    """Return the pairs with the smallest relaxations: the bound is theirs.

    A pair is relaxed only if its quick bound may be among them.
    """
    relaxation = ClassRelaxation(p)
    forms = {pair: make_form(p, *pair) for pair in p.pairs}
    quick = {pair: quick_bound(p, form) for pair, form in forms.items()}
    best: list[tuple[float, tuple[int, int]]] = []
    for pair in sorted(p.pairs, key=lambda pair: quick[pair]):
        if len(best) == most and (quick[pair] > best[-1][0] or time.perf_counter() > deadline):
            break
        best.append((relaxation.solve(forms[pair]).value, pair))
        best = sorted(best, key=lambda found: found[0])[:most]
    return [pair for _, pair in best]
