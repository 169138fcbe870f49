"""Best-bound search over the pairs of micro-batch sizes, all device orders at once.

1. Relax every pair (planner/exact/relaxation.py); put it on a heap by its bound.
2. Pop the smallest: tighten it with the completion program, which also gives a plan.
3. If it is still the smallest, close it: label setting below the best plan, in widening windows, so
   that the first window with a plan in it ends the pair.
4. Stop when the smallest bound reaches the best plan: the plan is proven optimal.

Clusters with too many classes of devices for all orders, or models with too many ways to fill a
stage, are searched in part (a class's devices in a row, layers in groups); the bound is then the
relaxation's, which holds for every plan.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmpq.planner.exact.columns import Columns, TooManyColumns, make_columns
from llmpq.planner.exact.completion import MAX_STATES, ChainSpace, Completion, Space, num_states
from llmpq.planner.exact.form import Form, make_form
from llmpq.planner.exact.labels import GaveUp, LabelSearch, Limits
from llmpq.planner.exact.relaxation import ClassRelaxation, Prices
from llmpq.planner.fits import fits
from llmpq.planner.ilp import no_plan_fits, solve_ilp
from llmpq.planner.outcome import OPTIMAL_GAP, Assignment, Infeasible, Outcome, Stage
from llmpq.planner.pipeline_time import sum_omega, value
from llmpq.planner.problem import Problem

WINDOWS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, math.inf)
"""Widths of the label windows above a pair's bound, relative."""


@dataclass(kw_only=True)
class Pair:
    """A pair of micro-batch sizes and what is known of it."""

    form: Form
    bound: float
    prices: Prices
    completions: list[Completion] = field(default_factory=list)
    window: int = 0


class Search:
    """State of the best-bound search."""

    def __init__(
        self,
        p: Problem,
        space: Space,
        deadline: float,
        gap: float,
        *,
        longest: int | None = None,
        budget: float | None = None,
    ) -> None:
        self.p, self.space, self.deadline = p, space, deadline
        self.gap = gap / 2  # half of it for pruning, so that the stated gap is below the wish
        self.budget = budget
        self.relaxation = ClassRelaxation(p)
        self.columns = self._columns(longest)
        self.best: Assignment | None = None
        self.value = math.inf
        self.relaxed = math.inf
        """Smallest bound of any pair's relaxation: valid for every plan."""
        self.labels = 0
        self.stuck: list[float] = []

    def _columns(self, longest: int | None) -> Columns:
        numbers = [self.p.numbers(eta, xi) for eta, xi in self.p.pairs]
        return make_columns(
            self.p.omega,
            numbers[0].layer_bytes[0],
            max(int(x.capacity.max()) for x in numbers),
            only_whole=self.p.max_stages == 1,
            longest=longest,
        )

    def offer(self, a: Assignment) -> None:
        """Keep a better plan; under a budget its worth is time + theta * budget."""
        if fits(self.p, a):
            worth = value(self.p, a)
            if self.budget is not None:
                spare = self.budget - sum_omega(self.p, a)
                worth = worth + self.p.theta * spare if spare >= 0 else math.inf
            if worth < self.value:
                self.best, self.value = a, worth

    @property
    def target(self) -> float:
        """Bounds at or above this are as good as closed."""
        if not math.isfinite(self.value):
            return math.inf
        priced = self.p.theta * self.budget if self.budget is not None else 0.0
        return self.value - self.gap * (self.value - priced)

    def run(self) -> float:
        """Search; return the proven lower bound over the space."""
        heap: list[tuple[float, int, Pair]] = []
        for number, (eta, xi) in enumerate(self.p.pairs):
            form = make_form(self.p, eta, xi)
            prices = self.relaxation.solve(form)
            if prices.value < math.inf:
                # The solver's own tolerance is 1e-7; bounds that decide are recomputed later.
                pair = Pair(form=form, bound=prices.value * (1 - 1e-7), prices=prices)
                heapq.heappush(heap, (pair.bound, number, pair))
                self.relaxed = min(self.relaxed, pair.bound)
        while heap and heap[0][0] < self.target:
            bound, number, pair = heapq.heappop(heap)
            if time.perf_counter() > self.deadline and self.best is not None:
                self.stuck.append(bound)
                break
            if not pair.completions:
                self._tighten(pair)
            else:
                self._close(pair)
            if pair.bound < math.inf:
                heapq.heappush(heap, (pair.bound, number, pair))
        return min([self.target, *self.stuck, *(bound for bound, _, _ in heap)])

    def _tighten(self, pair: Pair) -> None:
        """Replace the relaxation's bound by the completion program's; take its plan."""
        bound = self._completion(pair.form, pair.prices)
        pair.completions.append(bound)
        pair.bound = max(pair.bound, bound.value)
        if math.isfinite(bound.value):
            self.offer(_greedy_plan(bound))

    def _completion(self, form: Form, prices: Prices) -> Completion:
        return Completion(
            p=self.p, form=form, prices=prices, columns=self.columns, space=self.space
        )

    def _close(self, pair: Pair) -> None:
        """Widen the window until a plan is found in it or the pair is proven useless."""
        if len(pair.completions) == 1 and pair.form.z:
            middle = pair.prices.kappa
            for kappa in sorted({0.0, middle / 2, (1 + middle) / 2, 1.0} - {middle}):
                prices = self.relaxation.solve(pair.form, kappa)
                pair.completions.append(self._completion(pair.form, prices))
            pair.bound = max(pair.bound, *(c.value for c in pair.completions))
            if pair.bound >= self.target:
                return
        below = min(self.target, pair.bound + abs(pair.bound) * WINDOWS[pair.window])
        pair.window += 1
        limits = Limits(deadline=self.deadline)
        search = LabelSearch(self.p, pair.completions, limits, self.budget)
        try:
            found = search.run(below)
        except GaveUp:
            self.stuck.append(pair.bound)
            pair.bound = math.inf
            found = search.found()
        else:
            pair.bound = below if found is None and below < self.target else math.inf
        self.labels += search.count
        if found is not None:
            self.offer(found)


