"""Write new tokens to the 16-bit ring and pack the blocks they complete, in one launch.

    append_step    q_len <= HOLDBACK: one program a request and head; the block to pack (at most
                   one) is in the ring already, so writing and packing touch different tokens.
                   With INV_FREQ it first rotates the keys, and the head's queries into q_out
    pack_blocks    longer steps and prompts: two programs a block and head (keys, values), read from
                   the new tokens (or the ring, where a chunk continues a block)
    write_ring     ... after it, the newest RING tokens

Bytes per packed block and head: 4 * 128 * D read, D * bits * 32 + scales written; a decode step
writes 4 * D per head and packs in one step of 128.

B: requests.  S: new tokens.  H: query heads.  G: key-value heads.  D: head_dim.
n m r g t o i h: see formats/kv_block.py.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv.low_bit.pack import pack_keys, pack_values
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS

BLOCK = tl.constexpr(BLOCK_TOKENS)
HOLDBACK = tl.constexpr(HOLDBACK_TOKENS)
RING = tl.constexpr(RING_TOKENS)


@triton.jit
def _page(table, slot, block, table_width, PAGED: tl.constexpr):
    if PAGED:
        return tl.load(table + slot * table_width + block).to(tl.int64)
    return slot * table_width + block


@triton.jit
def _rotated(ptr, d, live, position, inv_freq, D: tl.constexpr):
    """Load heads, all of D along the last axis, and rotate its halves as rope_append.py."""
    HALF: tl.constexpr = D // 2
    x = tl.load(ptr + d, mask=live, other=0.0)
    other = tl.load(ptr + (d + HALF) % D, mask=live, other=0.0).to(tl.float32)
    angle = position.to(tl.float32) * tl.load(inv_freq + d % HALF)
    sin = tl.where(d < HALF, -tl.sin(angle), tl.sin(angle))
    return (x.to(tl.float32) * tl.cos(angle) + other * sin).to(x.dtype)


@triton.jit(do_not_specialize=["table_width"])
def append_step(
    q_new, q_out, inv_freq, k_new, v_new, k_ring, v_ring, k_words, k_params, v_words, v_params,
    table, slots, starts, counts, table_width, stride_b, stride_t, stride_g, q_stride_b, q_stride_t,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr, PAGED: tl.constexpr, ROTARY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Append up to HOLDBACK tokens of one request and head; H 0: no queries to rotate."""
    head = tl.program_id(0)
    b = tl.program_id(1)
    if PDL:  # in this order: who comes next may read what is older than this kernel
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.load(starts + b)
    count = tl.load(counts + b)
    slot = tl.load(slots + b).to(tl.int64)
    ring_at = (slot * G + head) * (RING * D)
    new_at = b.to(tl.int64) * stride_b + head * stride_g
    d = tl.arange(0, D)
    for i in range(S):
        live = d * 0 + i < count
        k_from = k_new + new_at + i * stride_t
        if ROTARY:
            k = _rotated(k_from, d, live, start + i, inv_freq, D)
        else:
            k = tl.load(k_from + d, mask=live)
        v = tl.load(v_new + new_at + i * stride_t + d, mask=live)
        to = ring_at + (start + i) % RING * D + d
        tl.store(k_ring + to, k, mask=live)
        tl.store(v_ring + to, v, mask=live)
    if H > 0:
        C: tl.constexpr = H // G
        C_PAD: tl.constexpr = triton.next_power_of_2(C)
        c = tl.arange(0, C_PAD)[:, None]
        q_from = q_new + b.to(tl.int64) * q_stride_b
        for i in range(S):
            at = (head * C + c) * D
            q = _rotated(q_from + i * q_stride_t + at, d[None, :], c < C, start + i, inv_freq, D)
            tl.store(q_out + (b * S + i) * (H * D) + at + d[None, :], q, mask=c < C)
    # the block n whose last token lies HOLDBACK behind one of the new tokens
    done = (start + count - 1 - HOLDBACK) // BLOCK
    if (count > 0) & (done > 0) & (done * BLOCK + HOLDBACK >= start):
        at = _page(table, slot, done - 1, table_width, PAGED) * G + head
        pack_keys(
            k_new, k_ring + ring_at, k_words, k_params, at, done - 1, start, stride_t, D, BITS,
            KEY_GROUP, False,
        )  # fmt: skip
        pack_values(
            v_new, v_ring + ring_at, v_words, v_params, at, done - 1, start, stride_t, D, BITS,
            False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_width"])
def pack_blocks(
    k_new, v_new, k_ring, v_ring, k_words, k_params, v_words, v_params, table, slots, starts,
    counts, table_width, stride_b, stride_t, stride_g,
    G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, KEY_GROUP: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Pack the keys or the values of a block of one request and head, if completed."""
    head = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(starts + b)
    end = start + tl.load(counts + b)
    slot = tl.load(slots + b).to(tl.int64)
    first = tl.maximum(start - HOLDBACK + BLOCK - 1, BLOCK) // BLOCK - 1
    block = first + tl.program_id(0) // 2
    if (block + 1) * BLOCK + HOLDBACK < end:
        at = _page(table, slot, block, table_width, PAGED) * G + head
        ring_at = (slot * G + head) * (RING * D)
        new_at = b.to(tl.int64) * stride_b + head * stride_g
        if tl.program_id(0) % 2 == 0:
            pack_keys(
                k_new + new_at, k_ring + ring_at, k_words, k_params, at, block, start, stride_t, D,
                BITS, KEY_GROUP, True,
            )  # fmt: skip
        else:
            pack_values(
                v_new + new_at, v_ring + ring_at, v_words, v_params, at, block, start, stride_t, D,
                BITS, True,
            )  # fmt: skip


@triton.jit
def write_ring(
    k_new, v_new, k_ring, v_ring, slots, starts, counts, stride_b, stride_t, stride_g,
    G: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store TOKENS of the newest RING tokens of one request and head."""
    head = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(starts + b)
    count = tl.load(counts + b)
    slot = tl.load(slots + b).to(tl.int64)
    i = tl.maximum(count - RING, 0) + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, D)[None, :]
    live = (i < count)[:, None]
    new_at = b.to(tl.int64) * stride_b + head * stride_g + i[:, None] * stride_t + d
    to = (slot * G + head) * (RING * D) + ((start + i) % RING)[:, None] * D + d
    tl.store(k_ring + to, tl.load(k_new + new_at, mask=live), mask=live)
    tl.store(v_ring + to, tl.load(v_new + new_at, mask=live), mask=live)
