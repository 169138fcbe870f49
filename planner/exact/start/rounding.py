"""Plans made of the relaxation's optimum: its fractions of layers, made whole and put in order.

It knows what fits and what is worth its omega, at the pairs of micro-batch sizes that promise most;
so what it is made of is often near the best plan where memory is scarce and no simple plan fits.

And the plan that a completion's bound is made of (`greedy_plan`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.evaluate.objective import Form, make_form
from llmpq.planner.exact.bounds.columns import assigned, column_costs, layer_costs, priced
from llmpq.planner.exact.bounds.completion import Completion
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.bounds.relaxation import ClassRelaxation, Prices, class_memory
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Floats, Problem


def greedy_plan(bound: Completion) -> Assignment | None:
    """Return the plan that a completion's bound is made of, None if it is a dead end."""
    p, numbers = bound.p, bound.form.numbers
    found = bound.greedy()
    if not found:
        return None
    stages = tuple(
        Stage(cls=c, start=a, end=e, choices=_filled(bound, c, a, e)) for c, a, e in found
    )
    assert stages[-1].end == p.num_layers
    return Assignment(prefill_microbatch=numbers.eta, decode_microbatch=numbers.xi, stages=stages)


def _filled(bound: Completion, c: int, a: int, e: int) -> tuple[int, ...]:
    """Return choices of a stage near the cheapest that fits: what does not fit is repaired."""
    p, columns, m = bound.p, bound.columns, e - a
    if columns is not None:
        room = bound.form.numbers.capacity[c, int(a == 0), int(e == p.num_layers)]
        fits = columns.fitting(m, room)
        cost = column_costs(bound.form, bound.weights, bound.box, columns.counts[m], c)
        cost = np.where(fits, cost + priced(columns.least[m][a], p.theta), np.inf)
        return assigned(p.open_omega[a:e], columns.counts[m][int(np.argmin(cost))])
    cost = layer_costs(p, bound.form, bound.weights, c)[a:e]
    return tuple(int(b) for b in cost.argmin(axis=1))


MOST_SOLVED = 12
"""Pairs whose relaxation is solved, to find those that promise most."""
PLANS = 3
"""Pairs of which a plan is made."""


def rounded_plans(
    p: Problem, tables: PairTables, relaxation: ClassRelaxation
) -> Iterator[Assignment]:
    """Yield plans near the relaxation's optimum of the most promising pairs; they may not fit."""
    for form, prices in _most_promising(p, tables, relaxation):
        stages = _stages(p, form, prices)
        if stages is not None:
            yield Assignment(
                prefill_microbatch=form.numbers.eta,
                decode_microbatch=form.numbers.xi,
                stages=stages,
            )


def _most_promising(
    p: Problem, tables: PairTables, relaxation: ClassRelaxation
) -> list[tuple[Form, Prices]]:
    """Return the pairs of the smallest relaxations, as far as a few of them tell."""
    first = tables.first_bounds(relaxation.groups).min(axis=0)
    bounds = np.where(tables.open, first, np.inf)
    found: list[tuple[Form, Prices]] = []
    for _ in range(MOST_SOLVED):
        row, column = np.unravel_index(int(np.argmin(bounds)), bounds.shape)
        if not np.isfinite(bounds[row, column]):
            break
        form = make_form(p, p.prefill_sizes[row], p.decode_sizes[column])
        prices = relaxation.solve(form)
        if prices.layers is not None:
            found.append((form, prices))
            proven = tables.bounds(relaxation.groups, form, prices).min(axis=0)
            bounds = np.maximum(bounds, proven)
        bounds[row, column] = np.inf
    found.sort(key=lambda pair: pair[1].value)
    return found[:PLANS]


def _stages(p: Problem, form: Form, prices: Prices) -> tuple[Stage, ...] | None:
    """Make whole layers of an optimum's fractions; None where they are no plan."""
    assert prices.layers is not None
    held = _whole(prices.layers.sum(axis=1), p.num_layers)
    devices = _devices(p, form, prices, held)
    if devices.sum() > p.max_stages or not devices.any():
        return None
    stages: list[Stage] = []
    a = 0
    counts = {
        c: _shared_out(prices.layers[c], int(held[c]), int(devices[c])) for c in range(len(held))
    }
    for c in _order(p, form, devices):
        own = counts[c].pop()
        end = a + int(own.sum())
        choices = assigned(p.open_omega[a:end], own)
        if not np.isfinite(p.open_omega[np.arange(a, end), list(choices)]).all():
            return None  # some layer may not have what is left for it
        stages.append(Stage(cls=c, start=a, end=end, choices=choices))
        a = end
    return tuple(stages)


def _whole(shares: Floats, total: int) -> NDArray[np.int64]:
    """Round shares to whole numbers of a sum: the largest fractions are rounded up."""
    scaled = shares * (total / max(float(shares.sum()), 1e-300))
    found = np.floor(scaled + 1e-9).astype(np.int64)
    order = np.argsort(found - scaled, kind="stable")
    found[order[: total - int(found.sum())]] += 1
    return found


def _devices(p: Problem, form: Form, prices: Prices, held: NDArray[np.int64]) -> NDArray[np.int64]:
    """[C] devices that the layers of a class take, by memory and the slowest stage."""
    assert prices.layers is not None
    x, room = form.numbers, class_memory(form.numbers.capacity).middle
    needed = [prices.layers @ p.all_layer_bytes[0] / np.maximum(room, 1.0)]
    for times, slowest in zip(
        (x.held_prefill_s[0], x.held_decode_s[0]), prices.slowest, strict=True
    ):
        if slowest > 0:
            needed.append((prices.layers * times).sum(axis=1) / slowest)
    least = np.ceil(np.max(needed, axis=0) * (1 - 1e-6)).astype(np.int64)
    counts = np.array([cls.count for cls in p.classes])
    return np.minimum(np.clip(least, 1, counts), held)


def _shared_out(mix: Floats, held: int, devices: int) -> list[NDArray[np.int64]]:
    """Return the layers [B] of each device of a class at each choice: about the same of all."""
    if not devices:
        return []
    whole = _whole(mix, held)
    kinds = np.repeat(np.arange(len(mix)), whole)
    return [np.bincount(kinds[k::devices], minlength=len(mix)) for k in range(devices)]


def _order(p: Problem, form: Form, devices: NDArray[np.int64]) -> list[int]:
    """Return the classes of the stages in an order of quick hops: always the nearest one next."""
    x = form.numbers
    hop = x.hop_prefill.total_s + form.s_weight(0.0) * x.hop_decode.total_s
    found: list[tuple[float, list[int]]] = []
    for start in np.flatnonzero(devices):
        left, order, cost = devices.copy(), [int(start)], 0.0
        left[start] -= 1
        while left.any():
            ways = np.where(left > 0, hop[order[-1]], math.inf)
            c = int(np.argmin(ways))
            cost += float(ways[c])
            order.append(c)
            left[c] -= 1
        found.append((cost, order))
    return min(found)[1]
