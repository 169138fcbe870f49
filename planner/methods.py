"""Every way to make a plan, under one signature."""

from __future__ import annotations

from llmpq.planner.ilp_backends import Backend
from llmpq.planner.outcome import Outcome
from llmpq.planner.problem import Problem

PLANNERS = ("exact", "ilp", "heuristic", "adabits", "pipeedge", "uniform")
"""Methods that make plans, best first; `flexgen` is an estimate beside them."""


def solve(
    p: Problem,
    method: str,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
    backend: Backend = "highs",
) -> Outcome:
    """Return the outcome of one method; `Infeasible` if it finds no plan."""
    if method == "exact":
        from llmpq.planner.exact.search import solve_exact

        return solve_exact(p, time_limit_s=time_limit_s, gap=gap)
    if method == "ilp":
        from llmpq.planner.ilp import solve_ilp

        return solve_ilp(p, backend=backend, time_limit_s=time_limit_s, gap=gap)
    if method == "heuristic":
        from llmpq.planner.heuristic import solve_heuristic

        return solve_heuristic(p, time_limit_s=time_limit_s)
    if method == "adabits":
        from llmpq.planner.adabits import solve_adabits

        return solve_adabits(p)
    if method == "pipeedge":
        from llmpq.planner.pipeedge import solve_pipeedge

        return solve_pipeedge(p)
    if method == "uniform":
        from llmpq.planner.baselines import solve_uniform

        return solve_uniform(p)
    raise ValueError(
        f"--method {method} is an estimate of offloading, not a plan; see it with --method all"
    )
