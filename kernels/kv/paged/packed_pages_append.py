"""Bring a step's rows into a pool of packed blocks: ring, full blocks, what is behind them.

    append_packed   steps of one token a row: rotates queries and keys, writes keys and values to
                    the ring, packs the block that a row completes (one of 128 steps does).
                    CHUNKS: keys were rotated before; only rows of one token go to
                    the ring yet, since the queries of a chunk still see what it would overwrite.
                    More programs pack the blocks of all rows, from ring and new tokens
    write_rings     ... behind a chunk's attention, its newest RING tokens

A block that others may find keeps, in 16 bits, the TAIL tokens behind it: [blocks, G, TAIL, D].

Bytes per packed block and head: 4 * 128 * D read, 128 * D codes of either and scales written, and
8 * TAIL * D for what is behind; a row of one token writes 4 * D per head.

T tokens of a step.  R rows.  H query heads.  G key/value heads.  D head_dim.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.kv.low_bit.pack import keep_keys, pack_keys, pack_values
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS

BLOCK = tl.constexpr(BLOCK_TOKENS)
HOLDBACK = tl.constexpr(HOLDBACK_TOKENS)
RING = tl.constexpr(RING_TOKENS)
PADDED_TAIL = tl.constexpr(32)


@triton.jit
def _turned(
    ptr, d, live, position, inv_freq, factor, D: tl.constexpr, HALF: tl.constexpr,
    ROTARY: tl.constexpr,
):  # fmt: skip
    """Load heads, all of D along the last axis; the halves of the first 2 HALF are rotated."""
    x = tl.load(ptr + d, mask=live, other=0.0)
    if ROTARY:
        other_d = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
        other = tl.load(ptr + other_d, mask=live, other=0.0).to(tl.float32)
        angle = position.to(tl.float32) * tl.load(inv_freq + d % HALF)
        sin = tl.sin(angle) * factor
        turned = x.to(tl.float32) * (tl.cos(angle) * factor)
        turned += other * tl.where(d < HALF, -sin, sin)
        x = tl.where(d < 2 * HALF, turned, x.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _keep_behind(
    new, ring, behind, at, block, start, stride, D: tl.constexpr, TAIL: tl.constexpr,
    READ_NEW: tl.constexpr,
):  # fmt: skip
    """Copy the tokens behind a block, but a new one only with READ_NEW."""
    i = tl.arange(0, PADDED_TAIL)[:, None]
    d = tl.arange(0, triton.next_power_of_2(D))[None, :]
    pos = (block + 1) * BLOCK + i
    old = (i < TAIL) & (pos < start) & (d < D)
    x = tl.load(ring + pos % RING * D + d, mask=old, other=0.0)
    live = old
    if READ_NEW:
        fresh = (i < TAIL) & (pos >= start) & (d < D)
        x = tl.where(old, x, tl.load(new + (pos - start) * stride + d, mask=fresh, other=0.0))
        live = old | fresh
    tl.store(behind + (at * TAIL + i) * D + d, x, mask=live)


@triton.jit
def _pack(
    k_new, v_new, k_ring, v_ring, k_words, k_params, v_words, v_params, k_behind, v_behind, at,
    block, start, stride,
    D: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, BEHIND: tl.constexpr,
    READ_NEW: tl.constexpr,
):  # fmt: skip
    """Pack a block of one head into page-and-head `at`."""
    if KEY_BITS == 16:
        keep_keys(k_new, k_ring, k_words, at, block, start, stride, D, READ_NEW)
    else:
        pack_keys(k_new, k_ring, k_words, k_params, at, block, start, stride, D, KEY_BITS, READ_NEW)
    pack_values(v_new, v_ring, v_words, v_params, at, block, start, stride, D, VALUE_BITS, READ_NEW)
    if BEHIND > 0:
        _keep_behind(k_new, k_ring, k_behind, at, block, start, stride, D, BEHIND, READ_NEW)
        _keep_behind(v_new, v_ring, v_behind, at, block, start, stride, D, BEHIND, READ_NEW)


@triton.jit(do_not_specialize=["num_rows", "columns", "factor"])
def append_packed(
    q_ptr, q_out, inv_freq, k_ptr, v_ptr, k_ring, v_ring, k_words, k_params, v_words, v_params,
    k_behind, v_behind, rows, table, factor, num_rows, columns, q_stride, kv_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr, CHUNKS: tl.constexpr,
    BEHIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of a row of one token, or (from program `num_rows` on) of a block to pack."""
    head = tl.program_id(0)
    number = tl.program_id(1)
    if PDL:  # in this order: who comes next may read what is older than this kernel
        gdc_wait()
        gdc_launch_dependents()
    d = tl.arange(0, triton.next_power_of_2(D))
    head_d = d < D
    if number < num_rows:
        slot = tl.load(rows + number).to(tl.int64)
        start = tl.load(rows + num_rows + number)
        count = tl.load(rows + 2 * num_rows + number)
        if (slot >= 0) & (count == 1):
            place = tl.load(rows + 3 * num_rows + number).to(tl.int64)
            new = place * kv_stride + head * D
            ring = (slot * G + head) * (RING * D)
            k = _turned(k_ptr + new, d, head_d, start, inv_freq, factor, D, HALF, ROTARY)
            v = tl.load(v_ptr + new + d, mask=head_d)
            tl.store(k_ring + ring + start % RING * D + d, k, mask=head_d)
            tl.store(v_ring + ring + start % RING * D + d, v, mask=head_d)
            if not CHUNKS:
                C: tl.constexpr = H // G
                C_PAD: tl.constexpr = triton.next_power_of_2(C)
                c = tl.arange(0, C_PAD)[:, None]
                q_at = (head * C + c) * D
                q = _turned(
                    q_ptr + place * q_stride + q_at, d[None, :], (c < C) & head_d[None, :], start,
                    inv_freq, factor, D, HALF, ROTARY,
                )  # fmt: skip
                to = q_out + place * (H * D) + q_at + d[None, :]
                tl.store(to, q, mask=(c < C) & head_d[None, :])
                done = (start - HOLDBACK) // BLOCK
                if (start - HOLDBACK == done * BLOCK) & (done > 0):
                    page = tl.load(table + slot * columns + done - 1).to(tl.int64)
                    at = page * G + head
                    _pack(
                        k_ptr, v_ptr, k_ring + ring, v_ring + ring, k_words, k_params, v_words,
                        v_params, k_behind, v_behind, at, done - 1, start, kv_stride,
                        D, KEY_BITS, VALUE_BITS, BEHIND, False,
                    )  # fmt: skip
                    if BEHIND > 0:  # the last of those behind it is the new one
                        last = (at * BEHIND + BEHIND - 1) * D + d
                        tl.store(k_behind + last, k, mask=head_d)
                        tl.store(v_behind + last, v, mask=head_d)
    elif CHUNKS:
        r = tl.arange(0, ROWS)
        used = r < num_rows
        owner = tl.load(rows + r, mask=used, other=-1)
        starts = tl.load(rows + num_rows + r, mask=used, other=0)
        counts = tl.load(rows + 2 * num_rows + r, mask=used, other=0)
        # blocks from `firsts` on, up to the line of the last new token
        firsts = tl.maximum((starts - HOLDBACK + BLOCK - 1) // BLOCK, 1) - 1
        lines = tl.maximum(starts + counts - 1 - HOLDBACK, 0) // BLOCK
        done = tl.where((owner >= 0) & (counts > 0), tl.maximum(lines - firsts, 0), 0)
        ends = tl.cumsum(done, 0)
        index = number - num_rows
        if index < tl.sum(done, 0):
            own = tl.sum((ends <= index).to(tl.int32), 0)
            before = tl.max(tl.where(r < own, ends, 0), 0)
            block = tl.sum(tl.where(r == own, firsts, 0), 0) + index - before
            slot = tl.load(rows + own).to(tl.int64)
            start = tl.load(rows + num_rows + own)
            place = tl.load(rows + 3 * num_rows + own).to(tl.int64)
            new = place * kv_stride + head * D
            ring = (slot * G + head) * (RING * D)
            at = tl.load(table + slot * columns + block).to(tl.int64) * G + head
            _pack(
                k_ptr + new, v_ptr + new, k_ring + ring, v_ring + ring, k_words, k_params, v_words,
                v_params, k_behind, v_behind, at, block, start, kv_stride,
                D, KEY_BITS, VALUE_BITS, BEHIND, True,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def write_rings(
    k_ptr, v_ptr, k_ring, v_ring, rows, num_rows, kv_stride,
    G: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store TOKENS of the newest RING tokens of one head of a chunk."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows + row).to(tl.int64)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    count = tl.where((slot >= 0) & (count > 1), count, 0)
    place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    i = tl.maximum(count - RING, 0) + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, triton.next_power_of_2(D))[None, :]
    live = (i < count)[:, None] & (d < D)
    new = (place + i)[:, None] * kv_stride + head * D + d
    to = (slot * G + head) * (RING * D) + ((start + i) % RING)[:, None] * D + d
    tl.store(k_ring + to, tl.load(k_ptr + new, mask=live), mask=live)
    tl.store(v_ring + to, tl.load(v_ptr + new, mask=live), mask=live)