def solve_exact(p: Problem, *, time_limit_s: float = 60.0, gap: float = 1e-6) -> Outcome:
    """Return the best plan over all orders and pairs, with its proof."""
    start = time.perf_counter()
    if not p.numbers(*p.pairs[0]).uniform:
        return solve_ilp(p, time_limit_s=time_limit_s, gap=gap)
    deadline = start + time_limit_s
    if num_states(p) > MAX_STATES:
        return _solve_part(p, start, deadline, gap)
    try:
        search = Search(p, Space(p), deadline, gap)
    except TooManyColumns:
        return _solve_part(p, start, deadline, gap)
    bound = search.run()
    return _outcome(p, search, bound, start, gap, f"{search.labels} labels")


def _outcome(
    p: Problem, search: Search, bound: float, start: float, gap: float, note: str
) -> Outcome:
    if search.best is None:
        raise Infeasible(no_plan_fits(p))
    proven = search.value - bound <= OPTIMAL_GAP * abs(search.value)
    return Outcome(
        method="exact",
        status="optimal" if proven else "feasible",
        assignment=search.best,
        value=search.value,
        bound=bound,
        seconds=time.perf_counter() - start,
        note=note,
    )


def _solve_part(p: Problem, start: float, deadline: float, gap: float) -> Outcome:
    """Search chains of classes with short stages; bound by the relaxation over all plans."""
    full = num_states(p) <= MAX_STATES
    best: Search | None = None
    relaxed = math.inf
    for sequence in _sequences(p):
        for longest in _lengths(p):
            space = Space(p) if full else ChainSpace(p, sequence)
            now = time.perf_counter()
            try:
                part = Search(p, space, now + (deadline - now) / 2, max(gap, 1e-3), longest=longest)
            except TooManyColumns:
                break
            if best is not None and best.best is not None:
                part.offer(best.best)
            part.run()
            relaxed = min(relaxed, part.relaxed)
            if best is None or part.value < best.value:
                best = part
            if part.best is not None:
                break
        if full:
            break
    if best is None or best.best is None:
        return _solve_grouped(p, start, deadline, gap)
    note = "searched in part (each class's devices in a row); the bound holds for every plan"
    return _outcome(p, best, min(relaxed, best.value), start, gap, note)


def _lengths(p: Problem) -> list[int]:
    """Longest stages to allow, in layers: a few times an even share, then more."""
    share = -(-p.num_layers // len(p.cluster.devices))
    return sorted({min(p.num_layers, max(4, k * share)) for k in (6, 12, 24)})


def _sequences(p: Problem) -> list[Sequence[int]]:
    """Two sequences of classes: by speed, slow first and fast first."""
    x = p.numbers(*p.pairs[0])
    speed = sorted(range(len(p.classes)), key=lambda c: float(x.decode_s[0, c].min()))
    return [speed, speed[::-1]]


def _solve_grouped(p: Problem, start: float, deadline: float, gap: float) -> Outcome:
    """Let pairs (then more) of layers share a choice; bound by the relaxation of single layers."""
    relaxation = ClassRelaxation(p)
    bound = min(relaxation.solve(make_form(p, *pair)).value for pair in p.pairs)
    for size in (2, 3, 4, 6, 8):
        if p.group > 1 or p.spec.num_layers % size:
            continue
        grouped = p.with_changes(group=size)
        left = max(1.0, deadline - time.perf_counter())
        try:
            found = solve_exact(grouped, time_limit_s=left, gap=gap)
        except Infeasible:
            continue
        a = _ungrouped(found.assignment, size)
        worth = value(p, a)
        return Outcome(
            method="exact",
            status="feasible",
            assignment=a,
            value=worth,
            bound=min(bound * (1 - 1e-7), worth),
            seconds=time.perf_counter() - start,
            note=f"searched in part (groups of {size} layers); the bound holds for every plan",
        )
    left = max(1.0, deadline - time.perf_counter())
    return solve_ilp(p, time_limit_s=left, gap=gap)


def _ungrouped(a: Assignment, size: int) -> Assignment:
    stages = tuple(
        Stage(
            cls=s.cls,
            start=s.start * size,
            end=s.end * size,
            choices=tuple(b for b in s.choices for _ in range(size)),
        )
        for s in a.stages
    )
    return Assignment(
        prefill_microbatch=a.prefill_microbatch,
        decode_microbatch=a.decode_microbatch,
        stages=stages,
    )


def _greedy_plan(bound: Completion) -> Assignment:
    stages = tuple(
        Stage(cls=c, start=a, end=b, choices=bound.cheapest(c, a, b)) for c, a, b in bound.greedy()
    )
    numbers = bound.form.numbers
    return Assignment(prefill_microbatch=numbers.eta, decode_microbatch=numbers.xi, stages=stages)
