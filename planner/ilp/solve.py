"""The paper's method: an integer program for every device order and pair of micro-batch sizes.

Algorithm 1, made exact: all orders (devices may be left out), all pairs, each pruned by the linear
relaxation of its program against the best plan so far. Any time it stops, the smallest bound of
what was not closed is the bound of the answer.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence

from llmpq.planner.baselines.adabits import adabits_plans, kind_orders
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.ilp.milp import Backend, solve_milp
from llmpq.planner.ilp.model import StageIlp, build_ilp
from llmpq.planner.problem.outcome import (
    BUDGET_ROUNDING,
    OPTIMAL_GAP,
    Assignment,
    Infeasible,
    Outcome,
    Unfinished,
)
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import now_s, spend_s

MAX_PROGRAMS = 3000
"""Programs to relax at most; with more, devices of a kind stay together, as in the paper's code."""
KINDS_NOTE = "too many device orders for one program each: equal devices were kept together"
NONE_TOGETHER = (
    "no plan found with equal devices kept together; there are too many device orders for one "
    "program each: give --max-devices, or another --method"
)

Key = tuple[tuple[int, ...], int, int]


def solve_ilp(
    p: Problem,
    *,
    backend: Backend = "highs",
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
    budget: float | None = None,
) -> Outcome:
    """Minimise pipeline latency plus theta times quality loss; `budget` caps the loss instead."""
    if budget is not None:
        p = p.with_changes(theta=0.0)
    start = time.perf_counter()
    search = _Search(p, backend, start + time_limit_s, gap, budget)
    if not search.all_orders:
        for known in adabits_plans(p, now_s() + time_limit_s / 2):
            search.offer(known)
    search.run()
    spend_s(time.perf_counter() - start)
    if search.best is None:
        if search.bound < math.inf:
            of = f"; {search.note}" if search.note else ""
            raise Unfinished(no_plan_yet(time_limit_s) + of)
        raise Infeasible(no_plan_fits(p)) if search.all_orders else Unfinished(NONE_TOGETHER)
    bound = min(search.bound, search.value) if search.all_orders else -math.inf
    proven = search.value - bound <= OPTIMAL_GAP * abs(search.value)
    return Outcome(
        method="ilp",
        status="optimal" if proven else "feasible",
        assignment=search.best,
        value=search.value,
        bound=bound if math.isfinite(bound) else None,
        seconds=time.perf_counter() - start,
        version=backend,
        note=search.note or ("" if search.all_orders else KINDS_NOTE),
    )


def no_plan_fits(p: Problem) -> str:
    """Return the sentence for a problem without any feasible plan."""
    return (
        f"{p.spec.name} does not fit the {len(p.cluster.devices)} devices of {p.cluster.name} at "
        f"batch {p.workload.batch}"
    )


def no_plan_yet(time_limit_s: float) -> str:
    """Return the sentence for a search that ended without a plan and without a proof."""
    return f"no plan found within {time_limit_s:.3g} s; give a longer --time-limit"


class _Search:
    """Best-bound search over (order, pair) programs."""

    def __init__(
        self, p: Problem, backend: Backend, deadline: float, gap: float, budget: float | None
    ) -> None:
        self.p = p
        self.backend = backend
        self.deadline = deadline
        self.gap = gap
        self.budget = budget
        most = max(1, MAX_PROGRAMS // len(p.pairs))
        orders = list(itertools.islice(device_orders(p), most + 1))
        self.all_orders = len(orders) <= most
        self.orders = orders if self.all_orders else kind_orders(p)
        self.best: Assignment | None = None
        self.value = math.inf
        self.bound = math.inf
        """No plan of the orders searched is below it; infinite if none of them has a plan."""
        self.note = ""

    def offer(self, a: Assignment) -> None:
        """Keep a better assignment, valued by the closed form rather than by the solver."""
        if not fits(self.p, a):
            return
        most = math.inf if self.budget is None else self.budget * (1 + BUDGET_ROUNDING)
        if sum_omega(self.p, a) > most:
            return
        worth = value(self.p, a)
        if worth < self.value:
            self.best, self.value = a, worth

    def run(self) -> None:
        """Relax every program, then solve them from the smallest bound up."""
        queue: list[tuple[float, int, Key]] = []
        pending: list[float] = []
        for number, key in enumerate(self._keys()):
            left = self.deadline - time.perf_counter()
            if left <= 0:
                self.bound = -math.inf
                return
            relaxed = solve_milp(self._build(key).model, relax=True, time_limit_s=left)
            if relaxed.status != "infeasible":
                lower = relaxed.value if relaxed.status == "optimal" else -math.inf
                heapq.heappush(queue, (lower, number, key))
        while queue:
            lower, _, key = heapq.heappop(queue)
            if lower >= self.value * (1 - self.gap):
                pending.append(lower)
                break
            left = self.deadline - time.perf_counter()
            if left <= 0:
                pending.append(lower)
                break
            pending.append(self._solve(key, lower, left))
        self.bound = min(pending, default=math.inf)

    def _solve(self, key: Key, lower: float, left: float) -> float:
        """Solve one program; return the bound it leaves behind."""
        ilp = self._build(key)
        result = solve_milp(
            ilp.model, backend=self.backend, time_limit_s=left, gap=self.gap / 10, cutoff=self.value
        )
        self.note = result.note or self.note
        if result.values is not None:
            self.offer(ilp.assignment(result.values))
        if result.status == "infeasible":
            return self.value
        return max(lower, result.bound)

    def _build(self, key: Key) -> StageIlp:
        order, eta, xi = key
        return build_ilp(self.p, order, eta, xi, budget=self.budget)

    def _keys(self) -> Iterator[Key]:
        for order in self.orders:
            for eta, xi in self.p.pairs:
                yield order, eta, xi


def device_orders(p: Problem) -> Iterator[tuple[int, ...]]:
    """Yield each sequence of classes with at most the devices there are, longest first.

    Equal devices are interchangeable. A pinned device is in every order.
    """
    counts = [cls.count for cls in p.classes]
    required = {index for index, cls in enumerate(p.classes) if cls.pinned is not None}
    for length in range(p.max_stages, 0, -1):
        for order in _arrange(counts, length):
            if required <= set(order):
                yield order


def _arrange(counts: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    if length == 0:
        yield ()
        return
    for index, count in enumerate(counts):
        if count:
            rest = [c - (k == index) for k, c in enumerate(counts)]
            for tail in _arrange(rest, length - 1):
                yield (index, *tail)
