"""Best-bound branch and bound over micro-batch sizes, all device orders at once.

1. First incumbents (planner/exact/start/walk.py), improved by local search.
2. A root node for every pair of micro-batch sizes (and case of plans). The pair with the smallest
   bound has its relaxation solved; its multipliers bound all other pairs, too.
3. The open node with the smallest bound is bounded again by the completion program, then solved by
   label setting: labels below the incumbent, in windows that widen. A node of too many labels is
   branched on the range of D or P.
4. Stop when the smallest bound reaches the incumbent: it is optimal. Else that bound is the proof.

Where devices are too many for listed states and many differ by their links only, the problem with
the nearest links is searched first: its bounds hold, and incumbents are valued with the true links.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.evaluate.fits import least_bytes_plan
from llmpq.planner.evaluate.objective import Form, make_form
from llmpq.planner.exact.bounds.columns import KeptPairs
from llmpq.planner.exact.bounds.completion import Completion, greedy_plan
from llmpq.planner.exact.bounds.cutting import cut_boxes, in_steps
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.bounds.plan_cases import EVERYWHERE, Box
from llmpq.planner.exact.bounds.relaxation import ClassRelaxation, Prices
from llmpq.planner.exact.bounds.space import Space, searched, with_true_links
from llmpq.planner.exact.labels import LabelSearch, LimitReached, SearchLimits
from llmpq.planner.exact.start.improve import improved
from llmpq.planner.exact.start.starts import Incumbent, first_plans
from llmpq.planner.ilp.solve import no_plan_fits, no_plan_yet, solve_ilp
from llmpq.planner.problem.outcome import (
    COLD,
    OPTIMAL_GAP,
    Assignment,
    Infeasible,
    Outcome,
    Unfinished,
    WarmStart,
)
from llmpq.planner.problem.problem import Floats, Problem
from llmpq.planner.problem.work_clock import Timer, now_s

if TYPE_CHECKING:
    from llmpq.planner.exact.start.walk import Walk

WINDOWS = (0.004, 0.02, 0.1, math.inf)
"""Widths of the label windows above a node's bound, relative."""
LABEL_LIMITS = (8_000, 8_000, 20_000, 100_000)
"""Labels that a node may take, by its depth, before it is branched."""
LAST_LABEL_LIMIT = 3_000_000
"""Labels at the last depth, where a node is not branched any more."""
FEW_LABELS = 0.05
"""Share of its label limit up to which a node's next window is the widest at once."""
WORK_PER_LABEL = 1500
"""Label-column pairs a label may take on average, before a node is branched."""
WIDE_GAP = 0.06
"""Relative gap above which a node is branched before labels are set in it."""
START_SHARE = 0.2
"""Share of the time that looking for first incumbents may take, if that is more than START_S."""
START_S = 0.8
"""Seconds that it may take, but not more than half of the time."""
QUICK_SHARE = 0.25
"""Share of the time of the quick pass: a search from the simplest plans, often a proof."""
QUICK_IMPROVE_SHARE = 0.005
"""Share of what is left of the quick pass for the local search from one plan."""
NEAR = 1.05
"""Value, relative to the incumbent's, up to which a plan is improved in the quick pass."""
HOP_STEP = 0.01
"""Share of the incumbent's value that hops may differ by within a case of numbers of stages."""
NEAREST_SHARE = 0.5
"""Share of the time that the search with the nearest links may take."""
POLISH_SHARE = 0.3
"""Share of the time for local search from an incumbent that is not proven, at the end."""


@dataclass(kw_only=True)
class SearchNode:
    """A pair of micro-batch sizes, all of it or a box of P and D, with its lower bound."""

    form: Form
    bound: float
    prices: Prices
    """Of its relaxation."""
    box: Box = EVERYWHERE
    depth: int = 0
    """How often it was branched."""
    completions: list[Completion] = field(default_factory=list)
    """Completion programs that bound it, one for each kappa; none until it is first selected."""
    window: int = 0
    """Index of the window in which labels are set next."""


