"""Solves a problem as wished, over the KV precisions allowed, and has the plan checked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmpq.cluster import Cluster
from llmpq.errors import DoesNotFitError
from llmpq.plan import Plan, Prefer
from llmpq.planner import limits
from llmpq.planner.evaluate.pipeline_time import sum_omega
from llmpq.planner.front.preference import WEIGHTS, Scored, look_around, preferred
from llmpq.planner.problem.make_problem import parse_kv, stated_theta
from llmpq.planner.problem.microbatch import chunk_sizes, small_chunks
from llmpq.planner.problem.outcome import OPTIMAL_GAP, Outcome, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.refusal import NothingFitsError, too_big
from llmpq.planner.solving.isolated import Beside, solve_isolated
from llmpq.planner.solving.kv_precision_sweep import Tries
from llmpq.planner.solving.methods import NO_PLAN, How
from llmpq.precision import KVPrecision

if TYPE_CHECKING:
    from llmpq.planner.ilp.backends import Backend


DEFAULT_PREFER: Prefer = "balanced"
SOLVE_SHARE = 0.6
"""Share of the time left that one solve may take, where a preference takes several."""
HEAD_SHARE = 0.3
"""Share of the time that a search has, at least, if it has to go on with another output matrix."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How to solve, from the flags."""

    method: str
    time_limit_s: float
    gap: float
    backend: Backend
    budget: float | None
    kvs: tuple[KVPrecision, ...]
    prefer: Prefer | None = None
    """Which plan of the front to take; none: the best for the problem's theta, or a budget."""
    typed: bool = True
    """Whether flags of llmpq-algo ask for this: a refusal then names flags, else words."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A solved problem and its checked plan."""

    problem: Problem
    outcome: Outcome
    plan: Plan


def read_wish(request: PlanRequest, cluster: Cluster) -> Wish:
    """Return how to solve, from the flags and what the cluster's author recommends."""
    method, budget = "heuristic" if request.shaq_efficient else request.method or "exact", None
    if method == "flexgen":
        raise ValueError(NO_PLAN)
    if request.quality_budget is not None:
        budget = limits.within("--quality-budget", request.quality_budget, limits.MAX_BUDGET)
    return Wish(
        method=method,
        time_limit_s=limits.within("--time-limit", request.time_limit, math.inf),
        gap=limits.within("--gap", request.gap, 1.0),
        backend=request.solver or "highs",
        budget=budget,
        kvs=parse_kv(request.kv),
        prefer=None
        if budget is not None or stated_theta(request, cluster) is not None
        else request.prefer or DEFAULT_PREFER,
    )


def answer(problem: Problem, wish: Wish, path: str | None) -> Answer:
    """Return the checked plan that is best as wished, over the KV precisions allowed."""
    priced, outcome = _by_preference(problem, wish) if wish.prefer else solved(problem, wish)
    # Under a budget the value is time alone.
    valued = priced if wish.budget is None else priced.with_changes(theta=0.0)
    plan = checked_plan(valued, outcome, path, wish.prefer)
    return Answer(problem=priced, outcome=outcome, plan=plan)


def _by_preference(problem: Problem, wish: Wish) -> tuple[Problem, Outcome]:
    """Return the plan of the front that a preference takes, and the problem with its theta."""
    assert wish.prefer is not None, "there is a preference"
    start_s, deadline_s = time.perf_counter(), time.perf_counter() + wish.time_limit_s
    unit = problem.sensitivity.four_bit_omega()
    price = WEIGHTS[wish.prefer] / unit if unit else 0.0

    def solve(theta: float) -> Scored[tuple[Problem, Outcome]]:
        share = SOLVE_SHARE * (deadline_s - time.perf_counter())
        limit = share if math.isfinite(share) else wish.time_limit_s
        how = replace(wish, time_limit_s=max(0.0, limit))
        priced, outcome = solved(problem.with_changes(theta=theta), how)
        omega = sum_omega(priced, outcome.assignment)
        return Scored(
            plan=(priced, outcome),
            theta=theta,
            time_s=outcome.value - theta * omega,
            omega=omega,
            bound=outcome.bound,
        )

    problems = with_room(problem, wish)
    if not problems:
        raise NothingFitsError(problem, wish.kvs, budget=wish.budget, typed=wish.typed)
    guess, corner = look_around(problems, price)
    best = preferred(
        solve,
        price=price,
        guess=guess,
        corner=corner if wish.method == "exact" else None,
        late=lambda: time.perf_counter() > deadline_s,
    )
    priced, outcome = best.plan
    return priced, replace(outcome, seconds=time.perf_counter() - start_s)


