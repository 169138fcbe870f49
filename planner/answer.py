"""Solves a problem as wished, over the KV precisions allowed, and has the plan checked."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmpq.errors import DoesNotFitError
from llmpq.plan import Plan
from llmpq.planner import limits
from llmpq.planner.inputs.make_problem import parse_kv
from llmpq.planner.inputs.requests import PlanRequest
from llmpq.planner.methods import NO_PLAN, How
from llmpq.planner.outcome import OPTIMAL_GAP, Infeasible, Outcome, Unfinished
from llmpq.planner.predict.advice import explain_infeasible, too_big
from llmpq.planner.problem import Problem
from llmpq.precision import KVPrecision

if TYPE_CHECKING:
    from llmpq.planner.ilp.backends import Backend

FIRST_SHARE = 0.4
"""Share of the time that the most promising KV precision has, if not more."""
HEAD_SHARE = 0.3
"""Share of the time that a search has, at least, if it has to go on with another output matrix."""
AGAIN_SHARE = 0.1
"""Share of the time that must be left for a KV precision to be looked at once more."""


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

    The time is shared out among the precisions, and the bound is the least of all of them. What
    some leave of their time is for the one whose bound is the least.
    """
    start_s, limit = time.perf_counter(), wish.time_limit_s
    works = [problem.workload.model_copy(update={"kv": kv}) for kv in wish.kvs]
    of_kvs = [problem.with_changes(workload=work) for work in works]
    tries = _Tries(wish, [priced for priced in of_kvs if not too_big(priced)])
    best = tries.solved()
    if best is None and tries.unfinished is not None and tries.bounds:
        raise tries.unfinished
    if best is None:
        if wish.method not in ("exact", "ilp") or wish.budget is not None:
            _raise_unless_smaller(problem, str(tries.refusal))
        raise DoesNotFitError(explain_infeasible(problem)) from None
    if _rounds_head_alone(*best):
        left = max(wish.time_limit_s - (time.perf_counter() - start_s), HEAD_SHARE * limit)
        exact = _with_whole_head(problem)
        with suppress(DoesNotFitError, Unfinished):
            return answer(exact, replace(wish, time_limit_s=left), path)
    priced, outcome = best
    outcome = _over_all(outcome, min(tries.bounds.values()))
    # Under a budget the value is time alone.
    valued = priced if wish.budget is None else priced.with_changes(theta=0.0)
    return Answer(problem=priced, outcome=outcome, plan=checked_plan(valued, outcome, path))


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


class _Tries:
    """Solves a problem at several KV precisions, within one limit."""

    def __init__(self, wish: Wish, problems: list[Problem]) -> None:
        self.wish, self.problems = wish, problems
        self.best: tuple[Problem, Outcome] | None = None
        self.bounds: dict[int, float] = {}
        self.unfinished: Unfinished | None = None
        self.refusal = Infeasible("")

    def solved(self) -> tuple[Problem, Outcome] | None:
        """Return the best problem and outcome."""
        limit = self.wish.time_limit_s
        deadline = time.perf_counter() + limit
        waiting = self._by_promise() if self.wish.method == "exact" else self._as_given()
        for k, number in enumerate(waiting):
            left = max(0.0, deadline - time.perf_counter())
            share = max(1 / (len(waiting) - k), FIRST_SHARE if k == 0 else 0.0)
            self._solve(number, limit if math.isinf(left) else left * share)
        again = sorted(self.bounds, key=lambda number: self.bounds[number])
        for number in again if len(self.problems) > 1 and self.wish.method == "exact" else ():
            left = deadline - time.perf_counter()
            if left > AGAIN_SHARE * limit and self._may_be_better(number):
                self._solve(number, left)
        return self.best

    def _as_given(self) -> list[int]:
        return list(range(len(self.problems)))

    def _by_promise(self) -> list[int]:
        """Return the problems, those first that are quickest if everything fits.

        What is found at one precision bounds the search at those that follow.
        """
        if len(self.problems) < 2:
            return self._as_given()
        from llmpq.planner.exact.pairs import quick_bound

        bounds = [quick_bound(priced) for priced in self.problems]
        return sorted(self._as_given(), key=lambda number: bounds[number])

    def _may_be_better(self, number: int) -> bool:
        if self.best is None:
            return True
        value = self.best[1].value
        return self.bounds[number] < value - self.wish.gap * abs(value)

    def _solve(self, number: int, limit_s: float) -> None:
        """Solve at one precision; keep the plan if it is the best, and what is proven."""
        priced, known = self.problems[number], self.bounds.get(number, -math.inf)
        best = None if self.best is None else self.best[1]
        try:
            wish, again = replace(self.wish, time_limit_s=limit_s), number in self.bounds
            outcome = _solve(priced, wish, best, again)
        except Unfinished as error:
            self.unfinished = error
            self.bounds[number] = max(known, error.bound)
            return
        except Infeasible as error:
            # Of several precisions the one that allows most says what can be had.
            if not str(self.refusal) or error.least < self.refusal.least:
                self.refusal = error
            self.bounds.pop(number, None)
            return
        bound = -math.inf if outcome.bound is None else outcome.bound
        self.bounds[number] = max(known, bound)
        if self.best is None or outcome.value < self.best[1].value:
            self.best = priced, outcome


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


def _solve(problem: Problem, wish: Wish, best: Outcome | None, again: bool) -> Outcome:
    """Solve in a child process: a crash there is an error here.

    `best` is what has been found so far; `again`: at this KV precision, too.
    """
    from llmpq.planner.isolated import solve_isolated

    how = How(
        method=wish.method,
        time_limit_s=wish.time_limit_s,
        gap=wish.gap,
        backend=wish.backend,
        budget=wish.budget,
        ceiling=math.inf if best is None else best.value,
        known=None if best is None else best.assignment,
        again=again,
    )
    return solve_isolated(problem, how)


def checked_plan(problem: Problem, outcome: Outcome, path: str | None) -> Plan:
    """Build the plan and have it checked by code that shares nothing with the solver."""
    from llmpq.planner.build_plan import build_plan
    from llmpq.planner.check import check_plan

    plan = build_plan(problem, outcome, model_path=path)
    check_plan(plan, spec=problem.spec, cluster=problem.cluster, costs=problem.costs)
    return plan
