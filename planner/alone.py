"""Plans of one precision for all layers, searched for beside the whole search.

A plan of one precision is one of those that the whole search weighs, but where time is short the
smaller search finds the best of them sooner: with it, a plan that takes no `--bits` is not behind
one that takes `--bits 4`. Nothing is proven here, so that all of the time goes into plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from llmpq.planner.exact.pairs import PairTables
from llmpq.planner.exact.search import Search
from llmpq.planner.exact.starts import Incumbent, first_plans
from llmpq.planner.methods import How, solve_as
from llmpq.planner.outcome import Assignment, Infeasible, Outcome, Unfinished
from llmpq.planner.problem import Problem

LIKELY = 1.3
"""Worth of a precision's best simple plan, relative to the least, up to which it is looked into."""
FIRST_SHARE = 0.4
"""Share of the time in which each of those is; the best has what is left."""


def solve_alone(p: Problem, how: How) -> Outcome:
    """Return the best plan of one precision, without a bound.

    Raises `Infeasible` where none is found.
    """
    start = time.perf_counter()
    deadline = start + how.time_limit_s
    likely = list(_likely(p, how.budget))
    best: Outcome | None = None
    if how.budget is None and p.numbers(*p.pairs[0]).uniform:
        best = _walked_to(p, how, likely, deadline)
    else:
        for number, b in enumerate(likely):
            share = max(0.0, deadline - time.perf_counter()) / (len(likely) - number)
            try:
                found = solve_as(_only(p, b), replace(how, time_limit_s=share))
            except (Infeasible, Unfinished):
                continue
            if best is None or found.value < best.value:
                best = replace(found, assignment=_at(found.assignment, b))
    if best is None:
        raise Infeasible("no plan of one precision was found")
    return replace(best, status="feasible", bound=None, seconds=time.perf_counter() - start)


def _walked_to(p: Problem, how: How, likely: list[int], deadline: float) -> Outcome | None:
    """Return the best plan that walks lead to, from every likely precision, then the best one."""
    reached: list[tuple[float, bool, int, Search]] = []
    for number, b in enumerate(likely):
        now = time.perf_counter()
        left = max(0.0, deadline - how.time_limit_s * (1 - FIRST_SHARE) - now)
        search = Search(_only(p, b), now + left / (len(likely) - number), how.gap)
        proven = search.soon() >= search.target
        if not proven:
            search.begin()
        reached.append((search.value, proven, number, search))
    if not reached:
        return None
    _, proven, number, search = min(reached, key=lambda one: one[0])
    if search.best is None:
        return None
    search.deadline = deadline
    if not proven and search.p is search.true:
        search.walk.from_best(deadline)
    elif not proven:  # devices that differ by their links alone: labels find what walks miss
        search.run()
    assert search.best is not None
    found = search.outcome(-math.inf, "")
    return replace(found, assignment=_at(found.assignment, likely[number]))


def _only(p: Problem, b: int) -> Problem:
    return p.with_changes(choices=(p.choices[b],))


def _likely(p: Problem, budget: float | None) -> Iterator[int]:
    """Yield choices that all layers may have, those whose simple plans promise most first."""
    worths: dict[int, float] = {}
    for b in range(len(p.choices)):
        if p.open[:, b].all():
            only = _only(p, b)
            incumbent = Incumbent(only, budget)
            for plan in first_plans(only, PairTables(only)):
                incumbent.offer(plan)
            worths[b] = incumbent.value
    least = min(worths.values(), default=math.inf)
    for b in sorted(worths, key=lambda b: worths[b]):
        if worths[b] <= least * LIKELY or math.isinf(least):
            yield b


def _at(a: Assignment, b: int) -> Assignment:
    """Return a plan of the problem with one choice as one of the whole problem."""
    stages = tuple(replace(s, choices=(b,) * len(s.choices)) for s in a.stages)
    return replace(a, stages=stages)
