"""The fastest plan within a budget of the sum of omega (the front of both: planner/front/front.py).

For any theta >= 0, min (time + theta omega) - theta Q is a lower bound of the fastest time within a
budget Q; the best theta is found by bisection on the class relaxation, and the label search then
closes what is left.

A sum of omega depends in its last digits on the order of its terms. A plan whose sum is the budget
is within it, whichever way it is added up.
"""

from __future__ import annotations

import math
import time

import numpy as np

from llmpq.planner.exact.form import make_form
from llmpq.planner.exact.pairs import PairTables
from llmpq.planner.exact.relaxation import ClassRelaxation
from llmpq.planner.exact.search import Search, solve_exact
from llmpq.planner.ilp.solve import solve_ilp
from llmpq.planner.outcome import (
    BUDGET_ROUNDING,
    OPTIMAL_GAP,
    Assignment,
    Infeasible,
    Outcome,
    Unfinished,
)
from llmpq.planner.predict.pipeline_time import value
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
    ceiling: float = math.inf,
) -> Outcome:
    """Return the fastest plan whose sum of omega is at most `budget`, with its proof.

    Its sum may exceed the budget by BUDGET_ROUNDING of it. A `theta` near the price at the budget
    and a `known` plan within it, where the caller has them, save looking for them.
    """
    start = time.perf_counter()
    refuse_unreachable(p, budget)
    free = p.with_changes(theta=0.0)
    if not p.numbers(*p.pairs[0]).uniform:
        return solve_ilp(free, time_limit_s=time_limit_s, gap=gap, budget=budget)
    if theta is None:
        theta = best_theta(p, budget, start + THETA_SHARE * time_limit_s)
    priced = p.with_changes(theta=theta)
    limit = budget * (1 + BUDGET_ROUNDING / 2)
    search = Search(
        priced,
        start + time_limit_s,
        gap,
        budget=limit,
        ceiling=ceiling + theta * limit,
    )
    bound = search.soon(known)
    if bound < search.target:
        search.begin(known)
        if search.best is None:
            _offer_priced(p, search, theta)
        bound = search.run()
    bound -= theta * limit
    if search.best is None and bound < math.inf:
        raise Unfinished(
            f"no plan with a sum of omega of at most {budget:g} was found within "
            f"{time_limit_s:g} s; give a longer --time-limit",
            bound=bound,
        )
    if search.best is None:
        raise Infeasible(
            f"no plan that fits has a sum of omega of at most {budget:g}; give a larger "
            "--quality-budget, or leave it out to see what can be had"
        )
    seconds = value(free, search.best)
    return Outcome(
        method="exact",
        status="optimal" if seconds - bound <= OPTIMAL_GAP * seconds else "feasible",
        assignment=search.best,
        value=seconds,
        bound=min(bound, seconds),
        seconds=time.perf_counter() - start,
        note=f"fastest with sum omega <= {budget:g} (theta at the budget {theta:.3g})",
    )


def refuse_unreachable(p: Problem, budget: float) -> None:
    """Raise `Infeasible` at once for a budget that no plan can keep, with the best there is.

    Layers at their least omega may be more than fits: then the memory of all devices together,
    layers cut into fractions, says what is the least (a linear program of two rows, solved by
    steps along its hull).
    """
    least = least_loss_bound(p)
    if budget * (1 + BUDGET_ROUNDING) < least * (1 - 1e-9):
        raise Infeasible(
            f"no plan has a sum of omega of at most {budget:g}: the smallest that these devices "
            f"and precisions allow is {least:.6g}; give --quality-budget "
            f"{_rounded_up(least):g} or more"
        )


def least_loss_bound(p: Problem) -> float:
    """Return a sum of omega that no plan is below, by the memory of all devices together."""
    omega, sizes = p.open_omega, p.all_layer_bytes
    room = p.capacity(p.prefill_sizes[0], p.decode_sizes[0]).max(axis=(1, 2, 3))
    counts = np.array([min(cls.count, p.max_stages) for cls in p.classes])
    held = np.sort(np.repeat(np.clip(room, 0, None), counts))[::-1][: p.max_stages]
    left = float(held.sum())
    # max over rho >= 0 of  sum_i min_b (omega + rho bytes) - rho room: concave, piecewise linear.
    finite = np.where(np.isfinite(omega), omega, 1e300)
    span = float(np.ptp(sizes)) or 1.0
    high = float(finite[np.isfinite(omega)].max()) / span * 4 + 1e-30
    best = float(omega.min(axis=1).sum())
    for rho in np.concatenate([[0.0], np.geomspace(high * 1e-9, high, 200)]):
        best = max(best, float((finite + rho * sizes).min(axis=1).sum() - rho * left))
    return best


def _rounded_up(loss: float) -> float:
    """Return a number of four digits that is not below a loss."""
    if loss <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(loss)) - 3)
    return math.ceil(loss / step) * step


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
    """Return pairs with small relaxations, the smallest first."""
    relaxation, tables = ClassRelaxation(p), PairTables(p)
    bounds = np.where(tables.open, tables.first_bounds(relaxation.groups).min(axis=0), np.inf)
    found: list[tuple[float, tuple[int, int]]] = []
    while len(found) < most or bounds.min() < found[0][0]:
        at = np.unravel_index(int(np.argmin(bounds)), bounds.shape)
        if not np.isfinite(bounds[at]) or (found and time.perf_counter() > deadline):
            break
        pair = p.prefill_sizes[at[0]], p.decode_sizes[at[1]]
        form = make_form(p, *pair)
        prices = relaxation.solve(form)
        if math.isfinite(prices.value):
            proven = tables.bounds(relaxation.groups, form, prices).min(axis=0)
            bounds = np.maximum(bounds, proven)
        bounds[at] = np.inf
        found = sorted([*found, (prices.value, pair)])
    return [pair for _, pair in found[:most]]
