"""The whole table of ways to fill a stage: how many layers get each choice, and the least omega.

Layers take equal time and memory, so a stage of m layers starting at layer a is described by counts
(how many layers get each choice) and W[a, counts], the least sum of omega over assignments with
these counts. W is exact for any omega:

    W_m[a, k] = min_b  W_{m-1}[a, k - e_b] + omega[a + m - 1, b]

Long stages of many choices have millions of count vectors: past MAX_VECTORS there is no table, and
the search makes the few vectors that it needs (planner/exact/column_generation.py).

Below: their times at a pair of micro-batch sizes, and the cheapest of each stage.

T: the cheapest stage of any class over any range of layers, at given weights of time.

    T[c, a, e] <= min over count vectors that fit of  wp tp + wd td + theta omega  (+ ends)

From the table of columns, where there is one, it is that minimum. Else memory is priced: at rho
seconds a byte every layer takes its cheapest choice by itself, so sums over ranges are differences
of prefix sums, and the best of a few rho is nearly the minimum:

    T = max_rho  G_rho[e] - G_rho[a] - rho capacity
    G_rho[e] = sum_{i<e} min_b cost_ib + rho bytes_b
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.evaluate.objective import Form
from llmpq.planner.exact.bounds.plan_cases import Box
from llmpq.planner.problem.numbers import PairNumbers
from llmpq.planner.problem.problem import Floats, Problem
from llmpq.planner.problem.stage_memory import DENSE, MIXED, NEVER, PACKED, choices_of, sort_of
from llmpq.planner.problem.work_clock import spend

MAX_VECTORS = 150_000
"""Count vectors of all lengths together."""
MAX_ENTRIES = 3_000_000
"""Entries of W."""


class TooManyColumns(Exception):
    """There are too many count vectors for a table."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Count vectors and least omegas for m = 0..most layers."""

    counts: tuple[NDArray[np.int64], ...]
    """[m] -> [K, B]."""
    num_bytes: tuple[NDArray[np.int64], ...]
    """[m] -> [K]."""
    sorts: tuple[NDArray[np.int64], ...]
    """[m] -> [K] sort of weights (planner/problem/stage_memory.py)."""
    least: tuple[Floats, ...]
    """[m] -> [L - m + 1, K] least sum of omega of layers [a, a + m), infinite if none may be so."""
    _priced: dict[float, tuple[Floats, ...]] = field(default_factory=dict, compare=False)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[N] layers of each of all count vectors of one layer and more, side by side."""
        sizes = [len(counts) for counts in self.counts[1:]]
        return np.repeat(np.arange(1, self.most + 1), sizes)

    @cached_property
    def alike(self) -> tuple[bool, ...]:
        """[m] -> whether the least omegas are the same from every start."""
        return tuple(bool((omega == omega[:1]).all()) for omega in self.least)

    def priced_omega(self, theta: float) -> tuple[Floats, ...]:
        """[m] -> [L - m + 1, K] theta times the least omegas, kept for the theta asked of last.

        One row of lengths at which all starts are alike.
        """
        if theta not in self._priced:
            self._priced.clear()
            once = zip(self.least, self.alike, strict=True)
            self._priced[theta] = tuple(
                priced(omega[:1] if alike else omega, theta) for omega, alike in once
            )
        return self._priced[theta]

    @property
    def most(self) -> int:
        """Largest number of layers of a stage."""
        return len(self.counts) - 1

    def fitting(self, m: int, room: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[K] which vectors of m layers fit, given the bytes left for each sort."""
        return np.asarray(self.num_bytes[m] <= room[self.sorts[m]])


