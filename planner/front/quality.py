"""The fastest plan within a budget of the sum of omega (the front of both: planner/front/front.py).

For any theta >= 0, min (time + theta omega) - theta Q is a lower bound of the fastest time within a
budget Q; a good theta is the budget's price in the class relaxation, and the label search then
closes what is left.

A sum of omega depends in its last digits on the order of its terms. A plan whose sum is the budget
is within it, whichever way it is added up.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from llmpq.planner.evaluate.objective import make_form, value
from llmpq.planner.exact.bounds.pairs import PairTables, quick_bound
from llmpq.planner.exact.bounds.relaxation import ClassRelaxation
from llmpq.planner.exact.search import Search, solve_exact
from llmpq.planner.front.least_omega import least_omega
from llmpq.planner.ilp.solve import no_plan_fits, solve_ilp
from llmpq.planner.problem.outcome import (
    BUDGET_ROUNDING,
    COLD,
    OPTIMAL_GAP,
    Assignment,
    Infeasible,
    Outcome,
    Unfinished,
    WarmStart,
)
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import Timer, now_s
from llmpq.units import shown_loss

MOST_SOLVED = 30
"""Pairs whose relaxation is solved, to find the one that promises most within the budget."""
HIGHEST_THETA = 1e9
ROUNDING = 1e-6
"""Share of a budget that the relaxation is given beside it, so that its tolerance refuses none."""
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
    warm: WarmStart = COLD,
) -> Outcome:
    """Return the fastest plan whose sum of omega is at most `budget`, with its proof.

    Its sum may exceed the budget by BUDGET_ROUNDING of it. A `theta` near the price at the budget
    and a known plan within it, where the caller has them, save looking for them.
    """
    start, timer = now_s(), Timer()
    uniform = p.numbers(*p.pairs[0]).uniform
    within = refuse_unreachable(p, budget) if uniform and theta is None else None
    free = p.with_changes(theta=0.0)
    if not uniform:
        return solve_ilp(free, time_limit_s=time_limit_s, gap=gap, budget=budget)
    if theta is None:
        theta = best_theta(p, budget, start + THETA_SHARE * time_limit_s)
    priced = p.with_changes(theta=theta)
    limit = budget * (1 + BUDGET_ROUNDING / 2)
    end, highest = start + time_limit_s, warm.ceiling + theta * limit
    search = Search(priced, end, gap, budget=limit, ceiling=highest, enough=warm.enough)
    if within is not None:
        search.incumbent.offer(within)
    bound = search.quick_pass(warm.known)
    if bound < search.target:
        (search.resume if warm.resumed else search.begin)(warm.known)
        if search.best is None and warm.ceiling == math.inf:
            _offer_priced(p, search, theta)
        bound = search.run()
    # With a theta that suits it ill the bound may be below what everything takes, fit or not.
    bound = max(bound - theta * limit, quick_bound(free))
    if search.best is None and bound < math.inf:
        raise Unfinished(
            f"no plan with a sum of omega of at most {budget:g} was found within "
            f"{time_limit_s:g} s; give a longer --time-limit",
            bound=bound,
        )
    if search.best is None:
        raise Infeasible(_unreachable(budget))
    seconds = value(free, search.best)
    return Outcome(
        method="exact",
        status="optimal" if seconds - bound <= OPTIMAL_GAP * seconds else "feasible",
        assignment=search.best,
        value=seconds,
        bound=min(bound, seconds),
        seconds=timer.seconds,
        note=f"fastest with sum omega <= {budget:g} (theta at the budget {theta:.3g})",
    )


def _unreachable(budget: float) -> str:
    return (
        f"no plan that fits has a sum of omega of at most {budget:g}; give a larger "
        "--quality-budget, or leave it out to see what can be had"
    )


def refuse_unreachable(p: Problem, budget: float) -> Assignment | None:
    """Return a plan within a budget, if one is quick to tell.

    Raise `Infeasible` at once for a budget that no plan can keep, with the best there is.
    """
    least = least_omega(p)
    if math.isinf(least.omega):
        raise Infeasible(no_plan_fits(p))
    if budget * (1 + BUDGET_ROUNDING) >= least.omega * (1 - 1e-9):
        return least.plan
    if least.plan is None:
        raise Infeasible(
            f"no plan has a sum of omega of at most {budget:g}: what these devices and precisions "
            f"allow is above {least.omega:.6g}; give a larger --quality-budget, or leave it out "
            "to see what can be had",
            least=least.omega,
        )
    raise Infeasible(
        f"no plan has a sum of omega of at most {budget:g}: the smallest that these devices "
        f"and precisions allow is {least.omega:.6g}; give --quality-budget "
        f"{shown_loss(least.omega)} or more",
        least=least.omega,
    )


def _offer_priced(p: Problem, search: Search, theta: float) -> None:
    """Offer the best plan of a theta, larger and larger, until one keeps the budget."""
    finest = 1e6 / max(float(p.omega.max()), 1e-9)
    for candidate in (theta, theta * 1.05, theta * 1.5, theta * 4.0, finest):
        left = max(0.0, search.deadline - now_s())
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
    """Return a multiplier that gives a large relaxed bound within the budget.

    It is the price of the budget in the relaxation of the pair that promises most; past the
    deadline, of the best pair so far: any theta >= 0 gives a valid bound. `Infeasible` if the
    budget cannot be kept even where micro-batches leave the most room.
    """
    priced = p.with_changes(theta=1.0)
    relaxation, tables = ClassRelaxation(priced, budget * (1 + ROUNDING)), PairTables(priced)
    roomiest = make_form(priced, p.prefill_sizes[0], p.decode_sizes[0])
    if relaxation.solve(roomiest).value == math.inf:
        raise Infeasible(_unreachable(budget))
    groups = relaxation.groups
    free = replace(groups, omega=np.where(np.isinf(groups.omega), np.inf, 0.0))
    bounds = np.where(tables.open, tables.first_bounds(free).min(axis=0), np.inf)
    found: list[tuple[float, float]] = []
    for _ in range(MOST_SOLVED):
        row, column = np.unravel_index(int(np.argmin(bounds)), bounds.shape)
        least = float(bounds[row, column])
        best = min(found, default=(math.inf, 0.0))[0]
        if not least < best or (found and now_s() > deadline):
            break
        form = make_form(priced, p.prefill_sizes[row], p.decode_sizes[column])
        prices = relaxation.solve(form)
        bounds[row, column] = np.inf
        if math.isfinite(prices.value):
            found.append((prices.value, prices.omega))
            at = replace(groups, omega=groups.omega * max(prices.omega, 1e-300))
            proven = tables.bounds(at, form, prices).min(axis=0) - prices.omega * budget
            bounds = np.maximum(bounds, proven)
    # Where no pair looked at can keep the budget, any omega is too dear.
    return min(found)[1] if found else HIGHEST_THETA
