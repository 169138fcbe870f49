"""Best-bound search over the pairs of micro-batch sizes, all device orders at once.

1. Bound every pair by its layers alone; relax it (planner/exact/relaxation.py) once no other has a
   smaller bound, and put it on a heap.
2. Pop the smallest: tighten it with the completion program, which also gives a plan.
3. If it is still the smallest, close it: label setting below the best plan, in widening windows, so
   that the first window with a plan in it ends the pair.
4. Stop when the smallest bound reaches the best plan: the plan is proven optimal. At the deadline
   the smallest bound is the proof of what there is; without a plan, the pair that needs the least
   memory is tried, and a little more time is taken.

Clusters with too many classes of devices for all orders, and models with too many ways to fill a
stage, are searched in part (planner/exact/large.py).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import time
from dataclasses import dataclass, field, replace

from llmpq.planner.exact.columns import Columns, TooManyColumns, make_columns
from llmpq.planner.exact.completion import MAX_STATES, Completion, Space, num_states
from llmpq.planner.exact.form import EVERYWHERE, Box, Form, make_form
from llmpq.planner.exact.labels import GaveUp, LabelSearch, Limits
from llmpq.planner.exact.relaxation import ClassRelaxation, Prices, quick_bound
from llmpq.planner.fits import fits
from llmpq.planner.ilp import no_plan_fits, no_plan_yet, solve_ilp
from llmpq.planner.outcome import (
    BUDGET_ROUNDING,
    OPTIMAL_GAP,
    Assignment,
    Infeasible,
    Outcome,
    Stage,
    Unfinished,
)
from llmpq.planner.pipeline_time import sum_omega, value
from llmpq.planner.problem import Problem

WINDOWS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, math.inf)
"""Widths of the label windows above a pair's bound, relative."""


PATIENCE = (25_000, 15_000, 40_000, 150_000)
"""Labels a part may take, by how often it was split, before it is split again."""
WORK = 1500
"""Label-column pairs a label may take on average, before a part is split."""
QUICK_WINDOWS = (0.005, 0.02, 0.08, 0.3)
QUICK_WORK = 4e6
BEAM = 24
"""Labels a cell keeps in the quick search for a plan."""
PIECES = 6
"""Parts a range of D (or P) is split into."""
RANGE_STEPS = 9
"""Bisections to shrink a range before it is split."""
OVERTIME_S = 2.0
"""Seconds beyond the deadline that a search without a plan may take."""