def make_columns(p: Problem) -> Columns:
    """Return the table for the roomiest stage."""
    num_layers, num_choices = p.num_layers, len(p.choices)
    only_whole = p.max_stages == 1
    omega, layer_bytes = p.open_omega, p.all_layer_bytes[0]
    # Larger micro-batches leave less room.
    room = p.capacity(p.prefill_sizes[0], p.decode_sizes[0]).max(axis=(0, 1, 2))
    counts = [np.zeros((1, num_choices), dtype=np.int64)]
    least: list[Floats] = [np.zeros((1 if only_whole else num_layers + 1, 1))]
    base = np.int64(num_layers + 1) ** np.arange(num_choices, dtype=np.int64)
    vectors_made = entries = 0
    for m in range(1, num_layers + 1):
        vectors = _next_vectors(counts[-1], base)
        vectors = vectors[vectors @ layer_bytes <= room[sort_of(p.packed, vectors)]]
        starts = 1 if only_whole else num_layers - m + 1
        vectors_made += len(vectors)
        entries += len(vectors) * starts
        if entries > MAX_ENTRIES or vectors_made > MAX_VECTORS:
            raise TooManyColumns
        back = _previous(vectors, counts[-1], base)
        spend(20 * num_choices, len(vectors) * num_choices * (starts + 20))
        table = np.full((starts, len(vectors)), np.inf)
        for b in range(num_choices):
            has = back[:, b] >= 0
            above = least[-1][:starts, back[has, b]] + omega[m - 1 : m - 1 + starts, b, None]
            table[:, has] = np.minimum(table[:, has], above)
        some = np.isfinite(table).any(axis=0) if len(vectors) else np.zeros(0, dtype=bool)
        if not some.any():
            break
        counts.append(vectors[some])
        least.append(table[:, some])
    return Columns(
        counts=tuple(counts),
        num_bytes=tuple(k @ layer_bytes for k in counts),
        sorts=tuple(sort_of(p.packed, k) for k in counts),
        least=tuple(least),
    )


def columns_if_few(p: Problem) -> Columns | None:
    """Return the table, None where it would be too large."""
    try:
        return make_columns(p)
    except TooManyColumns:
        return None


def priced(omega: Floats, theta: float) -> Floats:
    """Return theta times omega; what is infinite stays so at a theta of zero."""
    return theta * omega if theta > 0 else np.where(np.isinf(omega), omega, 0.0)


def assigned(omega: Floats, counts: NDArray[np.int64]) -> tuple[int, ...]:
    """Return a choice for each layer with the least sum of omega; `counts` layers have each.

    omega: [m, B], infinite where a layer may not have a choice; counts: [B], their sum is m.
    """
    used = np.flatnonzero(counts)
    if len(used) == 1:
        return (int(used[0]),) * int(counts.sum())
    cost = omega[:, used]
    finite = np.isfinite(cost)
    # One forbidden pair costs more than all allowed ones together.
    barred = 1.0 + len(cost) * (float(np.abs(cost[finite]).max()) if finite.any() else 0.0)
    cost = np.where(finite, cost, barred)
    if len(used) == 2:
        chosen = np.ones(len(cost), dtype=np.int64)
        order = np.argsort(cost[:, 0] - cost[:, 1], kind="stable")
        chosen[order[: counts[used[0]]]] = 0
    else:
        chosen = _least_flow(cost, counts[used])
    return tuple(int(b) for b in used[chosen])


