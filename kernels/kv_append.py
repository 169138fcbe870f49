"""Write new tokens to the 16-bit ring and pack the blocks they complete, in one launch.

    append_step    q_len <= HOLDBACK: one program a request and head; the block to pack (at most
                   one) is in the ring already, so writing and packing touch different tokens
    pack_blocks    longer steps and prompts: three programs a block and head (keys, two tiles of
                   values), read from the new tokens (or the ring, where a chunk continues a block)
    write_ring     ... after it, the newest RING tokens

Bytes per packed block and head: 4 * 128 * D read, D * bits * 32 + scales written; a decode step
writes 4 * D per head and packs in one step of 128.

B: requests.  S: new tokens.  G: key-value heads.  D: head_dim.  n m r g t o i h: see kv_formats.py.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS

BLOCK = tl.constexpr(BLOCK_TOKENS)
HOLDBACK = tl.constexpr(HOLDBACK_TOKENS)
RING = tl.constexpr(RING_TOKENS)


@triton.jit
def _rows(new, ring, pos, start, stride_t, D: tl.constexpr, READ_NEW: tl.constexpr):
    """Load positions as [len(pos), D]: from the ring below `start`, from the step above."""
    d = tl.arange(0, D)[None, :]
    old = (pos < start)[:, None]
    x = tl.load(ring + (pos % RING)[:, None] * D + d, mask=old, other=0.0)
    if READ_NEW:
        y = tl.load(
            new + (pos - start)[:, None] * stride_t + d, mask=(pos >= start)[:, None], other=0.0
        )
        x = tl.where(old, x, y)
    return x


@triton.jit
def _grid(low, high, BITS: tl.constexpr):
    """Scale and zero in fp16, and the inverse of the stored scale."""
    scale = ((high - low) * (1.0 / (2**BITS - 1))).to(tl.float16)
    step = scale.to(tl.float32)
    inverse = tl.where(
        step > 0, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), tl.maximum(step, 1e-30)), 0.0
    )
    return scale, low.to(tl.float16), inverse


@triton.jit
def _gained(scale, octet, BITS: tl.constexpr):
    """A scale as it is stored: kv_formats.channel_gain, token_gain."""
    plane = octet % (8 // BITS)
    return scale * tl.exp2((8 - BITS - plane * BITS).to(tl.float32)).to(tl.float16)


@triton.jit
def _codes(x, zero, inverse, BITS: tl.constexpr):
    """Round to the grid."""
    q = tl.floor((x - zero.to(tl.float32)) * inverse + 0.5)
    return tl.minimum(tl.maximum(q, 0.0), 2**BITS - 1).to(tl.uint8)


@triton.jit
def _store_words(ptr, x, M: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """(m, o, g, t, h, r, i) codes of one tile -> words in the order of kv_formats.py."""
    PLANES: tl.constexpr = 8 // BITS
    j = tl.arange(0, 4 * PLANES)
    shift = j // (2 * PLANES) * 16 + j // PLANES % 2 * 8 + j % PLANES * BITS
    x = tl.reshape(x, (M * WIDTH * 32, 4 * PLANES)).to(tl.int32) << shift[None, :]
    index = tl.arange(0, M * WIDTH * 32)
    word = index // 32
    tl.store(ptr + word // 4 * 128 + index % 32 * 4 + word % 4, tl.sum(x, 1))


@triton.jit
def _thread_order(token):
    """Where a token's scale lies within its tile's 64 (kv_formats.to_thread_order)."""
    return token % 16 // 2 * 8 + token // 16 * 2 + token % 2


@triton.jit
def _pack_keys(codes, ptr, D: tl.constexpr, BITS: tl.constexpr):
    """codes [64, D] of one tile."""
    PLANES: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = D * BITS // 64
    x = tl.reshape(codes, (4, 8, 2, 4, WIDTH, PLANES, 2))  # m g r t o i h
    _store_words(ptr, tl.permute(x, (0, 4, 1, 3, 6, 2, 5)), 4, WIDTH, BITS)


@triton.jit
def _pack_values(codes, ptr, D: tl.constexpr, BITS: tl.constexpr):
    """codes [64, D] of one tile."""
    PLANES: tl.constexpr = 8 // BITS
    x = tl.reshape(codes, (4, 4, 2, 2, 8, D // 16, 2))  # M t h R g m r
    x = tl.permute(x, (5, 0, 3, 4, 1, 2, 6))  # m M R g t h r
    x = tl.reshape(x, (D // 16, BITS, PLANES, 8, 4, 2, 2))  # m o i g t h r
    _store_words(ptr, tl.permute(x, (0, 1, 3, 4, 5, 6, 2)), D // 16, BITS, BITS)


@triton.jit
def _pack_key_block(
    new, ring, words, params, at, block, start, stride_t,
    D: tl.constexpr, BITS: tl.constexpr, KEY_GROUP: tl.constexpr, READ_NEW: tl.constexpr,
):  # fmt: skip
    """Quantise and pack the keys of one block of one head into page-and-head `at`."""
    d = tl.arange(0, D)
    token = tl.arange(0, 64)
    WORDS: tl.constexpr = 2 * D * BITS  # of a tile
    N: tl.constexpr = 1 if KEY_GROUP == 0 else max(1, 64 // KEY_GROUP)  # groups of a tile
    octet = d % (D // 4) // 2
    first = block * BLOCK
    k0 = _rows(new, ring, first + token, start, stride_t, D, READ_NEW)
    k1 = _rows(new, ring, first + 64 + token, start, stride_t, D, READ_NEW)
    if KEY_GROUP == 128:
        low = tl.minimum(tl.min(k0.to(tl.float32), 0), tl.min(k1.to(tl.float32), 0))
        high = tl.maximum(tl.max(k0.to(tl.float32), 0), tl.max(k1.to(tl.float32), 0))
        scale, zero, inverse = _grid(low, high, BITS)
        tl.store(params + at * (2 * D) + d, _gained(scale, octet, BITS))
        tl.store(params + at * (2 * D) + D + d, zero)
    for tile in tl.static_range(2):
        k = (k0 if tile == 0 else k1).to(tl.float32)
        if KEY_GROUP == 128:
            codes = _codes(k, zero[None, :], inverse[None, :], BITS)
        elif KEY_GROUP == 0:
            k_scale, k_zero, k_inverse = _grid(tl.min(k, 1), tl.max(k, 1), BITS)
            codes = _codes(k, k_zero[:, None], k_inverse[:, None], BITS)
            to = params + at * (2 * BLOCK) + tile * 64 + _thread_order(token)
            tl.store(to, k_scale)
            tl.store(to + BLOCK, k_zero)
        else:
            groups = tl.reshape(k, (N, KEY_GROUP, D))
            g_scale, g_zero, g_inverse = _grid(tl.min(groups, 1), tl.max(groups, 1), BITS)
            codes = _codes(groups, g_zero[:, None, :], g_inverse[:, None, :], BITS)
            codes = tl.reshape(codes, (64, D))
            to = (
                params + (at * (2 * N) + tile * N + tl.arange(0, N))[:, None] * (2 * D) + d[None, :]
            )
            tl.store(to, _gained(g_scale, octet[None, :], BITS))
            tl.store(to + D, g_zero)
        _pack_keys(codes, words + (at * 2 + tile) * WORDS, D, BITS)


@triton.jit
def _pack_value_tile(
    new, ring, words, params, at, block, tile, start, stride_t,
    D: tl.constexpr, BITS: tl.constexpr, READ_NEW: tl.constexpr,
):  # fmt: skip
    """Quantise and pack the values of one tile of one head into page-and-head `at`."""
    token = tl.arange(0, 64)
    pos = block * BLOCK + tile * 64 + token
    v = _rows(new, ring, pos, start, stride_t, D, READ_NEW).to(tl.float32)
    scale, zero, inverse = _grid(tl.min(v, 1), tl.max(v, 1), BITS)
    to = params + at * (2 * BLOCK) + tile * 64 + _thread_order(token)
    tl.store(to, _gained(scale, token // 16 * 2 + token % 2, BITS))
    tl.store(to + BLOCK, zero)
    codes = _codes(v, zero[:, None], inverse[:, None], BITS)
    _pack_values(codes, words + (at * 2 + tile) * (2 * D * BITS), D, BITS)


@triton.jit
def _page(table, slot, block, table_width, PAGED: tl.constexpr):
    if PAGED:
        return tl.load(table + slot * table_width + block).to(tl.int64)
    return slot * table_width + block


@triton.jit(do_not_specialize=["table_width"])
def append_step(
    k_new, v_new, k_ring, v_ring, k_words, k_params, v_words, v_params, table, slots, starts,
    counts, table_width, stride_b, stride_t, stride_g,
    S: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, KEY_GROUP: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Append up to HOLDBACK tokens of one request and head."""
    head = tl.program_id(0)
    b = tl.program_id(1)
    start = tl.load(starts + b)
    count = tl.load(counts + b)
    slot = tl.load(slots + b).to(tl.int64)
    ring_at = (slot * G + head) * (RING * D)
    new_at = b.to(tl.int64) * stride_b + head * stride_g
    d = tl.arange(0, D)
    for i in range(S):
        live = d * 0 + i < count
        k = tl.load(k_new + new_at + i * stride_t + d, mask=live)
        v = tl.load(v_new + new_at + i * stride_t + d, mask=live)
        to = ring_at + (start + i) % RING * D + d
        tl.store(k_ring + to, k, mask=live)
        tl.store(v_ring + to, v, mask=live)
    # the block n whose last token lies HOLDBACK behind one of the new tokens
    done = (start + count - 1 - HOLDBACK) // BLOCK
    if (count > 0) & (done > 0) & (done * BLOCK + HOLDBACK >= start):
        at = _page(table, slot, done - 1, table_width, PAGED) * G + head
        block = done - 1
        _pack_key_block(
            k_new, k_ring + ring_at, k_words, k_params, at, block, start, stride_t, D, BITS,
            KEY_GROUP, False,
        )  # fmt: skip
        for tile in range(2):
            _pack_value_tile(
                v_new, v_ring + ring_at, v_words, v_params, at, block, tile, start, stride_t, D,
                BITS, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["table_width"])
def pack_blocks(
    k_new, v_new, k_ring, v_ring, k_words, k_params, v_words, v_params, table, slots, starts,
    counts, table_width, stride_b, stride_t, stride_g,
    G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, KEY_GROUP: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Pack the keys or a tile of values of a block of one request and head, if completed."""
    head = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(starts + b)
    end = start + tl.load(counts + b)
    slot = tl.load(slots + b).to(tl.int64)
    first = tl.maximum(start - HOLDBACK + BLOCK - 1, BLOCK) // BLOCK - 1
    block = first + tl.program_id(0) // 3
    part = tl.program_id(0) % 3
    if (block + 1) * BLOCK + HOLDBACK < end:
        at = _page(table, slot, block, table_width, PAGED) * G + head
        ring_at = (slot * G + head) * (RING * D)
        new_at = b.to(tl.int64) * stride_b + head * stride_g
        if part == 0:
            _pack_key_block(
                k_new + new_at, k_ring + ring_at, k_words, k_params, at, block, start, stride_t, D,
                BITS, KEY_GROUP, True,
            )  # fmt: skip
        else:
            _pack_value_tile(
                v_new + new_at, v_ring + ring_at, v_words, v_params, at, block, part - 1, start,
                stride_t, D, BITS, True,
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
