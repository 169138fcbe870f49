"""Best-bound search over the pairs of micro-batch sizes, all device orders at once.

1. Good plans first (planner/exact/starts.py), improved by small changes, in a fifth of the time.
2. Every pair is bounded by the multipliers of the few whose relaxation is solved: always the pair
   with the smallest bound is solved next, and what its multipliers prove of all others is kept.
3. The smallest part is tightened with the completion program, which also gives a plan, and closed:
   label setting below the best plan, in widening windows; a part that takes too many labels is cut
   by the range of D or P.
4. Stop when the smallest bound reaches the best plan: the plan is proven optimal. At the deadline
   the smallest bound is the proof of what there is.

Where devices are too many for listed states and many of them differ by their links alone, the proof
is of the problem in which all have the nearest links; plans are valued with the true ones.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from llmpq.planner.exact.columns import columns_if_few
from llmpq.planner.exact.completion import Completion
from llmpq.planner.exact.cutting import cut_boxes
from llmpq.planner.exact.form import EVERYWHERE, Box, Form, make_form
from llmpq.planner.exact.greedy import greedy_plan
from llmpq.planner.exact.improve import improved
from llmpq.planner.exact.labels import GaveUp, LabelSearch, Limits
from llmpq.planner.exact.pairs import PairTables
from llmpq.planner.exact.relaxation import ClassRelaxation, Prices
from llmpq.planner.exact.space import Space
from llmpq.planner.exact.starts import (
    Incumbent,
    first_plans,
    in_all_choices,
    of_one_precision,
    other_methods,
)
from llmpq.planner.exact.true_links import with_true_links
from llmpq.planner.ilp.solve import no_plan_fits, no_plan_yet, solve_ilp
from llmpq.planner.outcome import OPTIMAL_GAP, Assignment, Infeasible, Outcome, Unfinished
from llmpq.planner.problem import Problem

WINDOWS = (0.004, 0.02, 0.1, math.inf)
"""Widths of the label windows above a part's bound, relative."""
PATIENCE = (8_000, 8_000, 20_000, 100_000)
"""Labels a part may take, by how often it was split, before it is split again."""
WORK = 1500
"""Label-column pairs a label may take on average, before a part is split."""
WIDE_GAP = 0.06
"""Relative gap above which a part is cut by its range before labels are set in it."""
MANY_STAGES = 8
FEW_LAYERS = 6
"""Layers a stage, below which times move in steps, and cutting by them comes before labels."""
START_SHARE = 0.2
"""Share of the time that looking for good plans first may take."""
OVERTIME_S = 1.0
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
    """State of the best-bound search; `ceiling`: a value that another search has reached."""

    def __init__(
        self,
        p: Problem,
        deadline: float,
        gap: float,
        *,
        budget: float | None = None,
        ceiling: float = math.inf,
    ) -> None:
        self.true, self.start, self.deadline = p, time.perf_counter(), deadline
        self.gap = gap / 2  # half of it for pruning, so that the stated gap is below the wish
        self.budget, self.ceiling = budget, ceiling
        self.incumbent = Incumbent(p, budget)
        self.true_tables = PairTables(p)
        self.p, self.space = _searched(p)
        self.tables = self.true_tables if self.p is p else PairTables(self.p)
        self.relaxation = ClassRelaxation(self.p)
        self.columns = columns_if_few(self.p)
        self.labels = 0
        self.stuck: list[float] = []
        self.overtime = False
        self.improved: set[tuple[tuple[int, int, int], ...]] = set()

    @property
    def best(self) -> Assignment | None:
        """The best plan so far."""
        return self.incumbent.best

    @property
    def value(self) -> float:
        """Its worth."""
        return self.incumbent.value

    def outcome(self, bound: float, note: str) -> Outcome:
        """Return the best plan with a bound; a bound below infinity says there may be one."""
        if self.best is None and bound < math.inf:
            limit = max(0.0, self.deadline - self.start)
            raise Unfinished(no_plan_yet(limit), bound=bound)
        if self.best is None:
            raise Infeasible(no_plan_fits(self.true))
        proven = self.value - bound <= OPTIMAL_GAP * abs(self.value)
        return Outcome(
            method="exact",
            status="optimal" if proven else "feasible",
            assignment=self.best,
            value=self.value,
            bound=min(bound, self.value),
            seconds=time.perf_counter() - self.start,
            note=note,
        )

    @property
    def target(self) -> float:
        """Bounds at or above this are as good as closed."""
        value = min(self.value, self.ceiling)
        if not math.isfinite(value):
            return math.inf
        priced = self.p.theta * self.budget if self.budget is not None else 0.0
        return value - self.gap * abs(value - priced)

    def offer(self, a: Assignment) -> None:
        """Keep a plan of the searched problem, and what small changes make of it."""
        plan = a if self.p is self.true else with_true_links(self.true, self.p, a)
        self.incumbent.offer(plan)
        shape = tuple((s.cls, s.start, s.end) for s in plan.stages)
        left = self.deadline - time.perf_counter()
        if shape not in self.improved and left > 0:
            self.improved.add(shape)
            limit = time.perf_counter() + left * START_SHARE / 4
            improved(self.incumbent, self.true_tables, plan, limit)

    def begin(self) -> None:
        """Offer simple plans, and improve the best of them."""
        now = time.perf_counter()
        limit = now + START_SHARE * max(0.0, self.deadline - now)
        found: list[tuple[float, int, Assignment]] = []
        for number, plan in enumerate(first_plans(self.true, self.true_tables)):
            self.incumbent.offer(plan)
            heapq.heappush(found, (self.incumbent.worth(plan), number, plan))
            if time.perf_counter() > limit and self.best is not None:
                break
        for _, _, plan in heapq.nsmallest(3, found):
            share = (limit - time.perf_counter()) / 4
            improved(self.incumbent, self.true_tables, plan, time.perf_counter() + share)
        for plan in self._of_one_precision(limit):
            improved(self.incumbent, self.true_tables, plan, limit)
        for plan in other_methods(self.true, (limit + time.perf_counter()) / 2):
            self.incumbent.offer(plan)
        if self.best is not None:
            improved(self.incumbent, self.true_tables, self.best, limit)

    def _of_one_precision(self, limit: float) -> Iterator[Assignment]:
        """Yield what a short search finds of each precision alone: its tables are small."""
        p = self.true
        alone = [b for b in range(len(p.choices)) if p.open[:, b].all()]
        for number, b in enumerate(alone if len(p.choices) > 1 else ()):
            now = time.perf_counter()
            share = (limit - now) / (2 * len(alone) - number)
            if share <= 0:
                return
            small = Search(of_one_precision(p, b), now + share, self.gap)
            for plan in first_plans(small.true, small.true_tables):
                small.incumbent.offer(plan)
            small.run()
            if small.best is not None:
                yield in_all_choices(small.best, b)

    def run(self) -> float:
        """Search; return the proven lower bound over the space."""
        heap: list[tuple[float, int, Part]] = []
        numbers = itertools.count()
        bounds = self.tables.first_bounds(self.relaxation.groups)
        solved = np.broadcast_to(~self.tables.open, bounds.shape).copy()
        while True:
            waiting = np.where(solved, np.inf, bounds)
            soonest = float(waiting.min())
            least = heap[0][0] if heap else math.inf
            if min(least, soonest) >= self.target or self._late():
                break
            if soonest < least:
                case, row, column = np.unravel_index(int(np.argmin(waiting)), waiting.shape)
                solved[case, row, column] = True
                form = make_form(self.p, self.p.prefill_sizes[row], self.p.decode_sizes[column])
                part = self._part(form, self._box(int(case), form), 0, soonest)
                if math.isfinite(part.prices.value):
                    proven = self.tables.bounds(self.relaxation.groups, form, part.prices)
                    bounds = np.maximum(bounds, proven)
                parts = [part]
            else:
                _, _, part = heapq.heappop(heap)
                parts = self._close(part) if part.completions else self._tighten(part)
            for open_part in parts:
                if open_part.bound < math.inf:
                    heapq.heappush(heap, (open_part.bound, next(numbers), open_part))
        return min(self.target, least, soonest, *self.stuck)

    def _box(self, case: int, form: Form) -> Box:
        """Return what is known of the plans of a case: their island, or that they cross."""
        islands, x = self.tables.islands, form.numbers
        if islands is None:
            return EVERYWHERE
        if case < len(islands.counts):
            return Box(island=case)
        return Box(
            p_low=islands.quickest_crossing(x.hop_prefill.busy_s),
            d_low=islands.quickest_crossing(x.hop_decode.busy_s),
        )

    def _late(self) -> bool:
        """Whether to stop: at the deadline, or a little later where there is no plan yet."""
        now = time.perf_counter()
        if now <= self.deadline:
            return False
        if self.best is None and not self.overtime and self.ceiling == math.inf:
            self.overtime = True
            roomiest = make_form(self.p, self.p.prefill_sizes[0], self.p.decode_sizes[0])
            self._tighten(self._part(roomiest, EVERYWHERE, 0))
        return True

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
        plan = greedy_plan(bound)
        if plan is not None:
            self.offer(plan)
        return [part]

    def _completion(self, part: Part, prices: Prices) -> Completion:
        return Completion(
            p=self.p,
            form=part.form,
            prices=prices,
            columns=self.columns,
            space=self.space,
            box=part.box,
            islands=self.tables.islands,
            aim=self.target,
        )

    def _close(self, part: Part) -> list[Part]:
        """Widen the window until a plan is found in it or the part is proven useless.

        A part that takes too many labels is split by the range of D or P: within a small range the
        slowest stage is nearly known, so bounds are tight and labels few.
        """
        if len(part.completions) == 1 and part.form.z:
            self._more_kappas(part)
        if part.bound >= self.target:
            return []
        wide = self.target - part.bound > WIDE_GAP * abs(part.bound) < math.inf
        if part.depth < 2 and (wide or self._in_steps):
            return self._split(part)
        below = part.bound + abs(part.bound) * WINDOWS[part.window]
        if self.target < part.bound + 1.5 * (below - part.bound):
            below = self.target
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
        if found is not None and self.p is not self.true:
            self.stuck.append(search.below)  # with the nearest links: a bound, not a plan
        if found is not None or below >= self.target:
            return []
        part.bound = below
        return [part]

    @property
    def _in_steps(self) -> bool:
        """Whether many stages have few layers each."""
        most = self.p.max_stages
        return most >= MANY_STAGES and self.p.num_layers < FEW_LAYERS * most

    def _more_kappas(self, part: Part) -> None:
        """Bound a part at other kappas, too: F is the larger of two linear forms."""
        middle = part.prices.kappa
        for kappa in sorted({0.0, middle / 2, (1 + middle) / 2, 1.0} - {middle}):
            if part.bound >= self.target or time.perf_counter() > self.deadline:
                return
            prices = self.relaxation.solve(part.form, kappa, part.box)
            part.completions.append(self._completion(part, prices))
            part.bound = max(part.bound, part.completions[-1].value)

    def _split(self, part: Part) -> list[Part]:
        """Cut the range of D, then P, then D again, that can still hold a better plan."""
        boxes = cut_boxes(
            self.relaxation, part.form, part.box, self.target, decode=part.depth % 2 == 0
        )
        made = [self._part(part.form, box, part.depth + 1, part.bound) for box in boxes]
        return [part for part in made if part.bound < self.target]


def solve_exact(
    p: Problem,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
    ceiling: float = math.inf,
) -> Outcome:
    """Return the best plan over all orders and pairs, with its proof.

    With a `ceiling`, plans that are not below it need not be found: `Unfinished` with a bound that
    is not below it, either, says that there are none.
    """
    if not p.numbers(*p.pairs[0]).uniform:
        return solve_ilp(p, time_limit_s=time_limit_s, gap=gap)
    search = Search(p, time.perf_counter() + time_limit_s, gap, ceiling=ceiling)
    search.begin()
    bound = search.run()
    logging.getLogger(__name__).debug("exact: %d labels", search.labels)
    return search.outcome(bound, "")


def _searched(p: Problem) -> tuple[Problem, Space]:
    """Return the problem to prove, and its states: itself, or with the nearest links."""
    space = Space(p)
    if space.listed:
        return p, space
    nearest = p.with_changes(nearest_links=True)
    if len(nearest.classes) < len(p.classes):
        return nearest, Space(nearest)
    return p, space
