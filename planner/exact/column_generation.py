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

from llmpq.planner.exact.bounds.columns import (
    column_costs,
    ends_costs,
    layer_costs,
    priced,
    priced_layers,
    priced_times,
)
from llmpq.planner.exact.bounds.completion import Completion
from llmpq.planner.problem.problem import Floats
from llmpq.planner.problem.stage_memory import MIXED, choices_of, sort_of
from llmpq.planner.problem.work_clock import spend

BLOCK = 256
"""Rows compared at a time."""
FEW = 64
"""Rows that many others are compared with first."""
MANY = 1500
"""Rows of which not every pair is compared any more."""


def undominated(worse: Floats) -> NDArray[np.int64]:
    """Return rows of which no other row is at least as small in every column; of equals one.

    Of very many rows only those are left out that a few small ones are as good as.
    """
    rows = np.arange(len(worse))
    if len(rows) > BLOCK:
        rows = rows[~_covered_by_few(worse)]
    return rows if len(rows) > MANY else rows[_compared(worse[rows])]


def _covered_by_few(worse: Floats) -> NDArray[np.bool_]:
    """[n] whether a row is no better anywhere, and worse somewhere, than one of the smallest."""
    span = np.ptp(worse, axis=0)
    size = (worse / np.where(span > 0, span, 1.0)).sum(axis=1)
    few = worse[np.argpartition(size, FEW)[:FEW]]
    found = np.zeros(len(worse), dtype=bool)
    for row in few:
        found |= (row <= worse).all(axis=1) & (row < worse).any(axis=1)
    return found


def _compared(worse: Floats) -> NDArray[np.int64]:
    """Return the undominated rows, every pair compared."""
    order = np.lexsort(worse.T[::-1])
    kept = np.empty((0, worse.shape[1]))
    rows: list[NDArray[np.int64]] = []
    for start in range(0, len(order), BLOCK):
        part = worse[order[start : start + BLOCK]]
        spend(20, len(part) * worse.shape[1] * (len(kept) + len(part)))
        index = np.flatnonzero(~_covered(part, kept))
        part = part[index]
        below = _at_most(part, part)
        # Sorted: what covers a row comes before it, or is its equal.
        inner = ~np.any(np.tril(below, -1), axis=1)
        index, part = index[inner], part[inner]
        kept = np.concatenate([kept, part])
        rows.append(order[start + index])
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def _covered(part: Floats, by: Floats) -> NDArray[np.bool_]:
    """[n] whether some row of `by` is at most each row of `part` in every column."""
    found = np.zeros(len(part), dtype=bool)
    for low in range(0, len(by), 4096):
        chunk = by[low : low + 4096]
        found |= _at_most(part, chunk).any(axis=1)
    return found


def _at_most(part: Floats, by: Floats) -> NDArray[np.bool_]:
    """[n, m] whether each row of `by` is at most each row of `part` in every column."""
    return np.asarray((by[None] <= part[:, None]).all(axis=2))


MAX_COLUMNS = 150_000
"""Vectors of a class at one length, or of all that can be used; beyond it a part is split."""


WORTH_COMPARING = 32
"""Vectors from which on it is worth looking for those that others are as good as."""


class ColumnLimitReached(Exception):
    """More vectors are wanted than can be looked at."""


@dataclass(frozen=True, kw_only=True)
class UsableColumns:
    """Ways to fill the stages of one class from one start, ends of the model included."""

    layers: NDArray[np.int64]
    """[K] m."""
    vector: NDArray[np.int64]
    """[K] row of `ColumnPool.vectors`."""
    tp: Floats
    td: Floats
    held_p: Floats
    """[K] means over micro-batches: what P and D are made of."""
    held_d: Floats
    omega: Floats
    cost: Floats
    """[K] priced, as `Completion.stage` is."""

    def pick(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> UsableColumns:
        """Return some of them."""
        return UsableColumns(
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
class ColumnPool:
    """Everything that a plan below a value can use, by class and start."""

    vectors: NDArray[np.int64]
    """[V, B] counts."""
    by_start: dict[tuple[int, int], UsableColumns]


def generate_columns(bound: Completion, below: float, late: Callable[[], bool]) -> ColumnPool:
    """Return the ways to fill stages that plans with F < below can use."""
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
        if late() or sum(len(part.start) for part in made) > MAX_COLUMNS:
            raise ColumnLimitReached
    return _by_start(bound, made, late)


@dataclass(frozen=True, kw_only=True)
class _Made:
    """Vectors of one class and length."""

    c: int
    m: int
    counts: NDArray[np.int64]
    start: NDArray[np.int64]
    omega: Floats


def _by_start(bound: Completion, made: list[_Made], late: Callable[[], bool]) -> ColumnPool:
    """Number the vectors; add times and ends; sort by class and start."""
    choices = len(bound.p.choices)
    if not made:
        return ColumnPool(vectors=np.zeros((0, choices), dtype=np.int64), by_start={})
    x, layers = bound.form.numbers, bound.p.num_layers
    sizes = [len(part.start) for part in made]
    spend(20 * len(made), 60 * sum(sizes))
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
    live = UsableColumns(
        layers=m,
        vector=np.arange(len(m)),
        tp=tp,
        td=td,
        held_p=held_p,
        held_d=held_d,
        omega=omega,
        cost=cost + bound.p.theta * omega,
    )
    by_start: dict[tuple[int, int], UsableColumns] = {}
    order = np.lexsort((m, start, c))
    key = c * (layers + 1) + start
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        if late():
            raise ColumnLimitReached
        where = int(c[rows[0]]), int(start[rows[0]])
        by_start[where] = live.pick(rows)
    return ColumnPool(vectors=vectors, by_start=by_start)


def useful(live: UsableColumns) -> UsableColumns:
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
    layers = p.num_layers
    for m in range(1, columns.most + 1):
        starts = np.arange(len(columns.least[m]))
        wanted = starts[reach[starts, starts + m] > -np.inf]
        if not len(wanted):
            continue
        if late():
            raise ColumnLimitReached
        base = column_costs(bound.form, bound.weights, bound.box, columns.counts[m], c)
        spend(60, len(base) * (20 + 3 * len(wanted)))
        # Starts in the middle of the model have the same ends and room: all at once.
        inner = (wanted > 0) & (wanted + m < layers)
        for some in (wanted[:1][~inner[:1]], wanted[inner], wanted[1:][~inner[1:]]):
            if not len(some):
                continue
            first, last = int(some[0] == 0), int(some[0] + m == layers)
            omega = columns.least[m][some[:1] if columns.alike[m] else some]
            cost = priced(omega, p.theta) + base + first * ends[c, 0] + last * ends[c, 1]
            most = reach[some, some + m, None]
            able = columns.fitting(m, capacity[c, first, last])
            able &= (cost <= most.max()).any(axis=0)
            each = np.flatnonzero(able)
            omega = omega[:, each]
            rows, which = np.nonzero((cost[:, each] <= most) & np.isfinite(omega))
            if len(rows):
                counts = columns.counts[m][each[which]]
                kept = np.broadcast_to(omega, (len(some), len(each)))[rows, which]
                found.append(_Made(c=c, m=m, counts=counts, start=some[rows], omega=kept))
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
            raise ColumnLimitReached
        grown = _longer(bound, grown, m, limit)
        if not len(grown.start):
            break
        if len(grown.start) > MAX_COLUMNS:
            raise ColumnLimitReached
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
    spend(60, len(start) * (20 + 4 * len(p.choices) + 6 * len(limit.rhos)))
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
