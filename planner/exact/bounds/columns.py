"""The whole table of ways to fill a stage: how many layers get each choice, and the least omega.

Layers take equal time and memory, so a stage of m layers starting at layer a is described by counts
(how many layers get each choice) and W[a, counts], the least sum of omega over assignments with
these counts. W is exact for any omega:

    W_m[a, k] = min_b  W_{m-1}[a, k - e_b] + omega[a + m - 1, b]

Long stages of many choices have millions of count vectors: past MAX_VECTORS there is no table, and
the search makes the few vectors that it needs (planner/exact/column_generation.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.costs.stage_memory import sort_of
from llmpq.planner.problem.problem import Floats, Problem

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
    """[m] -> [K] sort of weights (planner/costs/stage_memory.py)."""
    least: tuple[Floats, ...]
    """[m] -> [L - m + 1, K] least sum of omega of layers [a, a + m), infinite if none may be so."""
    _priced: dict[float, tuple[Floats, ...]] = field(default_factory=dict, compare=False)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[N] layers of each of all count vectors of one layer and more, side by side."""
        sizes = [len(counts) for counts in self.counts[1:]]
        return np.repeat(np.arange(1, self.most + 1), sizes)

    def priced_omega(self, theta: float) -> tuple[Floats, ...]:
        """[m] -> [L - m + 1, K] theta times the least omegas, kept for the theta asked of last."""
        if theta not in self._priced:
            self._priced.clear()
            self._priced[theta] = tuple(priced(omega, theta) for omega in self.least)
        return self._priced[theta]

    @property
    def most(self) -> int:
        """Largest number of layers of a stage."""
        return len(self.counts) - 1

    def fitting(self, m: int, room: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[K] which vectors of m layers fit, given the bytes left for each sort."""
        return np.asarray(self.num_bytes[m] <= room[self.sorts[m]])


def make_columns(p: Problem, *, longest: int | None = None) -> Columns:
    """Return the table for the roomiest stage; `longest` leaves out stages of more layers."""
    num_layers, num_choices = p.num_layers, len(p.choices)
    only_whole = p.max_stages == 1
    omega, layer_bytes = p.open_omega, p.all_layer_bytes[0]
    # Larger micro-batches leave less room.
    room = p.capacity(p.prefill_sizes[0], p.decode_sizes[0]).max(axis=(0, 1, 2))
    counts = [np.zeros((1, num_choices), dtype=np.int64)]
    least: list[Floats] = [np.zeros((1 if only_whole else num_layers + 1, 1))]
    base = np.int64(num_layers + 1) ** np.arange(num_choices, dtype=np.int64)
    vectors_made = entries = 0
    for m in range(1, min(num_layers, longest or num_layers) + 1):
        vectors = _next_vectors(counts[-1], base)
        vectors = vectors[vectors @ layer_bytes <= room[sort_of(p.packed, vectors)]]
        starts = 1 if only_whole else num_layers - m + 1
        vectors_made += len(vectors)
        entries += len(vectors) * starts
        if entries > MAX_ENTRIES or vectors_made > MAX_VECTORS:
            raise TooManyColumns
        back = _previous(vectors, counts[-1], base)
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
