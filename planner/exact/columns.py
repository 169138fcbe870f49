"""Every way to fill a stage: how many layers get each choice, and the least omega that costs.

Layers take equal time and memory, so a stage of m layers starting at layer a is described by counts
(how many layers get each choice) and W[a, counts], the least sum of omega over assignments with
these counts. W is exact for any omega:

    W_m[a, k] = min_b  W_{m-1}[a, k - e_b] + omega[a + m - 1, b]

Symbols: k count vectors of length B with sum m, sorted by bytes, so that what fits a device is a
prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.problem import Floats

MAX_ENTRIES = 8_000_000
"""Largest table of W (64 MB); beyond it long stages are left out (planner/exact/large.py)."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Count vectors and least omegas for m = 0..len(counts)-1 layers."""

    counts: tuple[NDArray[np.int64], ...]
    """[m] -> [K, B]."""
    num_bytes: tuple[NDArray[np.int64], ...]
    """[m] -> [K], ascending."""
    least: tuple[Floats, ...]
    """[m] -> [L - m + 1, K] least sum of omega of layers [a, a + m), infinite if none may be so."""
    previous: tuple[NDArray[np.int64], ...]
    """[m] -> [K, B] index of k - e_b among the vectors of m - 1, or -1."""
    omega: Floats

    @property
    def most(self) -> int:
        """Largest number of layers of a stage."""
        return len(self.counts) - 1

    def choices(self, start: int, m: int, column: int) -> tuple[int, ...]:
        """Return an assignment of layers [start, start + m) that attains the least omega."""
        found: list[int] = []
        for size in range(m, 0, -1):
            options = self.previous[size][column]
            layer = start + size - 1
            costs = [
                self.least[size - 1][start, k] + self.omega[layer, b] if k >= 0 else np.inf
                for b, k in enumerate(options)
            ]
            b = int(np.argmin(costs))
            found.append(b)
            column = int(options[b])
        return tuple(reversed(found))


def priced(omega: Floats, theta: float) -> Floats:
    """Return theta times omega; what is infinite stays so at a theta of zero."""
    return theta * omega if theta > 0 else np.where(np.isinf(omega), omega, 0.0)


class TooManyColumns(Exception):
    """The table would be too large; group layers or use the integer program."""


def make_columns(
    omega: Floats,
    layer_bytes: NDArray[np.int64],
    capacity: int,
    *,
    only_whole: bool = False,
    longest: int | None = None,
) -> Columns:
    """Return the table for stages of at most `capacity` bytes.

    `omega` is infinite where a layer may not have a choice. `only_whole`: one stage has all
    layers. `longest`: leave out stages of more layers.
    """
    num_layers, num_choices = omega.shape
    counts = [np.zeros((1, num_choices), dtype=np.int64)]
    sizes = [np.zeros(1, dtype=np.int64)]
    least: list[Floats] = [np.zeros((1 if only_whole else num_layers + 1, 1))]
    previous = [np.full((1, num_choices), -1, dtype=np.int64)]
    base = np.int64(num_layers + 1) ** np.arange(num_choices, dtype=np.int64)
    entries = 0
    for m in range(1, min(num_layers, longest or num_layers) + 1):
        vectors = _next_vectors(counts[-1], sizes[-1], layer_bytes, capacity, base)
        if not len(vectors):
            break
        starts = 1 if only_whole else num_layers - m + 1
        entries += len(vectors) * starts
        if entries > MAX_ENTRIES:
            raise TooManyColumns
        back = _previous(vectors, counts[-1], base)
        table = np.full((starts, len(vectors)), np.inf)
        for b in range(num_choices):
            has = back[:, b] >= 0
            above = least[-1][:starts, back[has, b]]
            np.minimum(table[:, has], above + omega[m - 1 : m - 1 + starts, b, None], out=above)
            table[:, has] = above
        some = np.isfinite(table).any(axis=0)
        vectors, back, table = vectors[some], back[some], table[:, some]
        if not len(vectors):
            break
        counts.append(vectors)
        sizes.append(vectors @ layer_bytes)
        least.append(table)
        previous.append(back)
    return Columns(
        counts=tuple(counts),
        num_bytes=tuple(sizes),
        least=tuple(least),
        previous=tuple(previous),
        omega=omega,
    )


def _next_vectors(
    counts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    layer_bytes: NDArray[np.int64],
    capacity: int,
    base: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Add one layer at each choice; keep what fits, once each, by bytes."""
    grown = []
    for b in range(counts.shape[1]):
        fits = sizes + layer_bytes[b] <= capacity
        more = counts[fits].copy()
        more[:, b] += 1
        grown.append(more)
    vectors = np.concatenate(grown)
    if not len(vectors):
        return vectors
    _, once = np.unique(vectors @ base, return_index=True)
    vectors = vectors[once]
    return vectors[np.argsort(vectors @ layer_bytes, kind="stable")]


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
