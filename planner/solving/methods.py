"""Every way to make a plan, under one signature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmpq.planner.problem.outcome import Assignment, Outcome
from llmpq.planner.problem.problem import Problem

if TYPE_CHECKING:
    from llmpq.planner.ilp.backends import Backend

PLANNERS = ("exact", "ilp", "heuristic", "adabits", "pipeedge", "uniform")
"""Methods that make plans, best first; `flexgen` is an estimate beside them."""

NO_PLAN = "--method flexgen is an estimate of offloading, not a plan; see it with --method all"


@dataclass(frozen=True, kw_only=True)
class How:
    """Which method, and what it is given; `budget` caps the sum of omega."""

    method: str
    time_limit_s: float = 60.0
    gap: float = 1e-6
    backend: Backend = "highs"
    budget: float | None = None
    ceiling: float = math.inf
    """A value that another search has reached: plans that are not below it need not be found."""
    known: Assignment | None = None
    """A plan to start from, which need not fit."""
    again: bool = False
    """Whether the method has looked for good plans of the problem before."""


def solve_as(p: Problem, how: How) -> Outcome:
    """Return the outcome of one method, within its budget if it has one."""
    limit, gap = how.time_limit_s, how.gap
    if how.budget is None and how.method == "exact":
        from llmpq.planner.exact.search import solve_exact

        return solve_exact(
            p,
            time_limit_s=limit,
            gap=gap,
            ceiling=how.ceiling,
            known=how.known,
            again=how.again,
        )
    if how.method != "exact":
        p = p if how.budget is None else p.with_changes(theta=0.0)
        return solve(
            p,
            how.method,
            backend=how.backend,
            time_limit_s=limit,
            gap=gap,
            budget=how.budget,
        )
    assert how.budget is not None, "without one, solve_exact has the answer"
    from llmpq.planner.front.quality import solve_budget

    return solve_budget(
        p,
        how.budget,
        time_limit_s=limit,
        gap=gap,
        ceiling=how.ceiling,
        known=how.known,
        again=how.again,
    )


def solve(
    p: Problem,
    method: str,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
    backend: Backend = "highs",
    budget: float | None = None,
) -> Outcome:
    """Return the outcome of one method; `Infeasible` if it finds no plan.

    With a `budget`, of plans whose sum of omega is within it (for the exact method: `solve_as`).
    """
    if method == "exact":
        assert budget is None, "solve_as takes the search within a budget"
        from llmpq.planner.exact.search import solve_exact

        return solve_exact(p, time_limit_s=time_limit_s, gap=gap)
    if method == "ilp":
        from llmpq.planner.ilp.solve import solve_ilp

        return solve_ilp(p, backend=backend, time_limit_s=time_limit_s, gap=gap, budget=budget)
    if method == "heuristic":
        from llmpq.planner.baselines.heuristic import solve_heuristic

        return solve_heuristic(p, time_limit_s=time_limit_s, budget=budget)
    if method == "adabits":
        from llmpq.planner.baselines.adabits import solve_adabits

        return solve_adabits(p, time_limit_s=time_limit_s, budget=budget)
    if method == "pipeedge":
        from llmpq.planner.baselines.pipeedge import solve_pipeedge

        return solve_pipeedge(p, time_limit_s=time_limit_s, budget=budget)
    if method == "uniform":
        from llmpq.planner.baselines.uniform import solve_uniform

        return solve_uniform(p, time_limit_s=time_limit_s, budget=budget)
    assert method == "flexgen", method
    raise ValueError(NO_PLAN)
