"""Count vectors that a plan below a value can use, made where there is no table of all.

A stage of class c over layers [a, e) may cost reach[a, e] at most: the value, less what all else
costs at least (`Completion.through`). Vectors grow layer by layer from every start at once. One
that stands at layer i with cost g and y bytes is dropped when no end is left for it, whatever
memory costs,

    g + rho y - G_rho[i]  >  max over e of  reach[a, e] + rho capacity - G_rho[e]   for some rho,

or when another of the same start and length is no worse in time, omega and bytes, and of a sort
that leaves as much room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.costs.stage_memory import MIXED, choices_of, sort_of
from llmpq.planner.exact.bounds.columns import priced
from llmpq.planner.exact.bounds.completion import Completion
from llmpq.planner.exact.bounds.stages import (
    column_costs,
    ends_costs,
    layer_costs,
    priced_layers,
    priced_times,
)
from llmpq.planner.exact.dominance import undominated
from llmpq.planner.problem.problem import Floats

MAX_LIVE = 150_000
"""Vectors of a class at one length, or of all that can be used; beyond it a part is split."""


WORTH_COMPARING = 32
"""Vectors from which on it is worth looking for those that others are as good as."""


class TooMany(Exception):
    """More vectors are wanted than can be looked at."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """Ways to fill the stages of one class from one start, ends of the model included."""

    layers: NDArray[np.int64]
    """[K] m."""
    vector: NDArray[np.int64]
    """[K] row of `LiveColumns.vectors`."""
    tp: Floats
    td: Floats
    held_p: Floats
    """[K] as the slowest stage goes by."""
    held_d: Floats
    omega: Floats
    cost: Floats
    """[K] priced, as `Completion.stage` is."""

    def pick(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Live:
        """Return some of them."""
        return Live(
            layers=self.layers[rows],
            vector=self.vector[rows],
            tp=self.tp[rows],
            td=self.td[rows],
            held_p=self.held_p[rows],
            held_d=self.held_d[rows],
            omega=self.omega[rows],
            cost=self.cost[rows],
        )


@dataclass(frozen=True, kw_only=True)
class LiveColumns:
    """Everything that a plan below a value can use, by class and start."""

    vectors: NDArray[np.int64]
    """[V, B] counts."""
    by_start: dict[tuple[int, int], Live]


def live_columns(bound: Completion, below: float, late: Callable[[], bool]) -> LiveColumns:
    """Return the ways to fill stages that plans with F < below can use; `TooMany` if too many."""
    reach = np.full(bound.stage.shape, -np.inf)
    layers = bound.p.num_layers
    # A value that is infinite leaves whatever can be part of a plan.
    most = below if np.isfinite(below) else 1e300
    reach[:, :layers] = np.where(
        np.isfinite(bound.through), most - bound.constant - bound.through, -np.inf
    )
    reach = np.where(bound.stage <= reach, reach, -np.inf)
    made: list[_Made] = []
    for c in range(len(bound.p.classes)):
        if (reach[c] > -np.inf).any():
            ways = _from_table if bound.columns is not None else _grown
            made += ways(bound, c, reach[c], late)
        if late() or sum(len(part.start) for part in made) > MAX_LIVE:
            raise TooMany
    return _by_start(bound, made, late)


@dataclass(frozen=True, kw_only=True)
class _Made:
    """Vectors of one class and length."""

    c: int
    m: int
    counts: NDArray[np.int64]
    start: NDArray[np.int64]
    omega: Floats


def _by_start(bound: Completion, made: list[_Made], late: Callable[[], bool]) -> LiveColumns:
    """Number the vectors; add times and ends; sort by class and start."""
    choices = len(bound.p.choices)
    if not made:
        return LiveColumns(vectors=np.zeros((0, choices), dtype=np.int64), by_start={})
    x, layers = bound.form.numbers, bound.p.num_layers
    sizes = [len(part.start) for part in made]
    c = np.repeat([part.c for part in made], sizes)
    m = np.repeat([part.m for part in made], sizes)
    start = np.concatenate([part.start for part in made])
    omega = np.concatenate([part.omega for part in made])
    vectors = np.concatenate([part.counts for part in made])
    first, last = start == 0, start + m == layers
    tp, td, held_p, held_d = (
        (vectors * layer[0, c]).sum(axis=1) + first * ends[c, 0] + last * ends[c, 1]
        for layer, ends in (
            (x.prefill_s, x.ends_prefill_s),
            (x.decode_s, x.ends_decode_s),
            (x.held_prefill_s, x.held_ends_prefill_s),
            (x.held_decode_s, x.held_ends_decode_s),
        )
    )
    by = bound.weights
    cost = tp + by.prefill[c] * held_p + by.every_decode * td + by.decode[c] * held_d
    live = Live(
        layers=m,
        vector=np.arange(len(m)),
        tp=tp,
        td=td,
        held_p=held_p,
        held_d=held_d,
        omega=omega,
        cost=cost + bound.p.theta * omega,
    )
    by_start: dict[tuple[int, int], Live] = {}
    order = np.lexsort((m, start, c))
    key = c * (layers + 1) + start
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        if late():
            raise TooMany
        where = int(c[rows[0]]), int(start[rows[0]])
        by_start[where] = live.pick(rows)
    return LiveColumns(vectors=vectors, by_start=by_start)


def useful(live: Live) -> Live:
    """Leave out what another of the same length is as good as in time and omega."""
    if len(live.layers) < WORTH_COMPARING:
        return live
    kept: list[NDArray[np.int64]] = []
    columns = [live.tp, live.td, live.omega]
    for held, whole in ((live.held_p, live.tp), (live.held_d, live.td)):
        columns += [] if np.array_equal(held, whole) else [held]
    worse = np.stack(columns, axis=1)
    ends = np.flatnonzero(np.diff(live.layers)) + 1
    for rows in np.split(np.arange(len(live.layers)), ends):
        many = len(rows) >= WORTH_COMPARING
        kept.append(rows[undominated(worse[rows])] if many else rows)
    return live.pick(np.concatenate(kept))


def _from_table(bound: Completion, c: int, reach: Floats, late: Callable[[], bool]) -> list[_Made]:
    """Pick from the table of all columns."""
    columns, p, found = bound.columns, bound.p, []
    assert columns is not None
    ends, capacity = ends_costs(bound.form, bound.weights), bound.form.numbers.capacity
    for m in range(1, columns.most + 1):
        starts = np.arange(len(columns.least[m]))
        wanted = starts[reach[starts, starts + m] > -np.inf]
        if not len(wanted):
            continue
        if late():
            raise TooMany
        base = column_costs(bound.form, bound.weights, bound.box, columns.counts[m], c)
        for a in wanted:
            first, last = int(a == 0), int(a + m == p.num_layers)
            omega = columns.least[m][a]
            cost = priced(omega, p.theta) + base + first * ends[c, 0] + last * ends[c, 1]
            fits = columns.fitting(m, capacity[c, first, last])
            keep = np.flatnonzero(fits & (cost <= reach[a, a + m]) & np.isfinite(omega))
            if len(keep):
                start = np.full(len(keep), a)
                counts = columns.counts[m][keep]
                found.append(_Made(c=c, m=m, counts=counts, start=start, omega=omega[keep]))
    return found


@dataclass(frozen=True, kw_only=True)
class _Growing:
    """Vectors of one class that are so long now."""

    start: NDArray[np.int64]
    counts: NDArray[np.int64]
    omega: Floats

    def pick(self, rows: NDArray[np.int64]) -> _Growing:
        return _Growing(start=self.start[rows], counts=self.counts[rows], omega=self.omega[rows])


def _grown(bound: Completion, c: int, reach: Floats, late: Callable[[], bool]) -> list[_Made]:
    """Grow vectors layer by layer from every start that can be used."""
    p, capacity = bound.p, bound.form.numbers.capacity
    layers, choices = p.num_layers, len(p.choices)
    limit = _limits(bound, c, reach)
    starts = np.flatnonzero((reach > -np.inf).any(axis=1))
    grown = _Growing(
        start=starts,
        counts=np.zeros((len(starts), choices), dtype=np.int64),
        omega=np.zeros(len(starts)),
    )
    found: list[_Made] = []
    longest = int(
        (np.arange(layers + 1)[None] - np.arange(layers + 1)[:, None])[reach > -np.inf].max()
    )
    for m in range(1, longest + 1):
        if late():
            raise TooMany
        grown = _longer(bound, grown, m, limit)
        if not len(grown.start):
            break
        if len(grown.start) > MAX_LIVE:
            raise TooMany
        end = grown.start + m
        first, last = (grown.start == 0).astype(int), (end == layers).astype(int)
        sizes = grown.counts @ p.all_layer_bytes[0]
        sorts = sort_of(p.packed, grown.counts)
        cost = column_costs(bound.form, bound.weights, bound.box, grown.counts, c)
        cost = cost + p.theta * grown.omega
        ends = ends_costs(bound.form, bound.weights)
        cost = cost + first * ends[c, 0] + last * ends[c, 1]
        fits = sizes <= capacity[c, first, last, sorts]
        keep = fits & (cost <= reach[grown.start, end])
        if keep.any():
            rows = np.flatnonzero(keep)
            part = grown.pick(rows)
            found.append(_Made(c=c, m=m, counts=part.counts, start=part.start, omega=part.omega))
    return found


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """What a growing vector may cost at each price of memory."""

    c: int
    rhos: Floats
    sums: Floats
    """[R, L+1] G."""
    most: Floats
    """[R, L, L+1] largest of reach + rho capacity - G over the ends from a layer on, by start."""


def _limits(bound: Completion, c: int, reach: Floats) -> _Limits:
    p, layers = bound.p, bound.p.num_layers
    costs = layer_costs(p, bound.form, bound.weights, c)
    rho = float(bound.prices.memory[c])
    made = priced_layers(p, costs, choices_of(p.choices, MIXED), rho)
    room = bound.form.numbers.capacity[c].max(axis=-1).astype(float)
    ends = ends_costs(bound.form, bound.weights)
    left = np.full((layers, layers + 1), room[0, 0])
    left[0, :], left[:, layers] = room[1, 0], room[0, 1]
    left[0, layers] = room[1, 1]
    inner = reach[:layers].copy()
    inner[0] -= ends[c, 0]
    inner[:, layers] -= ends[c, 1]
    sums = np.where(np.isfinite(made.sums), made.sums, 1e300)
    most = inner[None] + made.rhos[:, None, None] * left[None] - sums[:, None, :]
    most = np.maximum.accumulate(most[:, :, ::-1], axis=2)[:, :, ::-1]
    return _Limits(c=c, rhos=made.rhos, sums=sums, most=most)


def _longer(bound: Completion, grown: _Growing, m: int, limit: _Limits) -> _Growing:
    """Add one layer at each choice; keep what can still end below the value."""
    p, box, x = bound.p, bound.box, bound.form.numbers
    layer = grown.start + m - 1
    inside = layer < p.num_layers
    grown, layer = grown.pick(np.flatnonzero(inside)), layer[inside]
    omega = np.where(p.open, p.omega, np.inf)
    start = np.tile(grown.start, len(p.choices))
    counts = np.concatenate([grown.counts + row for row in np.eye(len(p.choices), dtype=np.int64)])
    total = np.concatenate([grown.omega + omega[layer, b] for b in range(len(p.choices))])
    c = limit.c
    tp, td = counts @ x.held_prefill_s[0, c], counts @ x.held_decode_s[0, c]
    sizes = counts @ p.all_layer_bytes[0]
    cost = counts @ priced_times(bound.form, bound.weights, c) + priced(total, p.theta)
    keep = np.isfinite(total) & (tp <= box.p_high) & (td <= box.d_high)
    at = np.minimum(start + m, p.num_layers)
    for rho, sums, most in zip(limit.rhos, limit.sums, limit.most, strict=True):
        spent = cost + rho * sizes
        # Rounding of sums in another order.
        keep &= spent - 1e-9 * np.abs(spent) <= most[start, at] + sums[at]
    rows = np.flatnonzero(keep)
    return _best_of_each(
        bound, _Growing(start=start[rows], counts=counts[rows], omega=total[rows]), c
    )


def _best_of_each(bound: Completion, grown: _Growing, c: int) -> _Growing:
    """Keep the least omega of equal counts, then what no other is as good as."""
    p, x = bound.p, bound.form.numbers
    if not len(grown.start):
        return grown
    base = np.int64(p.num_layers + 1) ** np.arange(len(p.choices) + 1, dtype=np.int64)
    code = grown.counts @ base[:-1] + grown.start * base[-1]
    order = np.lexsort((grown.omega, code))
    _, once = np.unique(code[order], return_index=True)
    grown = grown.pick(order[once])
    if len(grown.start) < 64:
        return grown
    # A sort that has fewer kinds of weights leaves at least as much room.
    tables = [x.prefill_s, x.decode_s]
    for held, whole in ((x.held_prefill_s, x.prefill_s), (x.held_decode_s, x.decode_s)):
        tables += [] if np.array_equal(held, whole) else [held]
    columns = [grown.counts @ table[0, c] for table in tables]
    columns += [grown.omega, (grown.counts @ p.all_layer_bytes[0]).astype(float)]
    worse = np.stack(columns, axis=1)
    sorts = sort_of(p.packed, grown.counts)
    keep = np.zeros(len(grown.start), dtype=bool)
    group = grown.start * 3 + sorts
    for g in np.unique(group):
        rows = np.flatnonzero(group == g)
        keep[rows[undominated(worse[rows])]] = True
    return grown.pick(np.flatnonzero(keep))