@dataclass(kw_only=True)
class Frontier:
    """What is open: nodes, and pairs of micro-batch sizes of which only a bound is known."""

    bounds: Floats
    """[I, E, X] by case."""
    relaxed: NDArray[np.bool_]
    """[I, E, X] whether a pair has its node."""
    heap: list[tuple[float, int, SearchNode]] = field(default_factory=list)
    tickets: Iterator[int] = field(default_factory=itertools.count)
    """Of equal bounds the first node goes first."""

    def push(self, node: SearchNode) -> None:
        """Add an open node."""
        heapq.heappush(self.heap, (node.bound, next(self.tickets), node))


class Search:
    """State of the search. `ceiling`: the value of a plan of another problem, to be improved on.

    `enough`: a plan below this value ends it; no time is taken for better ones where it is given.
    """

    def __init__(
        self,
        p: Problem,
        deadline: float,
        gap: float,
        *,
        budget: float | None = None,
        ceiling: float = math.inf,
        enough: float = -math.inf,
    ) -> None:
        self.true = p
        self.start, self.timer = now_s(), Timer()
        self.deadline = deadline
        self.gap = gap / 2  # half of it for pruning, so that the stated gap is below what was asked
        self.budget, self.ceiling, self.enough = budget, ceiling, enough
        self.incumbent = Incumbent(p, budget)
        self.true_tables = PairTables(p)
        self.p, self.space = searched(p)
        self.tables = self.true_tables if self.p is p else PairTables(self.p)
        self.relaxation = ClassRelaxation(self.p)
        self.pair_columns = KeptPairs.of(self.p)
        self.unresolved: list[float] = []
        """Bounds of nodes that were given up: part of the proof."""
        self.in_quick_pass = False
        self.frontier: Frontier | None = None
        self.improved: set[tuple[tuple[int, int, int], ...]] = set()

    @property
    def best(self) -> Assignment | None:
        """The incumbent: the best plan so far."""
        return self.incumbent.best

    @property
    def value(self) -> float:
        """Its value."""
        return self.incumbent.value

    def outcome(self, bound: float) -> Outcome:
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
            seconds=self.timer.seconds,
        )

    @property
    def target(self) -> float:
        """Nodes with a bound at or above this are pruned."""
        if self.value < self.enough:
            return -math.inf
        value = min(self.value, self.ceiling)
        if not math.isfinite(value):
            return math.inf
        priced = self.p.theta * self.budget if self.budget is not None else 0.0
        return value - self.gap * abs(value - priced)

    def offer(self, a: Assignment, *, set_by_labels: bool = False) -> None:
        """Make a plan of the searched problem the incumbent if it is better; improve it."""
        plan = a if self.p is self.true else with_true_links(self.true, self.p, a)
        before = self.value
        self.incumbent.offer(plan)
        if (
            self.in_quick_pass
            and self.improved
            and (set_by_labels or self.incumbent.worth(plan) > before * NEAR)
        ):
            return
        shape = tuple((s.cls, s.start, s.end) for s in plan.stages)
        left = self.deadline - now_s()
        if shape not in self.improved and left > 0:
            self.improved.add(shape)
            share = QUICK_IMPROVE_SHARE if self.in_quick_pass else START_SHARE / 4
            limit = now_s() + left * share
            improved(self.incumbent, self.true_tables, plan, limit)

    def quick_pass(self, known: Assignment | None = None) -> float:
        """Search for a short time from the simplest plans; return the bound, often a proof."""
        end, now = self.deadline, now_s()
        self.deadline = now + QUICK_SHARE * max(0.0, end - now)
        if known is not None and not self.incumbent.offer(known):  # it has to be changed to fit
            improved(self.incumbent, self.true_tables, known, (now + self.deadline) / 2)
        for plan in first_plans(self.true, self.true_tables):
            self.incumbent.offer(plan)
        if self.best is None:
            filled = least_bytes_plan(self.true)
            if filled is not None:
                self.incumbent.offer(filled)
        self.in_quick_pass = True
        bound = self._branch_and_bound() if self.best is not None else -math.inf
        self.in_quick_pass, self.deadline = False, end
        return bound

    def resume(self, known: Assignment | None = None) -> None:
        """Improve the incumbent a little, where first incumbents were looked for before."""
        now = now_s()
        if self.best is None:
            self.begin(known)
        else:
            self.walk.from_each([self.best], now + QUICK_SHARE * max(0.0, self.deadline - now))

    def begin(self, known: Assignment | None = None) -> None:
        """Look for first incumbents: simple plans and a known one, improved."""
        if self.enough > -math.inf:
            return
        from llmpq.planner.exact.start.walk import begin

        now = now_s()
        left = max(0.0, self.deadline - now)
        limit = now + max(START_SHARE * left, min(START_S, left / 2))
        begin(self.walk, known, limit)

    @cached_property
    def walk(self) -> Walk:
        """The walk among plans of one precision a stage."""
        from llmpq.planner.exact.start.walk import Walk

        return Walk(self.incumbent, self.true_tables)

    def retime(self) -> None:
        """Give the incumbent the micro-batch sizes that suit it best.

        Where quality counts most their time hardly does, and a short search ends without them.
        """
        if self.best is not None:
            pair = self.true_tables.best_pair(self.best.stages, math.inf)
            if pair is not None:
                self.incumbent.offer(
                    replace(self.best, prefill_microbatch=pair[0], decode_microbatch=pair[1])
                )

    def run(self) -> float:
        """Search, improve an incumbent that is not proven; return the proven lower bound."""
        if self.enough > -math.inf:
            return self._searched_by_links()
        end = self.deadline
        self.deadline -= POLISH_SHARE * max(0.0, end - now_s())
        bound, self.deadline = self._searched_by_links(), end
        if bound < self.target and self.best is not None:
            self.walk.from_best(end)
        return bound

    def _searched_by_links(self) -> float:
        """Search with the nearest links, where that is another problem, then the true ones."""
        if self.p is self.true:
            return self._branch_and_bound()
        end, now = self.deadline, now_s()
        self.deadline = now + NEAREST_SHARE * max(0.0, end - now)
        bound, self.deadline = self._branch_and_bound(), end
        if bound < self.target and now_s() < end:
            self.p = self.true
            self.space = Space(self.true)
            self.tables = self.true_tables
            self.relaxation, self.pair_columns = ClassRelaxation(self.p), KeptPairs.of(self.p)
            self.unresolved, self.frontier = [], None
            bound = max(bound, self._branch_and_bound())
        return bound

    def _root(self) -> Frontier:
        """Return the frontier of all pairs, bounded without a solver."""
        if self.best is not None:
            pair = self.best.prefill_microbatch, self.best.decode_microbatch
            self.tables.cut_by_stages(pair, HOP_STEP * self.value)
        bounds = self.tables.first_bounds(self.relaxation.groups)
        relaxed = np.broadcast_to(~self.tables.open, bounds.shape).copy()
        return Frontier(bounds=bounds, relaxed=relaxed)

    def _branch_and_bound(self) -> float:
        """Process open nodes, smallest bound first, from where the last call stopped."""
        self.frontier = frontier = self.frontier or self._root()
        while True:
            waiting = np.where(frontier.relaxed, np.inf, frontier.bounds)
            least_pair = float(waiting.min())
            least_node = frontier.heap[0][0] if frontier.heap else math.inf
            if min(least_node, least_pair) >= self.target or self._out_of_time():
                break
            if least_pair < least_node:
                case, row, column = np.unravel_index(int(np.argmin(waiting)), waiting.shape)
                frontier.relaxed[case, row, column] = True
                form = make_form(self.p, self.p.prefill_sizes[row], self.p.decode_sizes[column])
                node = self._node(form, self.tables.box(int(case), form), 0, least_pair)
                if math.isfinite(node.prices.value):
                    proven = self.tables.bounds(self.relaxation.groups, form, node.prices)
                    frontier.bounds = np.maximum(frontier.bounds, proven)
                nodes = [node]
            else:
                _, _, node = heapq.heappop(frontier.heap)
                nodes = self._process(node) if node.completions else self._bound(node)
            for open_node in nodes:
                if open_node.bound < math.inf:
                    frontier.push(open_node)
        return min(self.target, least_node, least_pair, *self.unresolved)

    def _out_of_time(self) -> bool:
        return now_s() > self.deadline

    def _node(self, form: Form, box: Box, depth: int, at_least: float = -math.inf) -> SearchNode:
        """Return a node bounded by its relaxation."""
        prices = self.relaxation.solve(form, box=box)
        # The solver's own tolerance is 1e-7; bounds that decide are recomputed later.
        relaxed = prices.value - 1e-7 * abs(prices.value) if prices.value < math.inf else math.inf
        bound = max(relaxed, at_least)
        return SearchNode(form=form, bound=bound, prices=prices, box=box, depth=depth)

    def _bound(self, node: SearchNode) -> list[SearchNode]:
        """Bound a node by the completion program, whose plan may be an incumbent."""
        completion = self._completion(node, node.prices)
        node.completions.append(completion)
        node.bound = max(node.bound, completion.value)
        if math.isinf(completion.value):
            return []
        plan = greedy_plan(completion)
        if plan is not None:
            self.offer(plan)
        return [node]

    def _completion(self, node: SearchNode, prices: Prices) -> Completion:
        return Completion(
            p=self.p,
            form=node.form,
            prices=prices,
            kept=self.pair_columns,
            space=self.space,
            box=node.box,
            islands=self.tables.islands,
            aim=self.target,
        )

    def _process(self, node: SearchNode) -> list[SearchNode]:
        """Set labels in a node's next window; return what is open of it then.

        Nothing where it is pruned, or its best plan is found; itself with a larger bound where the
        window has no plan; its children where it took too many labels.
        """
        if len(node.completions) == 1 and node.form.z:
            self._bound_at_other_kappas(node)
        if node.bound >= self.target:
            return []
        wide = self.target - node.bound > WIDE_GAP * abs(node.bound) < math.inf
        if node.depth < 2 and (wide or in_steps(self.p)):
            return self._branch(node)
        below = node.bound + abs(node.bound) * WINDOWS[node.window]
        if self.target < node.bound + 1.5 * (below - node.bound):
            below = self.target
        last = node.depth >= len(LABEL_LIMITS)
        most = LAST_LABEL_LIMIT if last else LABEL_LIMITS[node.depth]
        work = math.inf if last else WORK_PER_LABEL * most
        limits = SearchLimits(deadline=self.deadline, max_labels=most, max_work=work)
        search = LabelSearch(self.p, node.completions, limits, self.budget)
        try:
            found, limit_reached = search.run(below), False
        except LimitReached:
            found, limit_reached = search.found(), True
        many, widest = search.count > FEW_LABELS * most, len(WINDOWS) - 1
        node.window = min(node.window + 1, widest) if many else widest
        if found is not None:
            self.offer(found, set_by_labels=True)
        if limit_reached and self.in_quick_pass and self._out_of_time():
            return [node]
        if limit_reached:
            if last or self._out_of_time():
                self.unresolved.append(node.bound)
                return []
            return self._branch(node)
        if found is not None and self.p is not self.true:
            self.unresolved.append(search.below)  # with the nearest links: a bound, not a plan
        if found is not None or below >= self.target:
            return []
        node.bound = below
        return [node]

    def _bound_at_other_kappas(self, node: SearchNode) -> None:
        """Bound a node at other kappas, too: F is the larger of two linear forms."""
        middle = node.prices.kappa
        for kappa in sorted({0.0, middle / 2, (1 + middle) / 2, 1.0} - {middle}):
            if node.bound >= self.target or self._out_of_time():
                return
            prices = self.relaxation.solve(node.form, kappa, node.box)
            node.completions.append(self._completion(node, prices))
            node.bound = max(node.bound, node.completions[-1].value)

    def _branch(self, node: SearchNode) -> list[SearchNode]:
        """Return children: the range of D, then P, then D again, in pieces."""
        boxes = cut_boxes(
            self.relaxation, node.form, node.box, self.target, decode=node.depth % 2 == 0
        )
        children = [self._node(node.form, box, node.depth + 1, node.bound) for box in boxes]
        return [child for child in children if child.bound < self.target]


def solve_exact(
    p: Problem,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
    warm: WarmStart = COLD,
) -> Outcome:
    """Return the best plan over all orders and pairs, with its proof.

    With a ceiling, plans that are not below it need not be found: `Unfinished` with a bound not
    below it says that there are none.
    """
    if not p.numbers(*p.pairs[0]).uniform:
        return solve_ilp(p, time_limit_s=time_limit_s, gap=gap)
    search = Search(p, now_s() + time_limit_s, gap, ceiling=warm.ceiling, enough=warm.enough)
    bound = search.quick_pass(warm.known)
    if bound < search.target:
        (search.resume if warm.resumed else search.begin)(warm.known)
        bound = search.run()
    search.retime()
    return search.outcome(bound)
