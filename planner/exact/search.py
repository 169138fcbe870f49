"""Best-bound search over the pairs of micro-batch sizes, all device orders at once.

1. Good plans first (planner/exact/start/begin.py), improved by small changes.
2. Every pair is bounded by the multipliers of the few whose relaxation is solved: always the pair
   with the smallest bound is solved next, and what its multipliers prove of all others is kept.
3. The smallest part is tightened by the completion program, which also gives a plan, and closed:
   labels below the best plan, in widening windows; of too many labels, cut by the range of D or P.
4. Stop when the smallest bound reaches the best plan: it is proven optimal, else within the bound.

Where devices are too many for listed states and many differ by their links alone, the problem with
the nearest links is proven first; plans are valued with the true ones.
"""

from __future__ import annotations

import heapq
import math
import time
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from llmpq.planner.exact.bounds.completion import Completion
from llmpq.planner.exact.bounds.cutting import cut_boxes, in_steps
from llmpq.planner.exact.bounds.form import EVERYWHERE, Box, Form, make_form
from llmpq.planner.exact.bounds.pair_columns import KeptPairs
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.bounds.relaxation import ClassRelaxation, Prices
from llmpq.planner.exact.labels import GaveUp, LabelSearch, SearchLimits
from llmpq.planner.exact.search_state import Open, Part
from llmpq.planner.exact.space import Space, searched
from llmpq.planner.exact.start.greedy import greedy_plan
from llmpq.planner.exact.start.improve import improved
from llmpq.planner.exact.start.quick import quick_plan
from llmpq.planner.exact.start.starts import Incumbent, first_plans
from llmpq.planner.exact.true_links import with_true_links
from llmpq.planner.ilp.solve import no_plan_fits, no_plan_yet, solve_ilp
from llmpq.planner.problem.outcome import (
    OPTIMAL_GAP,
    Assignment,
    Infeasible,
    Outcome,
    Unfinished,
)
from llmpq.planner.problem.problem import Problem

if TYPE_CHECKING:
    from llmpq.planner.exact.start.walk import Walk

