"""Every way to make a plan, under one signature."""

from __future__ import annotations

from llmpq.planner.ilp_backends import Backend
from llmpq.planner.outcome import Outcome
from llmpq.planner.problem import Problem


def solve(
    p: Problem,
    method: str,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
    backend: Backend = "highs",
) -> Outcome:
    """Return the outcome of one method; `Infeasible` if it finds no plan."""
    if method == "uniform":
        from llmpq.planner.baselines import solve_uniform

        return solve_uniform(p)
    if method == "ilp":
        from llmpq.planner.ilp import solve_ilp

        return solve_ilp(p, backend=backend, time_limit_s=time_limit_s, gap=gap)
    from llmpq.planner.exact.search import solve_exact

    return solve_exact(p, time_limit_s=time_limit_s, gap=gap)
