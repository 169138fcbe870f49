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

from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.search import Search
from llmpq.planner.exact.start.starts import Incumbent, first_plans
from llmpq.planner.problem.outcome import Infeasible, Outcome
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.kv_precision_sweep import Tries
from llmpq.planner.solving.methods import How, solve_as

LIKELY = 1.3
"""Worth of a precision's best simple plan, relative to the least, up to which it is looked into."""

FIRST_SHARE = 0.75
"""Share of the time for the most promising KV precision: a plan at one is soon one at another."""


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
    deadline = start + how.time_limit_s + late_s
    best: Found | None = None
    for b in _by_promise(problems, how):
        left = min(how.time_limit_s, deadline - time.perf_counter())
        of_b = [number for number, p in enumerate(problems) if p.open[:, b].all()]
        only = [_only(problems[number], b) for number in of_b]
        tries = Tries(only, replace(how, time_limit_s=max(0.0, left)), solve_as, FIRST_SHARE)
        tries.solve_all()
        if tries.best is not None:
            number, outcome = tries.best
            if best is None or outcome.value < best.outcome.value:
                best = Found(of_b[number], _of_all(outcome, b))
        if left <= 0 or not tries.proven:
            break  # all of the time is for the first; what it leaves is for the next
    if best is None:
        raise Infeasible("no plan of one precision was found")
    seconds = time.perf_counter() - start
    return replace(best, outcome=replace(best.outcome, seconds=seconds))


def _of_all(outcome: Outcome, b: int) -> Outcome:
    """Return a plan of the problem with one choice as one of the whole problem, not proven."""
    stages = tuple(replace(s, choices=(b,) * len(s.choices)) for s in outcome.assignment.stages)
    plan = replace(outcome.assignment, stages=stages)
    return replace(outcome, assignment=plan, status="feasible", bound=None)


def _only(p: Problem, b: int) -> Problem:
    return p.with_changes(choices=(p.choices[b],))


def _by_promise(problems: Sequence[Problem], how: How) -> list[int]:
    """Return the likely choices, by their simple plans or what a short search makes of them."""
    best: dict[int, _Likely] = {}
    for number, p in enumerate(problems):
        found = {b: Incumbent(p, how.budget) for b in range(len(p.choices)) if p.open[:, b].all()}
        for plan in first_plans(p, PairTables(p)):
            found[plan.stages[0].choices[0]].offer(plan)
        for b, incumbent in found.items():
            if b not in best or incumbent.value < best[b].worth:
                best[b] = _Likely(b, number, incumbent.value)
    least = min((one.worth for one in best.values()), default=math.inf)
    likely = [one for one in best.values() if one.worth <= least * LIKELY or math.isinf(least)]
    worths = {one.choice: one.worth for one in likely}
    for one in likely if len(likely) > 1 and how.budget is None else ():
        only = _only(problems[one.number], one.choice)
        if only.numbers(*only.pairs[0]).uniform:
            search = Search(only, time.perf_counter() + how.time_limit_s / len(likely), how.gap)
            search.soon()
            worths[one.choice] = search.value
    return sorted(worths, key=lambda b: worths[b])