def _least_flow(cost: Floats, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[m] columns of least total cost [m, K], `counts` [K] rows having each.

    Row by row, each by the cheapest path of moves to a column that has room (successive shortest
    paths; Ahuja, Magnanti and Orlin, Network Flows, 1993, sec. 9.7).
    """
    kinds, left = len(counts), counts.copy()
    rounding = 1e-12 * float(np.abs(cost).max())
    chosen = np.full(len(cost), -1)
    for row in range(len(cost)):
        # What it costs to move some row of column j to column k, and which one.
        move, which = np.full((kinds, kinds), np.inf), np.zeros((kinds, kinds), dtype=np.int64)
        for j in range(kinds):
            own = np.flatnonzero(chosen == j)
            if len(own):
                change = cost[own] - cost[own, j, None]
                best = change.argmin(axis=0)
                move[j], which[j] = change[best, np.arange(kinds)], own[best]
        way, before = cost[row].copy(), np.full(kinds, -1)
        for _ in range(kinds - 1):
            through = way[:, None] + move
            source = through.argmin(axis=0)
            shorter = through[source, np.arange(kinds)] < way - rounding
            way = np.where(shorter, through[source, np.arange(kinds)], way)
            before = np.where(shorter, source, before)
        end = int(np.argmin(np.where(left > 0, way, np.inf)))
        left[end] -= 1
        while before[end] >= 0:
            source_column = int(before[end])
            chosen[which[source_column, end]] = end
            end = source_column
        chosen[row] = end
    return chosen


def _next_vectors(counts: NDArray[np.int64], base: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add one layer at each choice; keep each vector once."""
    grown = np.concatenate([counts + row for row in np.eye(counts.shape[1], dtype=np.int64)])
    _, once = np.unique(grown @ base, return_index=True)
    return np.asarray(grown[once])


def _previous(
    vectors: NDArray[np.int64], counts: NDArray[np.int64], base: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Index of each vector minus one layer of each choice, -1 where it has none."""
    codes = counts @ base
    order = np.argsort(codes)
    result = np.full(vectors.shape, -1, dtype=np.int64)
    for b in range(vectors.shape[1]):
        has = vectors[:, b] > 0
        wanted = vectors[has] @ base - base[b]
        place = order[np.searchsorted(codes[order], wanted).clip(max=len(order) - 1)]
        result[has, b] = np.where(codes[place] == wanted, place, -1)
    return result


MOST_KEPT = 2_000_000
"""Entries [C, N] that are kept of all pairs together; of one pair always."""


@dataclass(frozen=True, kw_only=True)
class PairColumns:
    """What every column takes on every class at one pair, and where it fits."""

    numbers: PairNumbers
    counts: tuple[Floats, ...]
    """[m - 1] -> [K, B] count vectors of m layers, as floats."""
    begins: NDArray[np.int64]
    """[M] the first column of m = 1, 2, ... layers."""
    prefill_s: Floats
    """[C, N] means over micro-batches, of which P and D are made."""
    decode_s: Floats
    middle: NDArray[np.bool_]
    """[C, N] whether a column fits a stage that is neither first nor last."""
    first: NDArray[np.bool_]
    """[C, N] the first, which is the last, too, if it has every layer."""
    last: NDArray[np.bool_]
    """[C, N] the last, unless it has every layer."""

    def priced(self, prices: Floats, within: NDArray[np.bool_]) -> Floats:
        """[C, N] `prices` [C, B] of a layer summed over columns, infinite but `within`."""
        base = np.full(within.shape, np.inf)
        some = np.logical_or.reduceat(within, self.begins, axis=1)
        for c, m in zip(*(places.tolist() for places in np.nonzero(some)), strict=True):
            # Length by length: how a product of matrices rounds depends on its rows.
            np.matmul(self.counts[m], prices[c], out=base[c, self.of_length(m)])
        base[~within] = np.inf
        return base

    def of_length(self, m: int) -> slice:
        """Return where the columns of m + 1 layers are."""
        later = self.begins[m + 1] if m + 1 < len(self.begins) else self.middle.shape[1]
        return slice(int(self.begins[m]), int(later))

    def least(self, costs: Floats) -> Floats:
        """[C, M] the least of costs [C, N] of each length."""
        return np.asarray(np.minimum.reduceat(costs, self.begins, axis=1))


@dataclass(frozen=True)
class KeptPairs:
    """The table of columns; it makes a pair's columns, or finds those made before."""

    columns: Columns
    _kept: list[PairColumns] = field(default_factory=list)

    @classmethod
    def of(cls, p: Problem) -> KeptPairs | None:
        """Return the table of a problem, None where it would be too large."""
        if cls not in p.of_any_theta:
            columns = columns_if_few(p)
            p.of_any_theta[cls] = None if columns is None else cls(columns)
        return p.of_any_theta[cls]

    def at(self, numbers: PairNumbers) -> PairColumns:
        """Return the columns at the pair that has these numbers."""
        found = next((made for made in self._kept if made.numbers is numbers), None)
        if found is None:
            found = pair_columns(self.columns, numbers)
            while self._kept and (len(self._kept) + 1) * found.middle.size > MOST_KEPT:
                self._kept.pop(0)
            self._kept.append(found)
        return found


def pair_columns(columns: Columns, numbers: PairNumbers) -> PairColumns:
    """Return the columns at a pair; there is one of one layer at least."""
    x, layers = numbers, len(numbers.prefill_s)
    counts = tuple(k.astype(float) for k in columns.counts[1:])
    size, sorts = np.concatenate(columns.num_bytes[1:]), np.concatenate(columns.sorts[1:])
    whole = columns.lengths == layers

    def fits(room: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.asarray(size <= room[:, sorts])

    def times(table: Floats) -> Floats:
        return np.array([np.concatenate([k @ row for k in counts]) for row in table])

    room = x.capacity
    spend(10 * len(counts), 6 * len(room) * len(size))
    return PairColumns(
        numbers=x,
        counts=counts,
        begins=np.searchsorted(columns.lengths, np.arange(1, columns.most + 1)),
        prefill_s=times(x.held_prefill_s[0]),
        decode_s=times(x.held_decode_s[0]),
        middle=fits(room[:, 0, 0]),
        first=np.where(whole, fits(room[:, 1, 1]), fits(room[:, 1, 0])),
        last=fits(room[:, 0, 1]) & ~whole,
    )


RHOS = 10
"""Prices of memory tried beside zero and the relaxation's."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a second of tp and of td costs on each class."""

    prefill: Floats
    """[C] of a second of tp' (mean over micro-batches), above the second itself."""
    decode: Floats
    """[C] of a second of td', above what all decode times cost."""
    every_decode: float
    """What a second of any decode time costs, a hop's too."""


@dataclass(frozen=True, kw_only=True)
class PricedLayers:
    """Prefix sums of the cheapest choices of one class at several prices of memory."""

    rhos: Floats
    """[R]."""
    sums: Floats
    """[R, L+1]."""


def layer_costs(p: Problem, form: Form, weights: Weights, c: int) -> Floats:
    """[L, B] priced cost of a layer on a class, infinite where it may not have a choice."""
    return np.asarray(priced_times(form, weights, c)[None] + p.priced_omega)


def priced_times(form: Form, weights: Weights, c: int) -> Floats:
    """[B] priced time of a layer on a class."""
    x = form.numbers
    prefill = x.prefill_s[0, c] + weights.prefill[c] * x.held_prefill_s[0, c]
    decode = weights.every_decode * x.decode_s[0, c] + weights.decode[c] * x.held_decode_s[0, c]
    return np.asarray(prefill + decode)


def ends_costs(form: Form, weights: Weights) -> Floats:
    """[C, 2] priced time of embedding and head."""
    x = form.numbers
    prefill = x.ends_prefill_s + weights.prefill[:, None] * x.held_ends_prefill_s
    decode = weights.every_decode * x.ends_decode_s
    return np.asarray(prefill + decode + weights.decode[:, None] * x.held_ends_decode_s)


def priced_layers(
    p: Problem, costs: Floats, choices: NDArray[np.bool_], rho: float
) -> PricedLayers:
    """Return prefix sums over some choices, `rho` among the prices of memory."""
    sizes = p.all_layer_bytes[0][choices].astype(float)
    costs = costs[:, choices]
    rhos = np.unique([0.0, rho, *_turning_points(costs, sizes)])
    cheapest = np.array([(costs + r * sizes).min(axis=1) for r in rhos])
    sums = np.concatenate([np.zeros((len(rhos), 1)), np.cumsum(cheapest, axis=1)], axis=1)
    return PricedLayers(rhos=rhos, sums=sums)


def _turning_points(costs: Floats, sizes: Floats) -> Floats:
    """Return prices of memory spread over those at which some layer changes its choice."""
    found: list[Floats] = []
    for b in range(len(sizes)):
        smaller = sizes < sizes[b]
        if smaller.any():
            with np.errstate(invalid="ignore"):
                gain = (costs[:, smaller] - costs[:, b, None]) / (sizes[b] - sizes[smaller])
            found.append(gain[np.isfinite(gain) & (gain > 0)])
    turns = np.concatenate(found) if found else np.zeros(0)
    return np.quantile(turns, np.linspace(0, 1, RHOS)) if len(turns) else turns


def stages_by_price(p: Problem, form: Form, weights: Weights, box: Box, rho: Floats) -> Floats:
    """[C, L+1, L+1] T with memory priced; `rho` [C] are the relaxation's prices."""
    layers, capacity = p.num_layers, form.numbers.capacity
    ends = ends_costs(form, weights)
    table = np.full((len(p.classes), layers + 1, layers + 1), np.inf)
    for c in range(len(p.classes)):
        costs = layer_costs(p, form, weights, c)
        for sort in (DENSE, PACKED, MIXED):
            choices = choices_of(p.choices, sort)
            if capacity[c, 0, 0, sort] == NEVER or not choices.any():
                continue
            made = priced_layers(p, costs, choices, float(rho[c]))
            least = _least_times(p, form, c, choices, box)
            room = capacity[c, :, :, sort]
            found = _ranges(made, room, int(p.all_layer_bytes[0][choices].min()), least)
            table[c] = np.minimum(table[c], found)
        table[c, 0] += ends[c, 0]
        table[c, :, layers] += ends[c, 1]
    return table


def _least_times(p: Problem, form: Form, c: int, choices: NDArray[np.bool_], box: Box) -> int:
    """Return the most layers of which a stage stays within the box at its quickest choices."""
    x, most = form.numbers, p.num_layers
    for table, high in ((x.held_prefill_s, box.p_high), (x.held_decode_s, box.d_high)):
        once = float(table[0, c, choices].min())
        if np.isfinite(high) and once > 0:
            most = min(most, int(high / once * (1 + 1e-9)))
    return most


def _ranges(made: PricedLayers, room: NDArray[np.int64], smallest: int, most: int) -> Floats:
    """[L+1, L+1] the largest bound over the prices, infinite where nothing fits."""
    size = made.sums.shape[1]
    layers = size - 1
    left = np.full((size, size), float(room[0, 0]))
    left[0, :], left[:, layers] = float(room[1, 0]), float(room[0, 1])
    left[0, layers] = float(room[1, 1])
    span = np.arange(size)[None, :] - np.arange(size)[:, None]
    table = np.full((size, size), -np.inf)
    for rho, sums in zip(made.rhos, made.sums, strict=True):
        with np.errstate(invalid="ignore"):
            bound = sums[None, :] - sums[:, None] - rho * left
        np.fmax(table, bound, out=table)
    # Prefix sums beyond a layer that has no choice are infinite, and their differences no numbers.
    closed = np.cumsum(np.isinf(np.diff(made.sums[0], prepend=0.0)))
    table[closed[None, :] > closed[:, None]] = np.inf
    table[(span < 1) | (span * smallest > left) | (span > most)] = np.inf
    return table


def stages_by_table(p: Problem, form: Form, weights: Weights, box: Box, kept: KeptPairs) -> Floats:
    """[C, L+1, L+1] T from every count vector."""
    layers, columns = p.num_layers, kept.columns
    table = np.full((len(p.classes), layers + 1, layers + 1), np.inf)
    if not columns.most:
        return table
    pair, ends = kept.at(form.numbers), ends_costs(form, weights)
    omega = columns.priced_omega(p.theta)
    inside = (pair.prefill_s <= box.p_high) & (pair.decode_s <= box.d_high)
    prices = np.array([priced_times(form, weights, c) for c in range(len(p.classes))])
    base = pair.priced(prices, inside & (pair.middle | pair.first | pair.last))
    middle = np.where(pair.middle, base, np.inf)
    every_start = all(columns.alike) and len(columns.least[1]) == layers
    if every_start:  # a length takes the same wherever it begins
        least = pair.least(np.concatenate([rows[0] for rows in omega[1:]]) + middle)
        least = np.pad(least, ((0, 0), (0, layers - columns.most)), constant_values=np.inf)
        starts, stops = np.triu_indices(layers + 1, 1)
        table[:, starts, stops] = least[:, stops - starts - 1]
    some = np.zeros((0, 2)) if every_start else np.argwhere(np.isfinite(pair.least(middle)))
    for c, m in some:
        costs, here = omega[m + 1], pair.of_length(int(m))
        starts = np.arange(len(columns.least[m + 1]))
        table[c, starts, starts + m + 1] = (costs + middle[c, here]).min(axis=1)
    first = np.concatenate([of_length[0] for of_length in omega[1:]])
    table[:, 0, 1 : columns.most + 1] = pair.least(first + np.where(pair.first, base, np.inf))
    table[:, 0] += ends[:, 0, None]
    table[:, 0, layers] += ends[:, 1]
    for_last = [of_length[-1] for of_length in omega[1:]]
    if len(columns.least[1]) > 1:
        last = np.concatenate(for_last)
        found = pair.least(last + np.where(pair.last, base, np.inf)) + ends[:, 1, None]
        most = min(columns.most, layers - 1)
        table[:, layers - 1 - np.arange(most), layers] = found[:, :most]
    return table


def column_costs(
    form: Form, weights: Weights, box: Box, counts: NDArray[np.int64], c: int
) -> Floats:
    """[K] priced time of count vectors on a class, infinite beyond the box."""
    x = form.numbers
    tp, td = counts @ x.held_prefill_s[0, c], counts @ x.held_decode_s[0, c]
    inside = (tp <= box.p_high) & (td <= box.d_high)
    return np.where(inside, counts @ priced_times(form, weights, c), np.inf)