def solved(
    problem: Problem, wish: Wish, *, other_bound: float = math.inf
) -> tuple[Problem, Outcome]:
    """Return the best plan over the KV precisions allowed and over chunks of prompts.

    Explains it when nothing fits. The bound is the least of all of them, and of `other_bound`: that
    of plans of the same request that this problem does not have.
    """
    start_s, limit = time.perf_counter(), wish.time_limit_s
    tries = _tried(with_room(problem, wish), wish)
    if tries.best is None and tries.unfinished is not None and tries.bounds:
        raise tries.unfinished
    if tries.best is None:
        if wish.method not in ("exact", "ilp") or wish.budget is not None:
            _raise_unless_smaller(problem, str(tries.refusal))
        raise NothingFitsError(problem, wish.kvs, budget=wish.budget, typed=wish.typed)
    priced, outcome = tries.problems[tries.best[0]], tries.best[1]
    bound = min(*tries.bounds.values(), other_bound)
    if _rounds_head_alone(priced, outcome):
        left = max(limit - (time.perf_counter() - start_s), HEAD_SHARE * limit)
        with suppress(DoesNotFitError, Unfinished):
            # Plans that mix precisions go on with a rounded output matrix: their bound stands.
            wish = replace(wish, time_limit_s=left)
            return solved(_with_whole_head(problem), wish, other_bound=bound)
    return priced, _over_all(outcome, bound)


def with_room(problem: Problem, wish: Wish) -> list[Problem]:
    """Return what of the problem is not too big: with usual chunks, or else with smaller ones."""

    def usual_chunks(p: Problem) -> tuple[int, ...]:
        work = p.workload
        return chunk_sizes(work.batch, work.prompt_len, window=p.spec.widest_window)

    usual = [p for p in _allowed(problem, wish, usual_chunks) if not too_big(p)]
    if usual:
        return usual
    small = _allowed(problem, wish, lambda p: small_chunks(p.workload.prompt_len))
    return [p for p in small if not too_big(p)]


def _allowed(
    problem: Problem, wish: Wish, chunks: Callable[[Problem], tuple[int, ...]]
) -> list[Problem]:
    """Return the problem at every KV precision allowed, with these chunks of prompts."""
    found = []
    for kv in wish.kvs:
        work = problem.workload.model_copy(update={"kv": kv})
        priced = problem.with_changes(workload=work)
        # Without a pool prompts are computed whole.
        sizes = chunks(priced) if priced.pooled else (priced.chunk,)
        found += [priced.with_changes(chunk=size) for size in sizes]
    return found


def _rounds_head_alone(p: Problem, outcome: Outcome) -> bool:
    """Whether a plan of 16 bits alone would have an output matrix that nobody asked to round."""
    a = outcome.assignment
    last = p.classes[a.stages[-1].cls].first
    return (
        p.quantization.head_bits is None
        and last.spec.is_cpu
        and all(p.choices[choice].weight_bits == 16 for choice in a.choices)
    )


def _with_whole_head(p: Problem) -> Problem:
    """Return the problem with an output matrix of 16 bits everywhere."""
    quantization = replace(p.quantization, head_bits=16)
    costs = replace(p.costs, quantization=quantization)
    return p.with_changes(quantization=quantization, costs=costs)


def _tried(problems: list[Problem], wish: Wish) -> Tries:
    """Solve, with a process beside it that looks for plans of one precision alone."""
    how = How(
        method=wish.method,
        time_limit_s=wish.time_limit_s,
        gap=wish.gap,
        backend=wish.backend,
        budget=wish.budget,
    )
    beside = Beside(problems, how)
    tries = Tries(problems, how, lambda p, how: solve_isolated(p, how, beside))
    try:
        tries.solve_all()
        found = None if tries.proven else beside.found()
    finally:
        beside.end()
    if found is not None:
        tries.take(*found)
    return tries


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


def checked_plan(
    problem: Problem, outcome: Outcome, path: str | None, prefer: Prefer | None = None
) -> Plan:
    """Build the plan and have it checked by code that shares nothing with the solver."""
    from llmpq.planner.check.build_plan import build_plan
    from llmpq.planner.check.check import check_plan

    plan = build_plan(problem, outcome, model_path=path, prefer=prefer)
    check_plan(plan, spec=problem.spec, cluster=problem.cluster, costs=problem.costs)
    return plan