@dataclass(kw_only=True)
class Part:
    """A pair of micro-batch sizes, all of it or a box of P and D, and what is known of it."""

    form: Form
    bound: float
    prices: Prices
    box: Box = EVERYWHERE
    depth: int = 0
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
        self.overtime = False

    def _columns(self, longest: int | None) -> Columns:
        roomiest = self.p.numbers(*self.p.pairs[0])  # larger micro-batches leave less room
        return make_columns(
            self.p.open_omega,
            roomiest.layer_bytes[0],
            int(roomiest.capacity.max()),
            only_whole=self.p.max_stages == 1,
            longest=longest,
        )

    def outcome(self, bound: float, start: float, note: str) -> Outcome:
        """Return the best plan with a bound; a bound below infinity says there may be one."""
        if self.best is None and bound < math.inf:
            raise Unfinished(no_plan_yet(self.deadline - start))
        if self.best is None:
            raise Infeasible(no_plan_fits(self.p))
        proven = self.value - bound <= OPTIMAL_GAP * abs(self.value)
        return Outcome(
            method="exact",
            status="optimal" if proven else "feasible",
            assignment=self.best,
            value=self.value,
            bound=min(bound, self.value),
            seconds=time.perf_counter() - start,
            note=note,
        )

    def offer(self, a: Assignment) -> None:
        """Keep a better plan; under a budget its worth is time + theta * budget.

        What the label search found within the budget is within it here, too, however it rounds.
        """
        if fits(self.p, a):
            worth = value(self.p, a)
            if self.budget is not None:
                spare = self.budget - sum_omega(self.p, a)
                within = spare >= -self.budget * BUDGET_ROUNDING / 2
                worth = worth + self.p.theta * spare if within else math.inf
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
        heap: list[tuple[float, int, Part]] = []
        numbers = itertools.count()
        forms = [make_form(self.p, eta, xi) for eta, xi in self.p.pairs]
        waiting = [(quick_bound(self.p, form), k) for k, form in enumerate(forms)]
        heapq.heapify(waiting)
        while True:
            least = heap[0][0] if heap else math.inf
            soonest = waiting[0][0] if waiting else math.inf
            if min(least, soonest) >= self.target or self._late():
                break
            if soonest < least:
                _, k = heapq.heappop(waiting)
                part = self._part(forms[k], EVERYWHERE, 0, soonest)
                self.relaxed = min(self.relaxed, part.bound)
                # Until there is a plan, every pair is asked for one at once.
                parts = self._tighten(part) if self.best is None else [part]
            else:
                _, _, part = heapq.heappop(heap)
                parts = self._close(part) if part.completions else self._tighten(part)
            for open_part in parts:
                heapq.heappush(heap, (open_part.bound, next(numbers), open_part))
        self.relaxed = min(self.relaxed, soonest)
        return min(self.target, least, soonest, *self.stuck)

    def _late(self) -> bool:
        """Whether to stop: at the deadline, or a little later where there is no plan yet."""
        now = time.perf_counter()
        if now <= self.deadline:
            return False
        if self.best is None and not self.overtime:
            self.overtime = True
            roomiest = make_form(self.p, *self.p.pairs[0])
            self._tighten(self._part(roomiest, EVERYWHERE, 0))
        return self.best is not None or now > self.deadline + OVERTIME_S

    def _part(self, form: Form, box: Box, depth: int, at_least: float = -math.inf) -> Part:
        prices = self.relaxation.solve(form, box=box)
        # The solver's own tolerance is 1e-7; bounds that decide are recomputed later.
        relaxed = prices.value - 1e-7 * abs(prices.value) if prices.value < math.inf else math.inf
        return Part(form=form, bound=max(relaxed, at_least), prices=prices, box=box, depth=depth)

    def _tighten(self, part: Part) -> list[Part]:
        """Replace the relaxation's bound by the completion program's; take its plan."""
        bound = self._completion(part, part.prices)
        part.completions.append(bound)
        part.bound = max(part.bound, bound.value)
        if math.isinf(bound.value):
            return []
        self.offer(_greedy_plan(bound))
        return [part]

    def _completion(self, part: Part, prices: Prices) -> Completion:
        return Completion(
            p=self.p,
            form=part.form,
            prices=prices,
            columns=self.columns,
            space=self.space,
            box=part.box,
        )

    def _close(self, part: Part) -> list[Part]:
        """Widen the window until a plan is found in it or the part is proven useless.

        A part that takes too many labels is split by the range of D or P: within a small range the
        slowest stage is nearly known, so bounds are tight and labels few.
        """
        if len(part.completions) == 1 and part.form.z:
            middle = part.prices.kappa
            for kappa in sorted({0.0, middle / 2, (1 + middle) / 2, 1.0} - {middle}):
                prices = self.relaxation.solve(part.form, kappa, part.box)
                part.completions.append(self._completion(part, prices))
            part.bound = max(part.bound, *(c.value for c in part.completions))
            if part.bound >= self.target:
                return []
        if part.window == 0 and part.depth <= 1:
            self._quick_plan(part)
        if part.bound >= self.target:
            return []
        below = min(self.target, part.bound + abs(part.bound) * WINDOWS[part.window])
        part.window += 1
        last = part.depth >= len(PATIENCE)
        patience = 3_000_000 if last else PATIENCE[part.depth]
        work = math.inf if last else WORK * patience
        limits = Limits(deadline=self.deadline, max_labels=patience, max_work=work)
        search = LabelSearch(self.p, part.completions, limits, self.budget)
        try:
            found = search.run(below)
        except GaveUp:
            gave_up, found = True, search.found()
        else:
            gave_up = False
        self.labels += search.count
        if found is not None:
            self.offer(found)
        if gave_up:
            if last or time.perf_counter() > self.deadline:
                self.stuck.append(part.bound)
                return []
            return self._split(part)
        if found is not None or below >= self.target:
            return []
        part.bound = below
        return [part]

    def _quick_plan(self, part: Part) -> None:
        """Look for a good plan with few labels: the better it is, the fewer labels later."""
        limits = Limits(deadline=self.deadline, beam=BEAM, max_work=QUICK_WORK)
        for width in QUICK_WINDOWS:
            below = min(self.target, part.bound + abs(part.bound) * width)
            search = LabelSearch(self.p, part.completions, limits, self.budget)
            with contextlib.suppress(GaveUp):
                search.run(below)
            self.labels += search.count
            found = search.found()
            if found is not None:
                self.offer(found)
            if found is not None or below >= self.target or search.work > QUICK_WORK:
                return

    def _split(self, part: Part) -> list[Part]:
        """Cut the range of D, then P, then D again, that can still hold a better plan."""
        names = ("d_low", "d_high") if part.depth % 2 == 0 else ("p_low", "p_high")
        low, high = self._range(part, *names)
        cuts = [low + (high - low) * k / PIECES for k in range(PIECES + 1)]
        parts = []
        for start, end in zip(cuts, cuts[1:], strict=False):
            box = replace(part.box, **{names[0]: start, names[1]: end})
            made = self._part(part.form, box, part.depth + 1, part.bound)
            if made.bound < self.target:
                parts.append(made)
        return parts

    def _range(self, part: Part, low_name: str, high_name: str) -> tuple[float, float]:
        """Shrink a range by the relaxation: outside it no plan is better than the best."""
        box = part.box
        low, high = getattr(box, low_name), getattr(box, high_name)
        if math.isinf(high):
            weight = part.form.d_weight(1.0) if low_name == "d_low" else part.form.a
            high = self.target / weight if weight > 0 and math.isfinite(self.target) else 1e6
        inside, outside = high, low  # smallest upper bound with room for a better plan
        for _ in range(RANGE_STEPS):
            middle = (inside + outside) / 2
            if self._relaxed_within(part, **{high_name: middle}) < self.target:
                inside = middle
            else:
                outside = middle
        least = outside
        inside, outside = least, high  # largest lower bound with room for a better plan
        for _ in range(RANGE_STEPS):
            middle = (inside + outside) / 2
            if self._relaxed_within(part, **{low_name: middle}) < self.target:
                inside = middle
            else:
                outside = middle
        return least, outside

    def _relaxed_within(self, part: Part, **limits: float) -> float:
        bound = self.relaxation.solve(part.form, box=replace(part.box, **limits)).value
        return bound - 1e-7 * abs(bound) if math.isfinite(bound) else bound


def solve_exact(p: Problem, *, time_limit_s: float = 60.0, gap: float = 1e-6) -> Outcome:
    """Return the best plan over all orders and pairs, with its proof."""
    from llmpq.planner.exact.large import solve_chains, solve_short_stages

    start = time.perf_counter()
    deadline = start + time_limit_s
    if not p.numbers(*p.pairs[0]).uniform:
        return solve_ilp(p, time_limit_s=time_limit_s, gap=gap)
    if num_states(p) > MAX_STATES:
        return solve_chains(p, start, deadline, gap)
    try:
        search = Search(p, Space(p), deadline, gap)
    except TooManyColumns:
        return solve_short_stages(p, start, deadline, gap)
    bound = search.run()
    logging.getLogger(__name__).debug("exact: %d labels", search.labels)
    return search.outcome(bound, start, "")


def _greedy_plan(bound: Completion) -> Assignment:
    stages = tuple(
        Stage(cls=c, start=a, end=b, choices=bound.cheapest(c, a, b)) for c, a, b in bound.greedy()
    )
    numbers = bound.form.numbers
    return Assignment(prefill_microbatch=numbers.eta, decode_microbatch=numbers.xi, stages=stages)
