"""Every way to make a plan of one problem, under one signature."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmpq.planner.problem.outcome import COLD, Outcome, WarmStart
from llmpq.planner.problem.problem import Problem
from llmpq.plans.plan import Prefer
from llmpq.precision import KVPrecision

if TYPE_CHECKING:
    from llmpq.planner.ilp.milp import Backend
    from llmpq.planner.problem.known_plan import KnownPlan

PLANNERS = ("exact", "ilp", "heuristic", "adabits", "pipeedge", "uniform")
"""Methods that make plans, best first; `flexgen` is an estimate beside them."""

NO_PLAN = "--method flexgen is an estimate of offloading, not a plan; see it with --method all"


WORK_SHARE = 0.5
"""Seconds of work in a second of the user's limit: the same work takes longer under load."""


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """How to solve: what the flags about solving ask for."""

    method: str = "exact"
    time_limit_s: float = 60.0
    """Of a search, in seconds of its work (problem/work_clock.py); of `ilp`, by the time of day."""
    ends_at: float = math.inf
    """When every search ends, of `time.perf_counter`."""
    gap: float = 1e-6
    """Relative gap to prove."""
    backend: Backend = "highs"
    """Of the integer program."""
    budget: float | None = None
    """Largest sum of omega; the fastest plan within it is looked for."""
    kvs: tuple[KVPrecision, ...] = ()
    """KV precisions allowed."""
    prefer: Prefer | None = None
    """Which plan of the front to take; None: the best for the problem's theta, or a budget."""
    names_flags: bool = True
    """Whether a refusal names flags of llmpq-algo; else it says the same in words."""
    chunk: int | None = None
    """The prefill chunk to plan for where it has room; None: the best one."""
    in_child: bool = True
    """Whether solvers run in a child process, so that a crash inside one ends nothing else."""
    known: KnownPlan | None = None
    """A plan to start from, which need not fit; of solvers in this process."""
    tie: float = 0.0
    """Share by which engines of one device each may be slower than the best plan that sends between
    devices, and are taken all the same."""
    groups: bool = True
    """Whether devices of a node may share stages in tensor parallel."""
    names_context: bool = False
    """Whether the job's length was given as a context, which a refusal then names."""

    @property
    def asked_s(self) -> float:
        """The user's limit, from which these were made."""
        return self.time_limit_s / (1.0 if self.method == "ilp" else WORK_SHARE)


def within(options: SolveOptions, seconds: float) -> SolveOptions:
    """Return options whose searches end by so many seconds from now, whatever load there is."""
    work_s = seconds if options.method == "ilp" else seconds * WORK_SHARE
    return replace(options, time_limit_s=work_s, ends_at=time.perf_counter() + seconds)


def anew(options: SolveOptions, most_s: float = math.inf) -> SolveOptions:
    """Return options whose limits count from now on, of at most so many seconds of work."""
    most_s = most_s if options.method == "ilp" else most_s / WORK_SHARE
    return within(options, min(options.asked_s, most_s))


def solve(p: Problem, options: SolveOptions, warm: WarmStart = COLD) -> Outcome:
    """Return the outcome of one method, within its budget if it has one.

    `Infeasible` if it finds no plan. A budget makes the value time only.
    """
    method, limit, budget = options.method, options.time_limit_s, options.budget
    if method == "exact":
        if budget is not None:
            from llmpq.planner.front.quality import solve_budget

            return solve_budget(p, budget, time_limit_s=limit, gap=options.gap, warm=warm)
        from llmpq.planner.exact.search import solve_exact

        return solve_exact(p, time_limit_s=limit, gap=options.gap, warm=warm)
    if budget is not None:
        p = p.with_changes(theta=0.0)
    if method == "ilp":
        from llmpq.planner.ilp.solve import solve_ilp

        return solve_ilp(
            p, backend=options.backend, time_limit_s=limit, gap=options.gap, budget=budget
        )
    if method == "heuristic":
        from llmpq.planner.baselines.heuristic import solve_heuristic

        return solve_heuristic(p, time_limit_s=limit, budget=budget)
    if method == "adabits":
        from llmpq.planner.baselines.adabits import solve_adabits

        return solve_adabits(p, time_limit_s=limit, budget=budget)
    if method == "pipeedge":
        from llmpq.planner.baselines.pipeedge import solve_pipeedge

        return solve_pipeedge(p, time_limit_s=limit, budget=budget)
    if method == "uniform":
        from llmpq.planner.baselines.uniform import solve_uniform

        return solve_uniform(p, time_limit_s=limit, budget=budget)
    assert method == "flexgen", method
    raise ValueError(NO_PLAN)
