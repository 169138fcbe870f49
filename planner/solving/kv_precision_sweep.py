"""Solves one job at several KV precisions and chunks of prompts, within one limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from llmpq.planner.problem.outcome import (
    Assignment,
    Infeasible,
    Outcome,
    Unfinished,
)
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.methods import How

FIRST_SHARE = 0.4
"""Share of the time that the most promising KV precision has, if not more."""
AGAIN_SHARE = 0.1
"""Share of the time that must be left for a KV precision to be looked at once more."""


class Tries:
    """What is found of problems that differ by KV precision or chunk, and what is proven of each.

    The time is shared out among them, the most promising first; what some leave of theirs is for
    the one whose bound is the least.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        how: How,
        solve: Callable[[Problem, How], Outcome],
        first_share: float = FIRST_SHARE,
    ) -> None:
        self.problems, self.how, self.solve = problems, how, solve
        self.first_share = first_share
        self.best: tuple[int, Outcome] | None = None
        """The number of a problem and its outcome."""
        self.bounds: dict[int, float] = {}
        """By the number of a problem that may have a plan."""
        self.unfinished: Unfinished | None = None
        self.refusal = Infeasible("")

    def solve_all(self) -> None:
        """Solve at every precision; keep the best plan."""
        limit = self.how.time_limit_s
        deadline = time.perf_counter() + limit
        waiting = self._by_promise() if self.how.method == "exact" else self._as_given()
        for k, number in enumerate(waiting):
            left = max(0.0, deadline - time.perf_counter())
            share = max(1 / (len(waiting) - k), self.first_share if k == 0 else 0.0)
            self._solve(number, limit if math.isinf(left) else left * share)
        again = sorted(self.bounds, key=lambda number: self.bounds[number])
        for number in again if len(self.problems) > 1 and self.how.method == "exact" else ():
            left = deadline - time.perf_counter()
            if left > AGAIN_SHARE * limit and self._may_be_better(number):
                self._solve(number, left)
        self._move_to_another_kv()

    @property
    def proven(self) -> bool:
        """Whether no plan can be better, within the gap."""
        return not any(self._may_be_better(number) for number in self.bounds)

    def take(self, number: int, outcome: Outcome) -> None:
        """Keep a plan that was found elsewhere, if it is the best."""
        if number in self.bounds and (self.best is None or outcome.value < self.best[1].value):
            bound = min(self.bounds[number], outcome.value)
            self.best = number, replace(outcome, bound=bound)
            self._move_to_another_kv()

    def _move_to_another_kv(self) -> None:
        """Take the best plan as it is at the KV precision at which it is worth most."""
        if self.best is None or self.how.method != "exact" or self.proven:
            return
        outcome = self.best[1]
        for number in self.bounds:
            worth = _worth(self.problems[number], outcome.assignment, self.how.budget)
            if worth < self.best[1].value:
                bound = min(self.bounds[number], worth)
                self.best = number, replace(outcome, value=worth, bound=bound)

    def _as_given(self) -> list[int]:
        return list(range(len(self.problems)))

    def _by_promise(self) -> list[int]:
        """Return the problems, those first that are quickest if everything fits.

        What is found at one precision bounds the search at those that follow.
        """
        if len(self.problems) < 2:
            return self._as_given()
        from llmpq.planner.exact.bounds.pairs import quick_bound

        bounds = [quick_bound(priced) for priced in self.problems]
        return sorted(self._as_given(), key=lambda number: bounds[number])

    def _may_be_better(self, number: int) -> bool:
        if self.best is None:
            return True
        value = self.best[1].value
        return self.bounds[number] < value - self.how.gap * abs(value)

    def _solve(self, number: int, limit_s: float) -> None:
        """Solve at one precision; keep the plan if it is the best, and what is proven."""
        known = self.bounds.get(number, -math.inf)
        how = replace(self.how, time_limit_s=limit_s, again=number in self.bounds)
        if self.best is not None:
            outcome = self.best[1]
            how = replace(how, ceiling=outcome.value, known=outcome.assignment)
        try:
            outcome = self.solve(self.problems[number], how)
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
            self.best = number, outcome


def _worth(p: Problem, a: Assignment, budget: float | None) -> float:
    """Return what a plan is worth, under a budget its time; infinite where it does not fit."""
    from llmpq.planner.evaluate.fits import fits
    from llmpq.planner.evaluate.pipeline_time import keeps_budget, value

    if not fits(p, a):
        return math.inf
    if budget is None:
        return value(p, a)
    return value(p.with_changes(theta=0.0), a) if keeps_budget(p, a, budget) else math.inf
