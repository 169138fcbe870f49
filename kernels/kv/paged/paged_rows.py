"""The rows of a step over paged keys and values, as kernels read them, and each token's place.

    rows [7, R] int32, on the device   slot, start, count, first: row r brings `count` tokens from
                                       position `start` of the request in `slot`, at `first` on of
                                       the step's T places; then running sums, this row's share
                                       included: query tiles of rows of several tokens (chunks), key
                                       tiles of rows of one (decoding), those of them that begin in
                                       the widest window or reach into it
    spread                             rows -> of every token its position, its slot, and its place
                                       in the pool (block * PAGE + token of the block)

    work_split [P, 8] int32            for each of the P programs of attention to rows of one token:
                                       its first and last row, where its share of the line of key
                                       tiles ends and how long a share is, where its first row's
                                       tiles begin and end, that row's slot and its tokens; the same
                                       again for layers with a window, if there are any

A launch has as many programs whatever the rows are: a program finds its row by the running sums, so
a captured step serves any mix. A row of slot -1 is padding: its tokens have place -1; a row without
tokens is padding, too.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps
from llmpq.sizes.kv_format import BLOCK_TOKENS

Ints = NDArray[np.int64]
Rows = Sequence[int] | Ints
FIELDS = 7
WORK_SPLIT = 8
"""Numbers of a program."""
SPREAD_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class TokenPlaces:
    """What `spread` makes of a step's rows; T tokens, R rows."""

    positions_T: Tensor
    slots_T: Tensor
    """The slot of a token's request; `padding_slot` for padding."""
    places_T: Tensor
    """Where in the pool a token goes; -1 for padding."""
    slots_R: Tensor
    last_R: Tensor
    """Where in the step a row's last token is; 0 for padding."""