WINDOWS = (0.004, 0.02, 0.1, math.inf)
"""Widths of the label windows above a part's bound, relative."""
PATIENCE = (8_000, 8_000, 20_000, 100_000)
"""Labels a part may take, by how often it was split, before it is split again."""
FEW_LABELS = 0.05
"""Share of its patience up to which a part's next window is the widest at once."""
WORK = 1500
"""Label-column pairs a label may take on average, before a part is split."""
WIDE_GAP = 0.06
"""Relative gap above which a part is cut by its range before labels are set in it."""
START_SHARE = 0.2
"""Share of the time that looking for good plans first may take, if that is more than START_S."""
START_S = 0.8
"""Seconds that it may take, but not more than half of the time."""
SOON_SHARE = 0.1
"""Share of the time for a search from the simplest plans alone."""
HASTY_SHARE = 0.005
"""Share of what is left of that for the improvement of a plan."""
NEAR = 1.05
"""Worth, relative to the best plan's, up to which a plan is improved then."""
HOP_STEP = 0.01
"""Share of the best plan's value that hops may differ by within a case of numbers of stages."""
NEAREST_SHARE = 0.5
"""Share of the time that a search with the nearest links may take."""
POLISH_SHARE = 0.3
"""Share of the time that a plan which is not proven is improved in at the end."""


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
        self.p, self.space = searched(p)
        self.tables = self.true_tables if self.p is p else PairTables(self.p)
        self.relaxation = ClassRelaxation(self.p)
        self.kept = KeptPairs.of(self.p)
        self.stuck: list[float] = []
        self.overtime = False
        self.hasty = False
        self.open: Open | None = None
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

    def offer(self, a: Assignment, *, set_by_labels: bool = False) -> None:
        """Keep a plan of the searched problem, and what small changes make of it."""
        plan = a if self.p is self.true else with_true_links(self.true, self.p, a)
        before = self.value
        self.incumbent.offer(plan)
        if (
            self.hasty
            and self.improved
            and (set_by_labels or self.incumbent.worth(plan) > before * NEAR)
        ):
            return
        shape = tuple((s.cls, s.start, s.end) for s in plan.stages)
        left = self.deadline - time.perf_counter()
        if shape not in self.improved and left > 0:
            self.improved.add(shape)
            share = HASTY_SHARE if self.hasty else START_SHARE / 4
            limit = time.perf_counter() + left * share
            improved(self.incumbent, self.true_tables, plan, limit)

    def soon(self, known: Assignment | None = None) -> float:
        """Search for a little while from the simplest plans; return the bound, often a proof."""
        end, now = self.deadline, time.perf_counter()
        self.deadline = now + SOON_SHARE * max(0.0, end - now)
        if known is not None:
            self.incumbent.offer(known)
        for plan in first_plans(self.true, self.true_tables):
            self.incumbent.offer(plan)
        self.hasty = True
        bound = self._run() if self.best is not None else -math.inf
        self.hasty, self.deadline = False, end
        return bound

    def begin_again(self, known: Assignment | None = None) -> None:
        """Walk on a little from the best plan, where good ones were looked for before."""
        now = time.perf_counter()
        if self.best is None:
            self.begin(known)
        else:
            self.walk.from_each([self.best], now + SOON_SHARE * max(0.0, self.deadline - now))

    def begin(self, known: Assignment | None = None) -> None:
        """Offer simple plans, and a known one, and improve the best of them."""
        from llmpq.planner.exact.start.begin import begin
        from llmpq.planner.exact.start.rounding import rounded_plans

        now = time.perf_counter()
        left = max(0.0, self.deadline - now)
        limit = now + max(START_SHARE * left, min(START_S, left / 2))
        same = self.p is self.true
        rounded = rounded_plans(self.p, self.tables, self.relaxation) if same else ()
        begin(self.walk, known, rounded, limit)

    @cached_property
    def walk(self) -> Walk:
        """The walk among plans of one precision a stage."""
        from llmpq.planner.exact.start.walk import Walk

        return Walk(self.incumbent, self.true_tables)

    def run(self) -> float:
        """Search, improve what is not proven; return the proven lower bound over the space."""
        end = self.deadline
        self.deadline -= POLISH_SHARE * max(0.0, end - time.perf_counter())
        bound, self.deadline = self._both_links(), end
        if bound < self.target and self.best is not None:
            self.walk.from_best(end)
        return bound

    def _both_links(self) -> float:
        """Search with the nearest links, where that is another problem, then the true ones."""
        if self.p is self.true:
            return self._run()
        end, now = self.deadline, time.perf_counter()
        self.deadline = now + NEAREST_SHARE * max(0.0, end - now)
        bound, self.deadline = self._run(), end
        if bound < self.target and time.perf_counter() < end:
            self.p, self.space, self.tables = self.true, Space(self.true), self.true_tables
            self.relaxation, self.kept = ClassRelaxation(self.p), KeptPairs.of(self.p)
            self.stuck, self.open = [], None
            bound = max(bound, self._run())
        return bound

    def _opened(self) -> Open:
        if self.best is not None:
            pair = self.best.prefill_microbatch, self.best.decode_microbatch
            self.tables.cut_by_stages(pair, HOP_STEP * self.value)
        bounds = self.tables.first_bounds(self.relaxation.groups)
        return Open(bounds=bounds, solved=np.broadcast_to(~self.tables.open, bounds.shape).copy())

    def _run(self) -> float:
        """Search on where the last call stopped."""
        self.open = state = self.open or self._opened()
        heap, numbers, solved = state.heap, state.numbers, state.solved
        while True:
            bounds = state.bounds
            waiting = np.where(solved, np.inf, bounds)
            soonest = float(waiting.min())
            least = heap[0][0] if heap else math.inf
            if min(least, soonest) >= self.target or self._late():
                break
            if soonest < least:
                case, row, column = np.unravel_index(int(np.argmin(waiting)), waiting.shape)
                solved[case, row, column] = True
                form = make_form(self.p, self.p.prefill_sizes[row], self.p.decode_sizes[column])
                part = self._part(form, self.tables.box(int(case), form), 0, soonest)
                if math.isfinite(part.prices.value):
                    proven = self.tables.bounds(self.relaxation.groups, form, part.prices)
                    state.bounds = np.maximum(bounds, proven)
                parts = [part]
            else:
                _, _, part = heapq.heappop(heap)
                parts = self._close(part) if part.completions else self._tighten(part)
            for open_part in parts:
                if open_part.bound < math.inf:
                    heapq.heappush(heap, (open_part.bound, next(numbers), open_part))
        return min(self.target, least, soonest, *self.stuck)

    def _late(self) -> bool:
        """Whether to stop: at the deadline, or a little later where there is no plan yet."""
        if time.perf_counter() <= self.deadline:
            return False
        if self.best is None and not self.overtime and not self.hasty and self.ceiling == math.inf:
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
            kept=self.kept,
            space=self.space,
            box=part.box,
            islands=self.tables.islands,
            aim=self.target,
        )

    def _close(self, part: Part) -> list[Part]:
        """Widen the window until a plan is found in it or the part is proven useless.

        One of too many labels is split by the range of D or P: in a small one bounds are tight.
        """
        if len(part.completions) == 1 and part.form.z:
            self._more_kappas(part)
        if self.hasty and not part.window and part.depth < 2:
            quick = quick_plan(self.p, part, self.target, self.deadline, self.budget)
            if quick is not None:
                self.offer(quick, set_by_labels=True)
        if part.bound >= self.target:
            return []
        wide = self.target - part.bound > WIDE_GAP * abs(part.bound) < math.inf
        if part.depth < 2 and (wide or in_steps(self.p)):
            return self._split(part)
        below = part.bound + abs(part.bound) * WINDOWS[part.window]
        if self.target < part.bound + 1.5 * (below - part.bound):
            below = self.target
        last = part.depth >= len(PATIENCE)
        patience = 3_000_000 if last else PATIENCE[part.depth]
        work = math.inf if last else WORK * patience
        limits = SearchLimits(deadline=self.deadline, max_labels=patience, max_work=work)
        search = LabelSearch(self.p, part.completions, limits, self.budget)
        try:
            found, gave_up = search.run(below), False
        except GaveUp:
            found, gave_up = search.found(), True
        many, widest = search.count > FEW_LABELS * patience, len(WINDOWS) - 1
        part.window = min(part.window + 1, widest) if many else widest
        if found is not None:
            self.offer(found, set_by_labels=True)
        if gave_up and self.hasty and time.perf_counter() > self.deadline:
            return [part]
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
    known: Assignment | None = None,
    again: bool = False,
) -> Outcome:
    """Return the best plan over all orders and pairs, with its proof.

    With a `ceiling`, plans that are not below it need not be found: `Unfinished` with a bound not
    below it says that there are none. `known`: a plan to start from.
    """
    if not p.numbers(*p.pairs[0]).uniform:
        return solve_ilp(p, time_limit_s=time_limit_s, gap=gap)
    search = Search(p, time.perf_counter() + time_limit_s, gap, ceiling=ceiling)
    bound = search.soon(known)
    if bound < search.target:
        (search.begin_again if again else search.begin)(known)
        bound = search.run()
    return search.outcome(bound, "")
