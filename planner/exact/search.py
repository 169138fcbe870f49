"""Best-bound search over the pairs of micro-batch sizes, all device orders at once.

1. Relax every pair (planner/exact/relaxation.py); put it on a heap by its bound.
2. Pop the smallest: tighten it with the completion program, which also gives a plan.
3. If it is still the smallest, close it: label setting below the best plan, in widening windows, so
   that the first window with a plan in it ends the pair.
4. Stop when the smallest bound reaches the best plan: the plan is proven optimal.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, field

from llmpq.planner.exact.columns import Columns, make_columns
from llmpq.planner.exact.completion import Completion, Space
from llmpq.planner.exact.form import Form, make_form
from llmpq.planner.exact.labels import GaveUp, LabelSearch, Limits
from llmpq.planner.exact.relaxation import ClassRelaxation
from llmpq.planner.fits import fits
from llmpq.planner.ilp import no_plan_fits
from llmpq.planner.outcome import Assignment, Infeasible, Outcome, Stage
from llmpq.planner.pipeline_time import value
from llmpq.planner.problem import Problem

WINDOWS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, math.inf)
"""Widths of the label windows above a pair's bound, relative."""


@dataclass(kw_only=True)
class Pair:
    """A pair of micro-batch sizes and what is known of it."""

    form: Form
    bound: float
    completions: list[Completion] = field(default_factory=list)
    window: int = 0


class Search:
    """State of the best-bound search."""

    def __init__(self, p: Problem, deadline: float, gap: float) -> None:
        self.p, self.deadline, self.gap = p, deadline, gap
        self.relaxation = ClassRelaxation(p)
        self.space = Space(p)
        self.columns: Columns | None = None
        self.best: Assignment | None = None
        self.value = math.inf
        self.labels = 0
        self.stuck: list[float] = []

    def offer(self, a: Assignment) -> None:
        """Keep a better plan."""
        if fits(self.p, a):
            worth = value(self.p, a)
            if worth < self.value:
                self.best, self.value = a, worth

    @property
    def target(self) -> float:
        """Bounds at or above this are as good as closed."""
        return self.value * (1 - self.gap) if math.isfinite(self.value) else math.inf

    def run(self) -> float:
        """Search; return the proven lower bound."""
        heap: list[tuple[float, int, Pair]] = []
        for number, (eta, xi) in enumerate(self.p.pairs):
            form = make_form(self.p, eta, xi)
            relaxed = self.relaxation.solve(form)
            if relaxed.value < math.inf:
                pair = Pair(form=form, bound=relaxed.value * (1 - 1e-9))
                heapq.heappush(heap, (pair.bound, number, pair))
        while heap:
            bound, number, pair = heapq.heappop(heap)
            if bound >= self.target:
                heapq.heappush(heap, (bound, number, pair))
                break
            if time.perf_counter() > self.deadline:
                self.stuck.append(bound)
                continue
            if not pair.completions:
                self._tighten(pair)
            else:
                self._close(pair)
            if pair.bound < math.inf:
                heapq.heappush(heap, (pair.bound, number, pair))
        open_bounds = self.stuck + [bound for bound, _, _ in heap]
        return min([self.target, *open_bounds])

    def _tighten(self, pair: Pair) -> None:
        """Replace the relaxation's bound by the completion program's; take its plan."""
        prices = self.relaxation.solve(pair.form)
        bound = self._completion(pair.form, prices)
        pair.completions.append(bound)
        pair.bound = max(pair.bound, bound.value)
        if math.isfinite(bound.value):
            self.offer(_greedy_plan(bound))

    def _completion(self, form: Form, prices: object) -> Completion:
        if self.columns is None:
            self.columns = make_columns(
                self.p.omega,
                form.numbers.layer_bytes[0],
                int(form.numbers.capacity.max()) if False else self._most_bytes(),
                only_whole=self.p.max_stages == 1,
            )
        return Completion(
            p=self.p,
            form=form,
            prices=prices,
            columns=self.columns,
            space=self.space,  # type: ignore[arg-type]
        )

    def _most_bytes(self) -> int:
        return max(int(self.p.numbers(eta, xi).capacity.max()) for eta, xi in self.p.pairs)

    def _close(self, pair: Pair) -> None:
        """Widen the window until a plan is found in it or the pair is proven useless."""
        if len(pair.completions) == 1 and pair.form.z:
            middle = pair.completions[0].prices.kappa
            for kappa in sorted({0.0, middle / 2, (1 + middle) / 2, 1.0} - {middle}):
                prices = self.relaxation.solve(pair.form, kappa)
                pair.completions.append(self._completion(pair.form, prices))
            pair.bound = max(pair.bound, *(c.value for c in pair.completions))
            if pair.bound >= self.target:
                return
        width = WINDOWS[pair.window]
        pair.window += 1
        below = min(self.target, pair.bound + abs(pair.bound) * width)
        limits = Limits(deadline=self.deadline)
        search = LabelSearch(self.p, pair.completions, limits)
        try:
            found = search.run(below)
        except GaveUp:
            self.stuck.append(pair.bound)
            pair.bound = math.inf
            if search.best is not None:
                self.offer(search._assignment())
            return
        finally:
            self.labels += search.count
        if found is not None:
            self.offer(found[1])
            pair.bound = math.inf
        else:
            pair.bound = below if below < self.target else math.inf


def solve_exact(p: Problem, *, time_limit_s: float = 60.0, gap: float = 1e-6) -> Outcome:
    """Return the best plan over all orders and pairs, with its proof."""
    start = time.perf_counter()
    search = Search(p, start + time_limit_s, gap)
    bound = search.run()
    if search.best is None:
        raise Infeasible(no_plan_fits(p))
    proven = search.value - bound <= gap * 1.01 * abs(search.value)
    return Outcome(
        method="exact",
        status="optimal" if proven else "feasible",
        assignment=search.best,
        value=search.value,
        bound=bound,
        seconds=time.perf_counter() - start,
        note=f"{search.labels} labels",
    )


def _greedy_plan(bound: Completion) -> Assignment:
    stages = tuple(
        Stage(cls=c, start=a, end=b, choices=bound.cheapest(c, a, b)) for c, a, b in bound.greedy()
    )
    numbers = bound.form.numbers
    return Assignment(prefill_microbatch=numbers.eta, decode_microbatch=numbers.xi, stages=stages)