def row_table(
    slots: Rows,
    starts: Rows,
    counts: Rows,
    *,
    num_rows: int,
    num_places: int,
    tile_queries: int,
    tile_keys: int,
    window: int = 0,
) -> Ints:
    """Return the rows' table, with a row of padding behind them where tokens are fewer than places.

    `tile_queries`, `tile_keys`, `window`: as `PagedPlan` says.
    """

    def tiles_of(positions_R: Ints) -> tuple[Ints, Ints]:
        ends_R = positions_R + 1
        own_R = -(-ends_R // tile_keys)
        if not window:
            return own_R, own_R
        return own_R, own_R - np.maximum(ends_R - window, 0) // tile_keys

    return summed_rows(
        *(slots, starts, counts, tiles_of),
        num_rows=num_rows,
        num_places=num_places,
        tile_queries=tile_queries,
    )


def summed_rows(
    slots: Rows,
    starts: Rows,
    counts: Rows,
    tiles_of: Callable[[Ints], tuple[Ints, Ints]],
    *,
    num_rows: int,
    num_places: int,
    tile_queries: int,
) -> Ints:
    """Return the rows' table [7, num_rows].

    `tiles_of`: tiles of two sorts that queries at positions read.
    """
    used, counts_R = len(slots), np.asarray(counts, dtype=np.int64)
    ends_R = counts_R.cumsum()
    tokens = int(ends_R[-1]) if used else 0
    if tokens > num_places or num_rows - used < (tokens < num_places):
        raise ValueError(
            f"{used} rows of {tokens} tokens do not go into a step of {num_rows} rows and "
            f"{num_places} places; give it more of either"
        )
    table = np.zeros((FIELDS, num_rows), dtype=np.int64)
    if used < num_rows:
        table[0, used:], table[3, used:] = -1, tokens
        table[2, used] = num_places - tokens
    table[0, :used], table[1, :used], table[2, :used] = slots, starts, counts_R
    table[3, :used] = ends_R - counts_R
    table[5, :used], table[6, :used] = tiles_of(table[1, :used])
    if tokens > used:  # else every row decodes
        chunks_R = (counts_R > 1).nonzero()[0]
        table[4, chunks_R] = -(-counts_R[chunks_R] // tile_queries)
        table[5:, chunks_R] = 0
    table[4:].cumsum(axis=1, out=table[4:])
    return table


def split_work(table: Ints, programs: int, *, windowed: bool) -> Ints:
    """Return what each program of attention takes of a rows' table, and where it begins; flat.

    The host knows it, so that no program has to find its rows before it can ask for their keys.
    """
    whole = _split_line(table[5], table, programs)
    if not windowed:
        return whole
    return np.concatenate((whole, _split_line(table[6], table, programs)))


def _split_line(sums_R: Ints, table: Ints, programs: int) -> Ints:
    """Deal out a line of tiles of which row r has those before sums[r]."""
    dealt, row_P = _dealt(np.asarray(sums_R, dtype=np.int64).tobytes(), programs)
    found = dealt.copy()
    used = found[: len(row_P)]
    used[:, 6], used[:, 7] = table[0, row_P], table[1, row_P] + 1
    return found.ravel()


@functools.lru_cache(maxsize=64)
def _dealt(sums: bytes, programs: int) -> tuple[Ints, Ints]:
    """Return what each program takes of a line of tiles, but for the slot and tokens of its row.

    And the first row of each that takes some. Few rows have the same tiles for many steps.
    """
    sums_R = np.frombuffer(sums, dtype=np.int64)
    total, share = int(sums_R[-1]), share_of(sums_R, programs)
    first_P = np.arange(0, total, share)
    last_P = np.minimum(first_P + share, total)
    row_P = sums_R.searchsorted(first_P, "right")
    found = np.empty((programs, WORK_SPLIT), dtype=np.int64)
    found[:] = (0, -1, 0, share, 0, 0, 0, 1)
    used = found[: len(first_P)]
    used[:, 0], used[:, 1] = row_P, sums_R.searchsorted(last_P, "left")
    begins_R = np.zeros(len(sums_R), dtype=np.int64)
    begins_R[1:] = sums_R[:-1]
    used[:, 2], used[:, 4], used[:, 5] = last_P, begins_R[row_P], sums_R[row_P]
    return found, row_P


def share_of(sums_R: Ints, programs: int) -> int:
    """Return the tiles of a program.

    Of rows of one length a program takes whole ones, or a row is dealt out evenly, if that makes
    its share no more than a sixteenth longer.
    """
    tiles_R = sums_R.copy()
    tiles_R[1:] -= sums_R[:-1]
    total, longest = int(sums_R[-1]), int(tiles_R.max())
    share = max(1, -(-total // programs))
    if longest == 0 or longest * np.count_nonzero(tiles_R) != total:
        return share
    parts = longest // share
    even = -(-longest // parts) if parts else -(-share // longest) * longest
    return even if even * 16 <= share * 17 else share


@triton.jit(do_not_specialize=["num_rows", "columns", "padding_slot"])
def spread_kernel(
    rows, table, positions, slots, places, row_slots, lasts, num_rows, columns, padding_slot,
    PAGE: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows + row)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    first = tl.load(rows + 3 * num_rows + row)
    known = slot >= 0
    owner = tl.where(known, slot, padding_slot).to(tl.int64)
    tl.store(row_slots + row, owner)
    tl.store(lasts + row, tl.where(known, first + count - 1, 0).to(tl.int64))
    for at in range(0, count, STEP):
        i = at + tl.arange(0, STEP)
        live = i < count
        there = i < tl.where(known, count, 0)
        position = tl.where(known, start + i, 0)
        block = tl.load(table + slot * columns + position // PAGE, mask=there, other=0)
        place = block.to(tl.int64) * PAGE + position % PAGE
        tl.store(positions + first + i, position.to(tl.int64), mask=live)
        tl.store(slots + first + i, tl.zeros_like(place) + owner, mask=live)
        tl.store(places + first + i, tl.where(known, place, -1), mask=live)


def spread(rows_FR: Tensor, table_SM: Tensor, num_places: int, *, padding_slot: int) -> TokenPlaces:
    """Return where each of a step's tokens stands; `padding_slot`: the slot of padding."""
    num_rows, device = rows_FR.shape[1], rows_FR.device
    positions, slots, places = torch.empty((3, num_places), dtype=torch.long, device=device)
    row_slots, lasts = torch.empty((2, num_rows), dtype=torch.long, device=device)
    pdl = overlaps(device)
    spread_kernel[(num_rows,)](
        *(rows_FR, table_SM, positions, slots, places, row_slots, lasts),
        *(num_rows, table_SM.shape[1], padding_slot),
        PAGE=BLOCK_TOKENS,
        STEP=SPREAD_TOKENS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return TokenPlaces(
        positions_T=positions, slots_T=slots, places_T=places, slots_R=row_slots, last_R=lasts
    )
