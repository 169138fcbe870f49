"""Plans of one precision for all layers, searched for beside the whole search.

A plan of one precision is one of those that the whole search weighs, but where time is short the
smaller search finds the best of them sooner: with it, a plan that takes no `--bits` is not behind
one that takes `--bits 4`.
"""

from __future__ import annotations

import time
from dataclasses import replace

from llmpq.planner.exact.pairs import PairTables
from llmpq.planner.exact.starts import Incumbent, first_plans
from llmpq.planner.methods import How, solve_as
from llmpq.planner.outcome import Assignment, Infeasible, Outcome, Unfinished
from llmpq.planner.predict.pipeline_time import value
from llmpq.planner.problem import Problem


def solve_alone(p: Problem, how: How) -> Outcome:
    """Return the best plan of one precision, without a bound.

    The precision whose simplest plans are best has all the time that its own proof takes, then the
    next. Raises `Infeasible` where no plan is found.
    """
    deadline = time.perf_counter() + how.time_limit_s
    best: Outcome | None = None
    for b in _by_promise(p, how.budget):
        left = deadline - time.perf_counter()
        if left <= 0:
            break
        only = p.with_changes(choices=(p.choices[b],))
        try:
            found = solve_as(only, replace(how, time_limit_s=left))
        except (Infeasible, Unfinished):
            continue
        plan = _at(found.assignment, b)
        worth = value(p, plan) if how.budget is None else found.value
        if best is None or worth < best.value:
            best = replace(found, assignment=plan, value=worth, status="feasible", bound=None)
    if best is None:
        raise Infeasible("no plan of one precision was found")
    return best


def _by_promise(p: Problem, budget: float | None) -> list[int]:
    """Return the choices that all layers may have, best simple plan first."""
    worths: dict[int, float] = {}
    for b in range(len(p.choices)):
        if p.open[:, b].all():
            only = p.with_changes(choices=(p.choices[b],))
            incumbent = Incumbent(only, budget)
            for plan in first_plans(only, PairTables(only)):
                incumbent.offer(plan)
            worths[b] = incumbent.value
    return sorted(worths, key=lambda b: worths[b])


def _at(a: Assignment, b: int) -> Assignment:
    """Return a plan of the problem with one choice as one of the whole problem."""
    stages = tuple(replace(s, choices=(b,) * len(s.choices)) for s in a.stages)
    return replace(a, stages=stages)
