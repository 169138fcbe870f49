"""`adabits`: adaptive precision only: the least sum of omega that fits.

For a fixed order of devices the layers are cut and quantised so that quality is best within memory;
speed is looked at only to choose the order (of device kinds, as the paper's code does) and the
micro-batches afterwards. A device that cannot hold a single layer is left out.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from llmpq.planner.baselines.least_loss import least_loss
from llmpq.planner.evaluate.fits import fitting
from llmpq.planner.evaluate.objective import keeps_budget, value
from llmpq.planner.problem.outcome import Assignment, Infeasible, Outcome, Stage, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stage_memory import DENSE, MIXED, NEVER, PACKED
from llmpq.planner.problem.work_clock import Timer, now_s

MAX_ORDERS = 24
"""Orders of device kinds tried: 4! of them; more kinds keep the first 24."""


def solve_adabits(
    p: Problem, *, time_limit_s: float = math.inf, budget: float | None = None
) -> Outcome:
    """Return the best-quality plan, with its fastest micro-batches and order of kinds."""
    start, timer = now_s(), Timer()
    starts = adabits_plans(p, start + time_limit_s)
    if starts and budget is not None:
        starts = [a for a in starts if keeps_budget(p, a, budget)]
        if not starts:
            raise Infeasible(f"adabits: its plans lose more than {budget:g}; use --method exact")
    if not starts and now_s() > start + time_limit_s:
        raise Unfinished(f"adabits: no plan within {time_limit_s:g} s; give a longer --time-limit")
    if not starts:
        raise Infeasible("adabits: no order of device kinds fits; use --method exact")
    best = min(starts, key=lambda a: value(p, a))
    return Outcome(
        method="adabits",
        status="baseline",
        assignment=best,
        value=value(p, best),
        bound=None,
        seconds=timer.seconds,
    )


def kind_orders(p: Problem) -> list[tuple[int, ...]]:
    """Return orders that keep equal devices together, of all devices that hold a layer."""
    smallest = int(p.all_layer_bytes.min())
    room = p.numbers(*p.pairs[0]).capacity.reshape(len(p.classes), -1).max(axis=1)
    kinds = [c for c, cls in enumerate(p.classes) if room[c] >= smallest or cls.pinned is not None]
    orders: dict[tuple[int, ...], None] = {}
    for kind_order in itertools.islice(itertools.permutations(kinds), MAX_ORDERS):
        order = tuple(c for c in kind_order for _ in p.classes[c].devices)
        orders[order[: p.max_stages]] = None
    return [order for order in orders if order]


def adabits_plans(p: Problem, deadline: float = math.inf) -> list[Assignment]:
    """Return the best-quality plan of each order, at the best pair of micro-batches it fits.

    The first order is always tried; past the deadline what was found is all there is.
    """
    found: list[Assignment] = []
    for number, order in enumerate(kind_orders(p)):
        if number and now_s() > deadline:
            break
        stages = _best_quality(p, order, deadline if number else math.inf)
        if stages is None:
            continue
        plans = (
            Assignment(prefill_microbatch=eta, decode_microbatch=xi, stages=stages)
            for eta, xi in p.pairs
        )
        fine = fitting(p, plans, deadline)
        if fine:
            found.append(min(fine, key=lambda a: value(p, a)))
    return found


def _best_quality(p: Problem, order: tuple[int, ...], deadline: float) -> tuple[Stage, ...] | None:
    """Return the best cut that fits at every pair of micro-batches, else one for the smallest."""
    tight = p.numbers(*p.pairs[-1]).capacity
    roomy = p.numbers(*p.pairs[0]).capacity
    for capacity in (tight,) if np.array_equal(tight, roomy) else (tight, roomy):
        for sort in (MIXED, PACKED, DENSE):
            if capacity[0, 0, 0, sort] != NEVER:
                found = least_loss(p, order, capacity, sort, deadline)
                if found is not None:
                    return found
    return None
