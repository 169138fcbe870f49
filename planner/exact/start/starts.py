"""Good plans before any proof: single devices, pipelines of the fastest, other methods' plans.

Whatever a simpler method finds, the exact one starts from; so it is never above it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from llmpq.planner.evaluate.fits import fits, fitting_plan
from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.problem.outcome import BUDGET_ROUNDING, Assignment, Infeasible, Stage
from llmpq.planner.problem.problem import Floats, Problem
from llmpq.planner.problem.stage_memory import sort_of
from llmpq.planner.problem.work_clock import now_s


class Incumbent:
    """The best plan so far; under a budget its worth is time + theta * budget."""

    def __init__(self, p: Problem, budget: float | None = None) -> None:
        self.p, self.budget = p, budget
        self.best: Assignment | None = None
        self.value = math.inf

    def worth(self, a: Assignment) -> float:
        """Return what a plan that fits is worth, infinite beyond the budget.

        What a search found within the budget is within it here, too, however it rounds.
        """
        worth = value(self.p, a)
        if self.budget is None:
            return worth
        spare = self.budget - sum_omega(self.p, a)
        within = spare >= -self.budget * BUDGET_ROUNDING / 2
        return worth + self.p.theta * spare if within else math.inf

    def offer(self, a: Assignment) -> bool:
        """Keep a plan if it fits and is better; return whether it is."""
        if not fits(self.p, a):
            return False
        worth = self.worth(a)
        if not worth < self.value:
            return False
        self.best, self.value = a, worth
        return True


def quick_plan(p: Problem) -> tuple[Problem, Assignment] | None:
    """Return the job, with the chunks of prompts that it needs, and a plan of it; None: none fits.

    Single devices and pipelines of the fastest, one precision for all layers, and the plan of the
    fewest bytes; the one that takes the least time.
    """
    found = fitting_plan(p)
    if found is None:
        return None
    job, least = found
    incumbent = Incumbent(job.with_changes(theta=0.0))
    incumbent.offer(least)
    for plan in first_plans(incumbent.p, PairTables(incumbent.p)):
        incumbent.offer(plan)
    return (job, least) if incumbent.best is None else (incumbent.p, incumbent.best)


def first_plans(p: Problem, tables: PairTables) -> Iterator[Assignment]:
    """Yield single devices and pipelines of the fastest ones, each precision by itself."""
    middle = _middle_pair(p)
    for b in range(len(p.choices)):
        if not p.open[:, b].all():
            continue
        for order in _orders(p, middle, b):
            split = _split(p, middle, order, b)
            if split is not None:
                pair = tables.best_pair(split, math.inf)
                if pair is not None:
                    yield Assignment(
                        prefill_microbatch=pair[0], decode_microbatch=pair[1], stages=split
                    )


def other_methods(p: Problem, deadline: float) -> Iterator[Assignment]:
    """Yield the plans of the simpler methods, each within its share of the time."""
    from llmpq.planner.baselines.adabits import solve_adabits
    from llmpq.planner.baselines.heuristic import solve_heuristic
    from llmpq.planner.baselines.pipeedge import solve_pipeedge
    from llmpq.planner.baselines.uniform import solve_uniform

    methods = (solve_pipeedge, solve_uniform, solve_adabits, solve_heuristic)
    for number, solve in enumerate(methods):
        left = deadline - now_s()
        if left <= 0:
            return
        with contextlib.suppress(Infeasible):
            share = left / (len(methods) - number)
            yield solve(p, time_limit_s=share).assignment


def distinct_orders(found: list[tuple[float, Assignment]], most: int) -> list[Assignment]:
    """Return the best plans, one of each order of classes."""
    kept: dict[tuple[int, ...], Assignment] = {}
    for _, plan in sorted(found, key=lambda pair: pair[0]):
        kept.setdefault(tuple(stage.cls for stage in plan.stages), plan)
        if len(kept) == most:
            break
    return list(kept.values())


def _middle_pair(p: Problem) -> tuple[int, int]:
    """Return the pair at which devices are compared."""
    return p.prefill_sizes[len(p.prefill_sizes) // 4], p.decode_sizes[len(p.decode_sizes) // 2]


def _job_seconds(p: Problem, pair: tuple[int, int]) -> Floats:
    """[C, B] time that a layer takes of a device over the whole job."""
    x, (mp, md) = p.numbers(*pair), p.counts(*pair)
    decode = max(p.workload.gen_len - 1, 0) * md
    return np.asarray(mp * x.prefill_s[0] + decode * x.decode_s[0])


def _orders(p: Problem, pair: tuple[int, int], b: int) -> Iterator[tuple[int, ...]]:
    """Yield every single device, then the fastest 2, 3, ..., of all nodes and within each."""
    seconds = _job_seconds(p, pair)[:, b]
    for c in range(len(p.classes)):
        yield (c,)
    fastest = sorted(range(len(p.classes)), key=lambda c: seconds[c])
    devices = [c for c in fastest for _ in p.classes[c].devices][: p.max_stages]
    sizes = {k for k in range(2, len(devices) + 1) if k <= 8 or k % (k // 8 + 1) == 0}
    for size in sorted(sizes | {len(devices)} - {1, 0}):
        chosen = devices[:size]
        nodes = {p.classes[c].first.node: k for k, c in reversed(list(enumerate(chosen)))}
        yield tuple(sorted(chosen, key=lambda c: nodes[p.classes[c].first.node]))
    yield from _within_nodes(p, fastest)


def _within_nodes(p: Problem, fastest: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the fastest 2, 3, ... devices of each node, of nodes with the same devices one."""
    own: dict[str, list[int]] = {}
    for c in fastest:
        for device in p.classes[c].devices:
            own.setdefault(device.node, []).append(c)
    seen: set[tuple[str, ...]] = set()
    for classes in own.values() if len(own) > 1 else ():
        kinds = tuple(p.classes[c].first.profile_kind for c in classes)
        if kinds not in seen:
            seen.add(kinds)
            for size in range(2, min(len(classes), p.max_stages) + 1):
                yield tuple(classes[:size])


def _split(
    p: Problem, pair: tuple[int, int], order: Sequence[int], b: int
) -> tuple[Stage, ...] | None:
    """Share the layers out by speed, as far as memory allows; None if they do not fit."""
    layer = int(p.all_layer_bytes[0, b])
    counts = np.zeros(len(p.choices), dtype=np.int64)
    counts[b] = 1
    sort = int(sort_of(p.packed, counts))
    table = p.capacity(p.prefill_sizes[0], p.decode_sizes[0])
    last = len(order) - 1
    most = np.array(
        [
            max(0, int(table[c, int(j == 0), int(j == last), sort])) // layer
            for j, c in enumerate(order)
        ]
    )
    if most.sum() < p.num_layers or p.num_layers < len(order) or (most < 1).any():
        return None
    speed = 1.0 / np.maximum(_job_seconds(p, pair)[list(order), b], 1e-30)
    held = np.ones(len(order), dtype=np.int64)
    while held.sum() < p.num_layers:
        # The next layer goes where it would be done first.
        ends = np.where(held < most, (held + 1) / speed, np.inf)
        held[int(np.argmin(ends))] += 1
    if len(order) > p.max_stages:
        return None
    bounds = p.nearest_cuts([0, *np.cumsum(held).tolist()])
    return tuple(
        Stage(cls=c, start=int(low), end=int(high), choices=(b,) * int(high - low))
        for c, low, high in zip(order, bounds, bounds[1:], strict=False)
    )
