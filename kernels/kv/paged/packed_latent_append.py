"""Bring a step's rows of latents (MLA) into a GPU's pool of packed blocks.

    append_ring     rows of one token: the ring
    make_scales     of every block that the rows complete; what is behind it, for who finds it
    make_words      ... and its words, one program for WORDS of keys' or of values'
    keep_rings      rows of several tokens, behind their attention: their newest

A latent is key and value at once, but each is rounded on a grid of its own (kv_block.py), and both
rings are kept. Every word gathers the channels and tokens that the drawing gives it
(formats/kv_block.py), one load each.

D channels, C padded ones, T places of a step, R rows.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.pack import _codes, _gained, _grid
from llmpq.kernels.kv.low_bit.ring_attend import BLOCK, HOLDBACK, RING
from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows
from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS, TAIL_TOKENS

CHANNELS = tl.constexpr(64)
"""Channels, or tokens, whose scales a program makes at once."""
WORDS = tl.constexpr(512)
"""Words that a program makes."""


@triton.jit
def _rounded(x, scale, zero, inside, BITS: tl.constexpr):
    """Codes against a stored scale without its gain; 0 of padding."""
    step = scale.to(tl.float32)
    one = tl.full(step.shape, 1.0, tl.float32)
    inverse = tl.where(step > 0, tl.div_rn(one, tl.maximum(step, 1e-30)), 0.0)
    return tl.where(inside, _codes(x, zero, inverse, BITS), 0)


@triton.jit
def _ungained(scale, octet, BITS: tl.constexpr):
    """A stored scale without its gain: a power of two, so nothing is rounded."""
    plane = octet % (8 // BITS)
    return scale.to(tl.float32) * tl.exp2((BITS - 8 + plane * BITS).to(tl.float32))


@triton.jit
def recent(ring, new, pos, start, stride, channel, live, D: tl.constexpr):
    """Channels of tokens, those from `start` on among the step's new ones."""
    inside = live & (channel < D)
    old = tl.load(ring + pos % RING * D + channel, mask=inside & (pos < start), other=0.0)
    late = tl.load(new + (pos - start) * stride + channel, mask=inside & (pos >= start), other=0.0)
    return tl.where(pos < start, old, late)


