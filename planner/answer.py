"""Solves a problem as its options say, in a child process, and has the plan checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.cluster import Cluster
from llmpq.plan import Plan, Prefer
from llmpq.planner import limits
from llmpq.planner.problem.make_problem import parse_kv, stated_theta
from llmpq.planner.problem.outcome import Outcome
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.methods import NO_PLAN, SolveOptions
from llmpq.planner.solving.plan_search import nothing_fits, variants_with_room
from llmpq.planner.solving.worker import plan_in_child

DEFAULT_PREFER: Prefer = "balanced"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A solved problem and its checked plan."""

    problem: Problem
    outcome: Outcome
    plan: Plan


def solve_options(request: PlanRequest, cluster: Cluster) -> SolveOptions:
    """Return how to solve, from the request and what the cluster's author recommends."""
    method, budget = request.method or "exact", None
    if method == "flexgen":
        raise ValueError(NO_PLAN)
    if request.quality_budget is not None:
        budget = limits.within("--quality-budget", request.quality_budget, limits.MAX_BUDGET)
    return SolveOptions(
        method=method,
        time_limit_s=limits.within("--time-limit", request.time_limit, math.inf),
        gap=limits.within("--gap", request.gap, 1.0),
        backend=request.solver or "highs",
        budget=budget,
        kvs=parse_kv(request.kv),
        prefer=None
        if budget is not None or stated_theta(request, cluster) is not None
        else request.prefer or DEFAULT_PREFER,
        names_context=request.context is not None,
    )


def answer(problem: Problem, options: SolveOptions, path: str | None) -> Answer:
    """Return the checked plan that is best as asked for."""
    priced, outcome = solved(problem, options)
    # Under a budget the value is time only.
    valued = priced if options.budget is None else priced.with_changes(theta=0.0)
    plan = checked_plan(valued, outcome, path, options.prefer)
    return Answer(problem=priced, outcome=outcome, plan=plan)


def solved(problem: Problem, options: SolveOptions) -> tuple[Problem, Outcome]:
    """Return the job with what is chosen of it (KV precision, chunk, theta), and the outcome."""
    if not variants_with_room(problem, options):  # known without a search
        raise nothing_fits(problem, options)
    found = plan_in_child(problem, options)
    return found.problem, found.outcome


def checked_plan(
    problem: Problem, outcome: Outcome, path: str | None, prefer: Prefer | None = None
) -> Plan:
    """Build the plan and have it checked by code that shares nothing with the solver."""
    from llmpq.planner.check.build_plan import build_plan
    from llmpq.planner.check.check import check_plan

    plan = build_plan(problem, outcome, model_path=path, prefer=prefer)
    check_plan(plan, spec=problem.spec, cluster=problem.cluster, costs=problem.costs)
    return plan
