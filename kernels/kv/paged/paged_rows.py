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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps
from llmpq.sizes.kv_format import BLOCK_TOKENS

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
    slots: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    num_rows: int,
    num_places: int,
    tile_queries: int,
    tile_keys: int,
    window: int = 0,
) -> list[list[int]]:
    """Return the rows' table, with a row of padding behind them where tokens are fewer than places.

    `tile_queries`, `tile_keys`, `window`: as `PagedPlan` says.
    """

    def tiles_of(position: int) -> tuple[int, int]:
        own = -(-(position + 1) // tile_keys)
        return own, own - max(position + 1 - (window or position + 1), 0) // tile_keys

    return summed_rows(
        *(slots, starts, counts, tiles_of),
        num_rows=num_rows,
        num_places=num_places,
        tile_queries=tile_queries,
    )


def summed_rows(
    slots: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    tiles_of: Callable[[int], tuple[int, int]],
    *,
    num_rows: int,
    num_places: int,
    tile_queries: int,
) -> list[list[int]]:
    """Return the rows' table; `tiles_of`: tiles of two sorts that a query at a position reads."""
    used, tokens = len(slots), sum(counts)
    extra = num_rows - used
    if tokens > num_places or extra < (tokens < num_places):
        raise ValueError(
            f"{used} rows of {tokens} tokens do not go into a step of {num_rows} rows and "
            f"{num_places} places; give it more of either"
        )
    firsts, query_tiles, key_tiles, other_tiles = [], [], [], []
    place = queries = keys = others = 0
    for start, count in zip(starts, counts, strict=True):
        firsts.append(place)
        place += count
        if count > 1:
            queries += -(-count // tile_queries)
        else:
            own, other = tiles_of(start)
            keys += own
            others += other
        query_tiles.append(queries)
        key_tiles.append(keys)
        other_tiles.append(others)
    return [
        [*slots, *[-1] * extra],
        [*starts, *[0] * extra],
        [*counts, *[num_places - place, *[0] * (extra - 1)][:extra]],
        [*firsts, *[place] * extra],
        [*query_tiles, *[queries] * extra],
        [*key_tiles, *[keys] * extra],
        [*other_tiles, *[others] * extra],
    ]


def split_work(table: Sequence[Sequence[int]], programs: int, *, windowed: bool) -> list[int]:
    """Return what each program of attention takes of a rows' table, and where it begins.

    The host knows it, so that no program has to find its rows before it can ask for their keys.
    """
    slots, starts = table[0], table[1]
    return [
        number
        for sums in (table[5], table[6])[: 1 + windowed]
        for number in _split_line(sums, slots, starts, programs)
    ]


def _split_line(
    sums: Sequence[int], slots: Sequence[int], starts: Sequence[int], programs: int
) -> list[int]:
    """Deal out a line of tiles of which row r has those before sums[r]."""
    total, share, row = sums[-1], share_of(sums, programs), 0
    found: list[int] = []
    for first in range(0, total, share):
        last = min(total, first + share)
        while sums[row] <= first:
            row += 1
        row_last = row
        while sums[row_last] < last:
            row_last += 1
        begin = sums[row - 1] if row else 0
        found += [row, row_last, last, share, begin, sums[row], slots[row], starts[row] + 1]
    return found + [0, -1, 0, share, 0, 0, 0, 1] * (programs - len(found) // WORK_SPLIT)


def share_of(sums: Sequence[int], programs: int) -> int:
    """Return the tiles of a program.

    Of rows of one length a program takes whole ones, or a row is dealt out evenly, if that makes
    its share no more than a sixteenth longer.
    """
    total = sums[-1]
    share = max(1, -(-total // programs))
    tiles = [end - begin for begin, end in zip((0, *sums), sums, strict=False) if end > begin]
    longest = max(tiles, default=0)
    if longest == 0 or longest * len(tiles) != total:
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
