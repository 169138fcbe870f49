"""The table of columns at one pair of micro-batch sizes: times of columns, and which fit where.

Parts of a search and their kappas ask of the same pair again and again, so this is made once a pair
and kept for those asked of last. N: all count vectors of one layer and more, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.exact.bounds.columns import Columns, columns_if_few
from llmpq.planner.problem.numbers import PairNumbers
from llmpq.planner.problem.problem import Floats, Problem

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
    """[C, N] as the slowest stage goes by."""
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
        columns = columns_if_few(p)
        return None if columns is None else cls(columns)

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
