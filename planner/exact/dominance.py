"""What another one is at least as good as, and can be left out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.problem.problem import Floats

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
