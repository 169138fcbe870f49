"""Plans of one precision for all layers, searched for beside the whole search.

A plan of one precision is one of those that the whole search weighs, but where time is short the
smaller search finds the best of them sooner. So what `--bits` with the most promising precision
does is done here, with as much time: a plan that takes no `--bits` is not behind one that does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmpq.planner.exact.pairs import PairTables
from llmpq.planner.exact.search import Search
from llmpq.planner.exact.starts import Incumbent, first_plans
from llmpq.planner.methods import How, solve_as
from llmpq.planner.outcome import Infeasible, Outcome
from llmpq.planner.problem import Problem
from llmpq.planner.tries import Tries

LIKELY = 1.3
"""Worth of a precision's best simple plan, relative to the least, up to which it is looked into."""


@dataclass(frozen=True)
class Found:
    """The best plan of one precision, and of which problem it is."""

    number: int
    outcome: Outcome


@dataclass(frozen=True)
class _Likely:
    """A precision that all layers may have, and the problem at which its simple plans are best."""

    choice: int
    number: int
    worth: float


def solve_alone(problems: Sequence[Problem], how: How, late_s: float = 0.0) -> Found:
    """Return the best plan of one precision of any of the problems, without a bound.

    The problems are one job at several KV precisions. Choosing the precision may take `late_s`
    beyond the limit. Raises `Infeasible` where none is found.
    """
    start = time.perf_counter()
    b = _most_promising(problems, how)
    of_b = [number for number, p in enumerate(problems) if p.open[:, b].all()]
    only = [_only(problems[number], b) for number in of_b]
    left = how.time_limit_s - max(0.0, time.perf_counter() - start - late_s)
    tries = Tries(only, replace(how, time_limit_s=max(0.0, left)), solve_as)
    tries.solve_all()
    if tries.best is None:
        raise Infeasible("no plan of one precision was found")
    number, outcome = tries.best
    stages = tuple(replace(s, choices=(b,) * len(s.choices)) for s in outcome.assignment.stages)
    found = replace(
        outcome,
        assignment=replace(outcome.assignment, stages=stages),
        status="feasible",
        bound=None,
        seconds=time.perf_counter() - start,
    )
    return Found(of_b[number], found)


def _only(p: Problem, b: int) -> Problem:
    return p.with_changes(choices=(p.choices[b],))


def _most_promising(problems: Sequence[Problem], how: How) -> int:
    """Return the choice whose simple plans are best, or what a short search makes of them."""
    best: dict[int, _Likely] = {}
    for number, p in enumerate(problems):
        found = {b: Incumbent(p, how.budget) for b in range(len(p.choices)) if p.open[:, b].all()}
        for plan in first_plans(p, PairTables(p)):
            found[plan.stages[0].choices[0]].offer(plan)
        for b, incumbent in found.items():
            if b not in best or incumbent.value < best[b].worth:
                best[b] = _Likely(b, number, incumbent.value)
    if not best:
        raise Infeasible("layers may not have one precision")
    least = min(one.worth for one in best.values())
    likely = [one for one in best.values() if one.worth <= least * LIKELY or math.isinf(least)]
    if len(likely) == 1 or how.budget is not None:
        return min(likely, key=lambda one: one.worth).choice
    worths: dict[int, float] = {}
    for one in likely:
        only = _only(problems[one.number], one.choice)
        if not only.numbers(*only.pairs[0]).uniform:
            return min(likely, key=lambda one: one.worth).choice
        search = Search(only, time.perf_counter() + how.time_limit_s / len(likely), how.gap)
        search.soon()
        worths[one.choice] = search.value
    return min(worths, key=lambda b: worths[b])
