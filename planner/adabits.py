"""`adabits`: adaptive precision alone, the least sum of omega that fits.

For a fixed order of devices the layers are cut and quantised so that quality is best within memory;
speed is looked at only to choose the order (of device kinds, as the paper's code does) and the
micro-batches afterwards.
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.exact.columns import Columns, TooManyColumns, make_columns
from llmpq.planner.fits import fitting
from llmpq.planner.outcome import Assignment, Infeasible, Outcome, Stage
from llmpq.planner.pipeline_time import value
from llmpq.planner.problem import Problem

MAX_ORDERS = 24
"""Orders of device kinds tried: 4! of them; more kinds keep the first 24."""


def solve_adabits(p: Problem, *, time_limit_s: float = math.inf) -> Outcome:
    """Return the best-quality plan, with its fastest micro-batches and order of kinds."""
    start = time.perf_counter()
    starts = adabits_plans(p, start + time_limit_s)
    if not starts:
        raise Infeasible("adabits: no order of device kinds fits; use --method exact")
    best = min(starts, key=lambda a: value(p, a))
    return Outcome(
        method="adabits",
        status="baseline",
        assignment=best,
        value=value(p, best),
        bound=None,
        seconds=time.perf_counter() - start,
    )


def kind_orders(p: Problem) -> list[tuple[int, ...]]:
    """Return orders that keep equal devices together, all devices used."""
    kinds = range(len(p.classes))
    orders = []
    for kind_order in itertools.islice(itertools.permutations(kinds), MAX_ORDERS):
        order = tuple(c for c in kind_order for _ in p.classes[c].devices)
        orders.append(order[: p.max_stages])
    return orders


def adabits_plans(p: Problem, deadline: float = math.inf) -> list[Assignment]:
    """Return the best-quality plan of each order, at every pair of micro-batches it fits.

    Past the deadline what was found is all there is, one plan at least where there is one.
    """
    try:
        columns = quality_columns(p)
    except TooManyColumns:
        return []
    tight = p.numbers(*p.pairs[-1]).capacity  # of the largest pair: fits at every one
    roomy = p.numbers(*p.pairs[0]).capacity  # fits at the smallest pair, perhaps
    found: list[Assignment] = []
    for order in kind_orders(p):
        if found and time.perf_counter() > deadline:
            break
        stages = _best_quality(p, columns, order, tight)
        stages = stages or _best_quality(p, columns, order, roomy)
        if stages is None:
            continue
        plans = [
            Assignment(prefill_microbatch=eta, decode_microbatch=xi, stages=stages)
            for eta, xi in p.pairs
        ]
        fine = fitting(p, plans, deadline)
        if fine:
            found.append(min(fine, key=lambda a: value(p, a)))
    return found


def quality_columns(p: Problem) -> Columns:
    """Return the least omega of every filling of a stage."""
    x = p.numbers(*p.pairs[0])
    longest = p.num_layers if len(p.cluster.devices) <= 8 else 4 * -(-p.num_layers // 8)
    return make_columns(
        p.open_omega, x.layer_bytes[0], int(x.capacity.max()), longest=min(longest, p.num_layers)
    )


def _best_quality(
    p: Problem, columns: Columns, order: tuple[int, ...], capacity: NDArray[np.int64]
) -> tuple[Stage, ...] | None:
    """Cut the layers over an order of devices for the least sum of omega, memory permitting."""
    layers = p.num_layers
    best = np.full((len(order) + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    back: dict[tuple[int, int], tuple[int, int]] = {}
    for j, cls in enumerate(order):
        for a in range(layers):
            if not np.isfinite(best[j, a]):
                continue
            for m in range(1, min(columns.most, layers - a) + 1):
                end = a + m
                if (j == len(order) - 1) != (end == layers) or not p.allowed(cls, a, end):
                    continue
                room = capacity[cls, int(a == 0), int(end == layers)]
                fit = int(np.searchsorted(columns.num_bytes[m], room, side="right"))
                if not fit:
                    break
                column = int(np.argmin(columns.least[m][a, :fit]))
                if not np.isfinite(columns.least[m][a, column]):
                    continue
                cost = best[j, a] + columns.least[m][a, column]
                if cost < best[j + 1, end]:
                    best[j + 1, end] = cost
                    back[j + 1, end] = (a, column)
    if not np.isfinite(best[len(order), layers]):
        return None
    stages: list[Stage] = []
    end = layers
    for j in range(len(order), 0, -1):
        a, column = back[j, end]
        choices = columns.choices(a, end - a, column)
        stages.append(Stage(cls=order[j - 1], start=a, end=end, choices=choices))
        end = a
    return tuple(reversed(stages))
