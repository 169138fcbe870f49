"""Plans of one precision for all layers, searched for beside the whole search.

A plan of one precision is one of those that the whole search weighs, but where time is short the
smaller search finds the best of them sooner: with it, a plan that takes no `--bits` is not behind
one that takes `--bits 4`. All KV precisions are weighed in one search, whose time goes to the most
promising pair. Nothing is proven here, so that all of the time goes into plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from llmpq.planner.exact.pairs import PairTables
from llmpq.planner.exact.search import Search
from llmpq.planner.exact.starts import Incumbent, first_plans
from llmpq.planner.methods import How, solve_as
from llmpq.planner.outcome import Infeasible, Outcome, Unfinished
from llmpq.planner.problem import Problem

LIKELY = 1.3
"""Worth of a precision's best simple plan, relative to the least, up to which it is looked into."""
FIRST_SHARE = 0.4
"""Share of the time in which each of those is searched for a little."""
NEAR = 1.01
"""Worth, relative to the best plan's by then, of those whose search goes on..."""
NEAR_SHARE = 0.6
"""...for this share of what is left; the best has the rest."""
POLISH_SHARE = 0.7
"""Share of that in which its best plan is improved: nothing needs a proof here."""
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """The best plan of one precision, and of which problem it is."""

    number: int
    outcome: Outcome


@dataclass(frozen=True)
class _One:
    """A problem with one choice for all layers."""

    number: int
    choice: int
    problem: Problem

    def found(self, outcome: Outcome, start: float) -> Found:
        """Return its plan as one of the whole problem."""
        stages = tuple(
            replace(s, choices=(self.choice,) * len(s.choices)) for s in outcome.assignment.stages
        )
        plan = replace(outcome.assignment, stages=stages)
        seconds = time.perf_counter() - start
        whole = replace(outcome, assignment=plan, status="feasible", bound=None, seconds=seconds)
        return Found(self.number, whole)


@dataclass
class _Try:
    """A search of one of them."""

    one: _One
    search: Search
    proven: bool


def solve_alone(problems: Sequence[Problem], how: How) -> Found:
    """Return the best plan of one precision of any of the problems, without a bound.

    The problems are one job at several KV precisions. Raises `Infeasible` where none is found.
    """
    start = time.perf_counter()
    deadline = start + how.time_limit_s
    likely = _likely(problems, how.budget)
    uniform = how.budget is None and all(p.numbers(*p.pairs[0]).uniform for p in problems)
    search = _searched if uniform else _each_solved
    best = search(likely, how, deadline)
    if best is None:
        raise Infeasible("no plan of one precision was found")
    one, outcome = best
    return one.found(outcome, start)


def _each_solved(likely: list[_One], how: How, deadline: float) -> tuple[_One, Outcome] | None:
    """Return the best plan of those that are found where all have equal time."""
    best: tuple[_One, Outcome] | None = None
    for k, one in enumerate(likely):
        share = max(0.0, deadline - time.perf_counter()) / (len(likely) - k)
        try:
            found = solve_as(one.problem, replace(how, time_limit_s=share))
        except (Infeasible, Unfinished):
            continue
        if best is None or found.value < best[1].value:
            best = one, found
    return best


def _searched(likely: list[_One], how: How, deadline: float) -> tuple[_One, Outcome] | None:
    """Return the best plan that a search leads to: of all for a while, of the near ones, of one.

    A plan of one is a plan of all that have its precision: it is offered to them, too.
    """
    now = time.perf_counter()
    limit = deadline if len(likely) == 1 else now + FIRST_SHARE * (deadline - now)
    tries: list[_Try] = []
    for one, end in _shared(likely, limit):
        search = Search(one.problem, end, how.gap)
        tries.append(_Try(one, search, proven=search.soon() >= search.target))
    if not tries:
        return None
    best = _ranked(tries)[0].search.value
    near = [tried for tried in tries if not tried.proven and tried.search.value <= best * NEAR]
    now = time.perf_counter()
    for tried, end in _shared(near, now + NEAR_SHARE * (deadline - now)):
        tried.search.begin(limit=end)
    first = _ranked(tries)[0]
    if first.search.best is None:
        return None
    first.search.deadline = deadline
    if not first.proven:
        first.search.run(POLISH_SHARE)
    return first.one, first.search.outcome(-math.inf, "")


def _shared(items: Sequence[T], limit: float) -> Iterator[tuple[T, float]]:
    """Yield each with the end of its part of the time until `limit`."""
    for number, item in enumerate(items):
        now = time.perf_counter()
        yield item, now + max(0.0, limit - now) / (len(items) - number)


def _ranked(tries: list[_Try]) -> list[_Try]:
    """Return the tries, that with the best plan first, when each knows the plans of its like."""
    plans = [(tried, tried.search.best) for tried in tries]
    for tried in tries:
        for other, plan in plans:
            if plan is not None and other is not tried and other.one.choice == tried.one.choice:
                tried.search.incumbent.offer(plan)
    return sorted(tries, key=lambda tried: tried.search.value)


def _likely(problems: Sequence[Problem], budget: float | None) -> list[_One]:
    """Return those that may be best, each with one precision for all, most promising first."""
    worths: dict[tuple[int, int], float] = {}
    for number, p in enumerate(problems):
        best = {b: Incumbent(p, budget) for b in range(len(p.choices)) if p.open[:, b].all()}
        for plan in first_plans(p, PairTables(p)):
            best[plan.stages[0].choices[0]].offer(plan)
        worths.update({(number, b): incumbent.value for b, incumbent in best.items()})
    least = min(worths.values(), default=math.inf)
    return [
        _One(number, b, problems[number].with_changes(choices=(problems[number].choices[b],)))
        for (number, b), worth in sorted(worths.items(), key=lambda item: item[1])
        if worth <= least * LIKELY or math.isinf(least)
    ]
