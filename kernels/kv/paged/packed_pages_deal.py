"""How the packed tiles and ring steps of a decode step's rows are dealt to programs.

    line     the rows' tiles stand one behind the other; every program takes an equal run of them,
             which may end in the middle of one row and go on in the next: a part of each
    apart    every program has a part of one row only; a row's parts are equal

A part costs PART_START tiles before its first (finding the row, loading queries, filling the
pipeline, writing the output): few long rows go best in a line, many short ones apart. Ring steps
are dealt in the same way, to programs without packed tiles if enough are left, else to the last
programs.

    entry    [row, last row, begin, stop, part, slot, position, place] of one program: from step
             `begin` of its first row, through whole rows, to step `stop` of its last row; its first
             part's index; its first row's slot, position and place in the step. A program without
             work has -1 as its last row
    parts    are counted in the order of rows, so those of a row follow each other
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ENTRY = 8
"""Values of a program's entry."""
PART_START = 3
"""Tiles whose time a part takes before its first (launch_plan.START_UP)."""
RING_SHARES = (1, 2, 3, 5)
"""Steps of a ring that a program may take: a ring has at most five."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """Rows' tiles cut into parts, the parts dealt to programs."""

    cost: int
    """Tiles of the program that has most, its parts' starts included."""
    row: Ints
    row_last: Ints
    begin: Ints
    stop: Ints
    part: Ints
    ends: list[int]
    """Running sums over rows of their parts."""

    @property
    def programs(self) -> int:
        """Programs that have something."""
        return len(self.row)


@dataclass(frozen=True)
class Deal:
    """A step's packed tiles and ring steps, dealt."""

    packed: Cut
    ring: Cut

    def entries(self, programs: int, rows: Sequence[Sequence[int]]) -> Ints:
        """Return the entries [2, programs, ENTRY] of packed tiles and of rings, flat.

        `rows`: each row's slot, its position and its place. An array: thousands of numbers a step.
        """
        found = np.zeros((2, programs, ENTRY), dtype=np.int64)
        found[:, :, 1] = -1
        # Rings begin behind the packed tiles' programs, or end with the last program.
        ring_first = min(self.packed.programs, programs - self.ring.programs)
        for entry, cut in ((found[0], self.packed), (found[1, ring_first:], self.ring)):
            used = cut.programs
            own = (cut.row, cut.row_last, cut.begin, cut.stop, cut.part)
            own += tuple(np.asarray(of_row)[cut.row] for of_row in rows)
            for field, values in enumerate(own):
                entry[:used, field] = values
        return found.ravel()


def _line(tiles: Ints, programs: int) -> Cut:
    """Cut a line into equal runs."""
    ends = np.cumsum(tiles)
    total = int(ends[-1])
    share = -(-total // programs)
    first = np.arange(0, total, share)
    last = np.minimum(first + share, total)
    begins = ends - tiles
    row, row_last = np.searchsorted(ends, first, "right"), np.searchsorted(ends, last, "left")
    filled = np.cumsum(tiles > 0)
    parts = filled[row_last] - filled[row] + 1
    pieces = np.where(tiles > 0, (ends - 1) // share - begins // share + 1, 0)
    return Cut(
        cost=int((last - first + PART_START * parts).max()),
        row=row,
        row_last=row_last,
        begin=first - begins[row],
        stop=last - begins[row_last],
        part=np.cumsum(parts) - parts,
        ends=np.cumsum(pieces).tolist(),
    )


def _apart(tiles: Ints, share: int) -> Cut:
    """Cut every row into parts of at most `share` tiles."""
    pieces = -(-tiles // share)
    row = np.repeat(np.arange(len(tiles)), pieces)
    ends = np.cumsum(pieces)
    part = np.arange(len(row))
    index = part - (ends - pieces)[row]
    begin, stop = tiles[row] * index // pieces[row], tiles[row] * (index + 1) // pieces[row]
    cost = int((stop - begin).max()) + PART_START
    return Cut(cost, row, row, begin, stop, part, ends.tolist())


def _least_share(tiles: Ints, programs: int) -> int:
    """Return the least share for which all rows' parts are at most `programs`; 0 if none is."""
    low, high = -(-int(tiles.sum()) // programs), int(tiles.max())
    if np.count_nonzero(tiles) > programs:
        return 0
    while low < high:
        middle = (low + high) // 2
        if int((-(-tiles // middle)).sum()) <= programs:
            high = middle
        else:
            low = middle + 1
    return low


def _cut(tiles: Ints, programs: int) -> Cut:
    """Cut rows in the way whose dearest program has least."""
    if not tiles.any():
        none = np.zeros(0, dtype=np.int64)
        return Cut(0, none, none, none, none, none, [0] * len(tiles))
    line, share = _line(tiles, programs), _least_share(tiles, programs)
    apart = _apart(tiles, share) if share else line
    return min(apart, line, key=lambda cut: cut.cost)


@lru_cache(maxsize=16)
def deal(packed_R: tuple[int, ...], rings_R: tuple[int, ...], programs: int) -> Deal:
    """Deal rows' packed tiles and ring steps to `programs` programs."""
    packed, rings = np.asarray(packed_R, dtype=np.int64), np.asarray(rings_R, dtype=np.int64)
    every = Deal(_cut(packed, programs), _cut(rings, programs))
    best, best_cost = every, every.packed.cost + every.ring.cost
    if not packed.any() or not rings.any():
        return every
    for share in RING_SHARES:
        ring = _apart(rings, share)
        left = programs - ring.programs
        if left <= 0:
            continue
        own = Deal(_cut(packed, left), ring)
        cost = max(own.packed.cost, ring.cost)
        if cost < best_cost:
            best, best_cost = own, cost
    return best
