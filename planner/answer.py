"""Solves a problem as wished, over the KV precisions allowed, and has the plan checked."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from llmpq.errors import DoesNotFitError
from llmpq.plan import Plan
from llmpq.planner import limits
from llmpq.planner.build_plan import build_plan
from llmpq.planner.check import check_plan
from llmpq.planner.ilp.backends import Backend
from llmpq.planner.inputs.make_problem import parse_kv
from llmpq.planner.inputs.requests import PlanRequest
from llmpq.planner.methods import NO_PLAN, How
from llmpq.planner.outcome import OPTIMAL_GAP, Infeasible, Outcome, Unfinished
from llmpq.planner.predict.advice import explain_infeasible, too_big
from llmpq.planner.problem import Problem
from llmpq.precision import KVPrecision


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How to solve, from the flags."""

    method: str
    time_limit_s: float
    gap: float
    backend: Backend
    budget: float | None
    kvs: tuple[KVPrecision, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A solved problem and its checked plan."""

    problem: Problem
    outcome: Outcome
    plan: Plan


def read_wish(request: PlanRequest) -> Wish:
    """Return how to solve, from the flags."""
    method, budget = "heuristic" if request.shaq_efficient else request.method or "exact", None
    if method == "flexgen":
        raise ValueError(NO_PLAN)
    if request.quality_budget is not None:
        budget = limits.within("--quality-budget", request.quality_budget, limits.MAX_BUDGET)
    if budget is not None and method not in ("exact", "ilp"):
        raise ValueError(
            f"--quality-budget is for --method exact or ilp, not {method}: the others cannot "
            "keep a budget"
        )
    return Wish(
        method=method,
        time_limit_s=limits.within("--time-limit", request.time_limit, math.inf),
        gap=limits.within("--gap", request.gap, 1.0),
        backend=request.solver or "highs",
        budget=budget,
        kvs=parse_kv(request.kv),
    )


def answer(problem: Problem, wish: Wish, path: str | None) -> Answer:
    """Return the best plan over the KV precisions allowed; explain it when nothing fits.

    The time is shared out among the precisions, and the bound is the least of all of them.
    """
    best: tuple[Problem, Outcome] | None = None
    bounds: list[float] = []
    unfinished: Unfinished | None = None
    refusal = ""
    deadline = time.perf_counter() + wish.time_limit_s
    for number, kv in enumerate(wish.kvs):
        priced = problem.with_changes(workload=problem.workload.model_copy(update={"kv": kv}))
        if too_big(priced):
            continue
        left = max(0.0, deadline - time.perf_counter())
        share = wish.time_limit_s if math.isinf(left) else left / (len(wish.kvs) - number)
        ceiling = math.inf if best is None else best[1].value
        try:
            outcome = _solve(priced, replace(wish, time_limit_s=share), ceiling)
        except Unfinished as error:
            unfinished = error
            bounds.append(error.bound)
            continue
        except Infeasible as error:
            refusal = str(error)
            continue
        bounds.append(-math.inf if outcome.bound is None else outcome.bound)
        if best is None or outcome.value < best[1].value:
            best = priced, outcome
    if best is None and unfinished is not None:
        raise unfinished
    if best is None:
        if wish.method not in ("exact", "ilp") or wish.budget is not None:
            _raise_unless_smaller(problem, refusal)
        raise DoesNotFitError(explain_infeasible(problem)) from None
    priced, outcome = best
    outcome = _over_all(outcome, min(bounds))
    # Under a budget the value is time alone.
    valued = priced if wish.budget is None else priced.with_changes(theta=0.0)
    return Answer(problem=priced, outcome=outcome, plan=checked_plan(valued, outcome, path))


def _over_all(outcome: Outcome, bound: float) -> Outcome:
    """Return an outcome with the bound over every KV precision in place of its own."""
    if outcome.bound is None:
        return outcome
    if not math.isfinite(bound):
        return replace(outcome, bound=None, status="feasible")
    bound = min(bound, outcome.value)
    proven = outcome.value - bound <= OPTIMAL_GAP * abs(outcome.value)
    return replace(outcome, bound=bound, status="optimal" if proven else "feasible")


def _raise_unless_smaller(problem: Problem, refusal: str) -> None:
    """Report a method's own refusal when the model as such would fit."""
    if not too_big(problem):
        raise DoesNotFitError(refusal)


def _solve(problem: Problem, wish: Wish, ceiling: float) -> Outcome:
    """Solve in a child process: a crash there is an error here."""
    from llmpq.planner.isolated import solve_isolated

    how = How(
        method=wish.method,
        time_limit_s=wish.time_limit_s,
        gap=wish.gap,
        backend=wish.backend,
        budget=wish.budget,
        ceiling=ceiling,
    )
    return solve_isolated(problem, how)


def checked_plan(problem: Problem, outcome: Outcome, path: str | None) -> Plan:
    """Build the plan and have it checked by code that shares nothing with the solver."""
    plan = build_plan(problem, outcome, model_path=path)
    check_plan(plan, spec=problem.spec, cluster=problem.cluster, costs=problem.costs)
    return plan