@triton.jit(do_not_specialize=["num_rows"])
def append_ring(
    new, k_ring, v_ring, rows, num_rows, stride, D: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """The new token of a row of one."""
    row = tl.program_id(0)
    slot = tl.load(rows + row).to(tl.int64)
    count = tl.load(rows + 2 * num_rows + row)
    if (slot >= 0) & (count == 1):
        start = tl.load(rows + num_rows + row)
        place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
        d = tl.arange(0, PADDED)
        x = tl.load(new + place * stride + d, mask=d < D, other=0.0)
        to = slot * (RING * D) + start % RING * D + d
        tl.store(k_ring + to, x, mask=d < D)
        tl.store(v_ring + to, x, mask=d < D)


@triton.jit
def _completed(rows, table, index, num_rows, columns, ROWS: tl.constexpr):
    """Whether rows complete an index-th block; slot, page, number, its row's start and place."""
    r = tl.arange(0, ROWS)
    used = r < num_rows
    owner = tl.load(rows + r, mask=used, other=-1)
    starts = tl.load(rows + num_rows + r, mask=used, other=0)
    counts = tl.load(rows + 2 * num_rows + r, mask=used, other=0)
    firsts = tl.maximum((starts - HOLDBACK + BLOCK - 1) // BLOCK, 1) - 1
    lines = tl.maximum(starts + counts - 1 - HOLDBACK, 0) // BLOCK
    done = tl.where((owner >= 0) & (counts > 0), tl.maximum(lines - firsts, 0), 0)
    ends = tl.cumsum(done, 0)
    live = index < tl.sum(done, 0)
    own = tl.minimum(tl.sum((ends <= index).to(tl.int32), 0), num_rows - 1)
    before = tl.max(tl.where(r < own, ends, 0), 0)
    block = tl.where(live, tl.sum(tl.where(r == own, firsts, 0), 0) + index - before, 0)
    slot = tl.maximum(tl.load(rows + own), 0).to(tl.int64)
    page = tl.load(table + slot * columns + block).to(tl.int64)
    start = tl.load(rows + num_rows + own)
    place = tl.load(rows + 3 * num_rows + own).to(tl.int64)
    return live, slot, page, block, start, place


@triton.jit(do_not_specialize=["num_rows", "columns"])
def make_scales(
    new, k_ring, v_ring, k_params, v_params, k_behind, v_behind, rows, table, num_rows, columns,
    stride, D: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of a completed block, and the tokens behind it."""
    live, slot, page, block, start, place = _completed(
        rows, table, tl.program_id(0), num_rows, columns, ROWS
    )
    if live:
        new += place * stride
        k_ring += slot * (RING * D)
        v_ring += slot * (RING * D)
        d = tl.arange(0, PADDED)[None, :]
        for first in range(0, BLOCK, 16):
            token = first + tl.arange(0, 16)
            pos = (block * BLOCK + token)[:, None]
            x = recent(v_ring, new, pos, start, stride, d, True, D).to(tl.float32)
            low = tl.min(tl.where(d < D, x, float("inf")), 1)
            high = tl.max(tl.where(d < D, x, float("-inf")), 1)
            scale, zero, _ = _grid(low, high, BITS)
            scale = _gained(scale, token % 64 // 16 * 2 + token % 2, BITS)
            to = token // 64 * 64 + token % 16 // 2 * 8 + token % 64 // 16 * 2 + token % 2
            tl.store(v_params + page * (2 * BLOCK) + to, scale)
            tl.store(v_params + page * (2 * BLOCK) + BLOCK + to, zero)
        pos = (block * BLOCK + tl.arange(0, BLOCK))[:, None]
        for first in range(0, C, CHANNELS):
            c = first + tl.arange(0, CHANNELS)
            x = recent(k_ring, new, pos, start, stride, c[None, :], True, D).to(tl.float32)
            scale, zero, _ = _grid(tl.min(x, 0), tl.max(x, 0), BITS)
            to = k_params + page * (2 * C) + c
            tl.store(to, _gained(scale, c % (C // 4) // 2, BITS), mask=c < C)
            tl.store(to + C, zero, mask=c < C)
        if TAIL > 0:
            i = tl.arange(0, 32)[:, None]
            x = recent(k_ring, new, (block + 1) * BLOCK + i, start, stride, d, i < TAIL, D)
            to = (page * TAIL + i) * D + d
            tl.store(k_behind + to, x, mask=(i < TAIL) & (d < D))
            tl.store(v_behind + to, x, mask=(i < TAIL) & (d < D))


@triton.jit(do_not_specialize=["num_rows", "columns"])
def make_words(
    new, k_ring, v_ring, k_words, v_words, k_params, v_params, rows, table, num_rows, columns,
    stride, D: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """WORDS words of the keys (or, from program PIECES on, the values) of a completed block."""
    I: tl.constexpr = 8 // BITS  # noqa: E741
    live_block, slot, page, block, start, place = _completed(
        rows, table, tl.program_id(0), num_rows, columns, ROWS
    )
    piece = tl.program_id(1)
    if live_block:
        new += place * stride
        word = piece % PIECES * WORDS + tl.arange(0, WORDS)
        live = word < 4 * C * BITS
        n = word // (2 * C * BITS)
        inner = word % (2 * C * BITS)
        lane = inner % 128 // 4
        number = inner // 128 * 4 + inner % 4
        g = lane // 4
        t = lane % 4
        made = tl.zeros([WORDS], tl.int32)
        if piece < PIECES:
            m = number // (C * BITS // 64)
            o = number % (C * BITS // 64)
            for j in tl.static_range(4 * I):  # h r i
                h, r, i = j // (2 * I), j // I % 2, j % I
                pos = block * BLOCK + 64 * n + 16 * m + 2 * g + r
                c = t * (C // 4) + 2 * (o * I + i) + h
                x = recent(k_ring + slot * (RING * D), new, pos, start, stride, c, live, D)
                params = k_params + page * (2 * C) + c
                zero = tl.load(params + C, mask=live, other=0.0)
                scale = _ungained(tl.load(params, mask=live, other=0.0), o * I + i, BITS)
                code = _rounded(x.to(tl.float32), scale, zero, live & (c < D), BITS)
                made |= code << (8 * (2 * h + r) + i * BITS)
            tl.store(k_words + page * (4 * C * BITS) + word, made, mask=live)
        else:
            m = number // BITS
            o = number % BITS
            for j in tl.static_range(4 * I):
                h, r, i = j // (2 * I), j // I % 2, j % I
                octet = o * I + i
                token = 64 * n + 16 * (octet // 2) + 4 * t + 2 * h + octet % 2
                c = g * (C // 8) + 2 * m + r
                pos = block * BLOCK + token
                x = recent(v_ring + slot * (RING * D), new, pos, start, stride, c, live, D)
                order = token // 64 * 64 + token % 16 // 2 * 8 + token % 64 // 16 * 2 + token % 2
                params = v_params + page * (2 * BLOCK) + order
                zero = tl.load(params + BLOCK, mask=live, other=0.0)
                scale = _ungained(tl.load(params, mask=live, other=0.0), octet, BITS)
                code = _rounded(x.to(tl.float32), scale, zero, live & (c < D), BITS)
                made |= code << (8 * (2 * h + r) + i * BITS)
            tl.store(v_words + page * (4 * C * BITS) + word, made, mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def keep_rings(
    new, k_ring, v_ring, rows, num_rows, stride, D: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """16 of the newest RING tokens of a row of several."""
    row = tl.program_id(1)
    slot = tl.load(rows + row).to(tl.int64)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    count = tl.where((slot >= 0) & (count > 1), count, 0)
    place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    i = tl.maximum(count - RING, 0) + tl.program_id(0) * 16 + tl.arange(0, 16)
    d = tl.arange(0, PADDED)[None, :]
    live = (i < count)[:, None] & (d < D)
    x = tl.load(new + (place + i)[:, None] * stride + d, mask=live, other=0.0)
    to = tl.maximum(slot, 0) * (RING * D) + ((start + i) % RING)[:, None] * D + d
    tl.store(k_ring + to, x, mask=live)
    tl.store(v_ring + to, x, mask=live)


def append_latents(new_TD: Tensor, pages: PackedPages, step: PackedRows, fmt: KVFormat) -> None:
    """Write rings of rows of one token; pack the blocks that rows complete."""
    layer, num_rows = pages.layer, step.rows_FR.shape[1]
    rings = (layer.k_ring_SGRD, layer.v_ring_SGRD)
    params = (layer.k_params_PG, layer.v_params_PG)
    padded, stride = triton.next_power_of_2(fmt.head_dim), new_TD.stride(0)
    append_ring[(num_rows,)](
        *(new_TD, *rings, step.rows_FR, num_rows, stride), D=fmt.head_dim, PADDED=padded
    )
    most = num_rows + (len(new_TD) // BLOCK_TOKENS if step.chunks else 0)
    asked = (step.rows_FR, step.table_SM, num_rows, step.table_SM.shape[1], stride)
    behind = (pages.k_behind_PGTD, pages.v_behind_PGTD) if pages.keeps_behind else rings
    same = sizes_of(fmt, num_rows)
    make_scales[(most,)](
        *(new_TD, *rings, *params, *behind, *asked),
        **same | {"PADDED": padded, "TAIL": TAIL_TOKENS if pages.keeps_behind else 0},
        num_warps=8,
    )
    pieces = triton.cdiv(fmt.key_words, int(WORDS))
    make_words[(most, 2 * pieces)](
        *(new_TD, *rings, layer.k_words_PGW, layer.v_words_PGW, *params, *asked),
        **same | {"PIECES": pieces},
    )


def sizes_of(fmt: KVFormat, num_rows: int) -> dict[str, int | bool]:
    """Return the constants that all kernels share."""
    return {
        "D": fmt.head_dim,
        "C": fmt.channels,
        "BITS": fmt.key_bits,
        "ROWS": triton.next_power_of_2(num_rows),
    }


def keep_newest(new_TD: Tensor, pages: PackedPages, step: PackedRows) -> None:
    """Write the newest tokens of rows of several to their rings."""
    layer, dim = pages.layer, new_TD.shape[1]
    keep_rings[(RING_TOKENS // 16, step.rows_FR.shape[1])](
        *(new_TD, layer.k_ring_SGRD, layer.v_ring_SGRD),
        *(step.rows_FR, step.rows_FR.shape[1], new_TD.stride(0)),
        D=dim,
        PADDED=triton.next_power_of_2(dim),
    )
