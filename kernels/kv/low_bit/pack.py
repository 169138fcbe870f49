"""Quantise a block of one head's keys or values and store it as packed words.

A warp's thread 4g + t loads just what its words hold (formats/kv_block.py), 16 bytes at a time:
keys: rows of its g, channels t*D/4 ...; values: tokens 4t ..., channels g*D/8 ... . Rounding and
packing then stay in its registers; only the least and greatest of a group cross threads. Where C,
the channels that are stored, is no power of two, registers hold P of them: each thread's last are
padding, keys stand by octet, and a tile's last words are not stored.

D: head_dim.  C: padded to 32s.  P: to a power of two.  n: tile of the block.  j: 8 channels of a
load.  m r g t o i h M R: see kv_block.py.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS

BLOCK = tl.constexpr(BLOCK_TOKENS)
RING = tl.constexpr(RING_TOKENS)


@triton.jit
def _load_run(
    new, ring, pos, own, channel, start, stride_t,
    LIMIT: tl.constexpr, D: tl.constexpr, READ_NEW: tl.constexpr,
):  # fmt: skip
    """Load channels of positions `pos`: from the ring below `start`, from the step above."""
    there = (own < LIMIT) & (channel < D)
    old = (pos < start) & there
    x = tl.load(ring + pos % RING * D + channel, mask=old, other=0.0)
    if READ_NEW:
        at = new + (pos - start) * stride_t + channel
        x = tl.where(old, x, tl.load(at, mask=(pos >= start) & there, other=0.0))
    return x.to(tl.float32)


@triton.jit
def _load(
    new, ring, pos, own, channel, start, stride_t,
    VEC: tl.constexpr, LIMIT: tl.constexpr, D: tl.constexpr, READ_NEW: tl.constexpr,
):  # fmt: skip
    """Load VEC channels a row from a thread's `own`-th on, those from LIMIT on are 0: [rows, VEC].

    A thread has all of its row: as two runs where 16 bytes hold 4 (float32) or rows begin at any
    multiple of 4 (values of 72, 80, 96 channels). A row dealt to two threads would leave the lanes
    of a token's other channels apart, and Triton 3.6 reduces across such lanes wrongly.
    """
    if VEC == 8 and (ring.dtype.element_ty == tl.float32 or LIMIT % 8 != 0):
        i = tl.arange(0, 4)[None, :]
        low = _load_run(
            new, ring, pos, own + i, channel + i, start, stride_t, LIMIT, D, READ_NEW
        )  # fmt: skip
        i += 4
        high = _load_run(
            new, ring, pos, own + i, channel + i, start, stride_t, LIMIT, D, READ_NEW
        )  # fmt: skip
        x = tl.permute(tl.join(low, high), (0, 2, 1))
        x = tl.reshape(x, (x.shape[0], VEC))
    else:
        i = tl.arange(0, VEC)[None, :]
        x = _load_run(new, ring, pos, own + i, channel + i, start, stride_t, LIMIT, D, READ_NEW)
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
    return tl.minimum(tl.maximum(q, 0.0), 2**BITS - 1).to(tl.int32)


@triton.jit
def _store_words(ptr, x, WORDS: tl.constexpr, STORED: tl.constexpr, BITS: tl.constexpr):
    """Codes (n, m, o, g, t, h, r, i), or o before m, -> words, STORED of WORDS a thread."""
    PLANES: tl.constexpr = 8 // BITS
    j = tl.arange(0, 4 * PLANES)
    shift = j // (2 * PLANES) * 16 + j // PLANES % 2 * 8 + j % PLANES * BITS
    x = tl.reshape(x, (WORDS * 32, 4 * PLANES)) << shift[None, :]
    x = tl.permute(tl.reshape(tl.sum(x, 1), (WORDS // 4, 4, 32)), (0, 2, 1))
    row = tl.arange(0, WORDS * 8)[:, None]
    w = tl.arange(0, 4)[None, :]
    if WORDS == STORED:
        tl.store(ptr + row * 4 + w, tl.reshape(x, (WORDS * 8, 4)))
    else:  # a tile after the other
        to = row // (WORDS * 4) * (STORED * 16) + row % (WORDS * 4) * 4 + w
        kept = row % (WORDS * 4) + w * 0 < STORED * 4
        tl.store(ptr + to, tl.reshape(x, (WORDS * 8, 4)), mask=kept)


@triton.jit
def pack_keys(
    new, ring, words, params, at, block, start, stride_t,
    D: tl.constexpr, BITS: tl.constexpr, READ_NEW: tl.constexpr,
):  # fmt: skip
    """Quantise and pack the keys of one block of one head into page-and-head `at`."""
    C: tl.constexpr = (D + 31) // 32 * 32
    P: tl.constexpr = triton.next_power_of_2(C)
    Q: tl.constexpr = P // 4
    VEC: tl.constexpr = min(8, Q)
    NC: tl.constexpr = Q // VEC
    row = tl.arange(0, 512 * NC)[:, None]  # r n m c g t
    lane = row % 32
    tile_row = row // (32 * NC) % 4 * 16 + lane // 4 * 2 + row // (256 * NC)
    token = row // (128 * NC) % 2 * 64 + tile_row
    own = row // 32 % NC * VEC
    channel = lane % 4 * (C // 4) + own
    pos = block * BLOCK + token
    x = _load(new, ring, pos, own, channel, start, stride_t, VEC, C // 4, D, READ_NEW)
    x = tl.permute(tl.reshape(x, (2, 2, 4, NC, 8, 4, VEC)), (1, 2, 0, 4, 3, 5, 6))
    x = tl.reshape(x, (BLOCK, P))  # n m r g first, c t j last
    scale, zero, inverse = _grid(tl.min(x, 0), tl.max(x, 0), BITS)
    k = tl.arange(0, P)
    own = k // (4 * VEC) * VEC + k % VEC
    channels = k // VEC % 4 * (C // 4) + own
    to = params + at * (2 * C) + channels
    tl.store(to, _gained(scale, own // 2, BITS), mask=own < C // 4)
    tl.store(to + C, zero, mask=own < C // 4)
    codes = _codes(x, zero[None, :], inverse[None, :], BITS)
    codes = tl.permute(tl.reshape(codes, (2, 4, 2, 8, NC, 4, VEC)), (0, 1, 3, 5, 2, 4, 6))
    codes = tl.reshape(codes, (2, 4, 8, 4, 2, P * BITS // 64, 8 // BITS, 2))  # n m g t r o i h
    if C < P:
        codes = tl.permute(codes, (0, 5, 1, 2, 3, 7, 4, 6))
    else:
        codes = tl.permute(codes, (0, 1, 5, 2, 3, 7, 4, 6))
    _store_words(words + at * (4 * C * BITS), codes, P * BITS // 8, C * BITS // 8, BITS)


@triton.jit
def keep_keys(
    new, ring, keys, at, block, start, stride_t, D: tl.constexpr, READ_NEW: tl.constexpr
):  # fmt: skip
    """Copy the keys of one block of one head as they are into page-and-head `at`.

    Channels from D on are zeros since the pool was allocated.
    """
    C: tl.constexpr = (D + 31) // 32 * 32
    d = tl.arange(0, triton.next_power_of_2(D))[None, :]
    for first in tl.range(0, BLOCK, 32):
        i = first + tl.arange(0, 32)[:, None]
        pos = block * BLOCK + i
        old = (pos < start) & (d < D)
        x = tl.load(ring + pos % RING * D + d, mask=old, other=0.0)
        if READ_NEW:
            fresh = (pos >= start) & (d < D)
            at_new = new + (pos - start) * stride_t + d
            x = tl.where(old, x, tl.load(at_new, mask=fresh, other=0.0))
        tl.store(keys + (at * BLOCK + i) * C + d, x, mask=d < D)


@triton.jit
def pack_values(
    new, ring, words, params, at, block, start, stride_t,
    D: tl.constexpr, BITS: tl.constexpr, READ_NEW: tl.constexpr,
):  # fmt: skip
    """Quantise and pack the values of one block of one head into page-and-head `at`."""
    C: tl.constexpr = (D + 31) // 32 * 32
    P: tl.constexpr = triton.next_power_of_2(C)
    S: tl.constexpr = P // 8
    VEC: tl.constexpr = min(8, S)
    NC: tl.constexpr = S // VEC
    row = tl.arange(0, 1024 * NC)[:, None]  # h R M%2 c n M//2 g t
    lane = row % 32
    high = row // 64 % 2 * 64 + row // 32 % 2 * 32 + row // (128 * NC) % 2 * 16
    token = high + lane % 4 * 4 + row // (512 * NC) * 2 + row // (256 * NC) % 2
    own = row // 128 % NC * VEC
    channel = lane // 4 * (C // 8) + own
    pos = block * BLOCK + token
    x = _load(new, ring, pos, own, channel, start, stride_t, VEC, C // 8, D, READ_NEW)
    x = tl.reshape(x, (2, 2, 2, NC, 2, 2, 8, 4, VEC))
    x = tl.reshape(tl.permute(x, (4, 5, 2, 7, 0, 1, 6, 3, 8)), (128, P))  # n M t h R, g c j
    if D == P:
        scale, zero, inverse = _grid(tl.min(x, 1), tl.max(x, 1), BITS)
    else:
        e = tl.arange(0, P)
        own_e = e % S
        head = (own_e < C // 8) & (e // S * (C // 8) + own_e < D)
        low = tl.min(tl.where(head[None, :], x, float("inf")), 1)
        scale, zero, inverse = _grid(
            low, tl.max(tl.where(head[None, :], x, float("-inf")), 1), BITS
        )
    k = tl.arange(0, 128)
    to = params + at * (2 * BLOCK) + k // 64 * 64 + k % 16 // 2 * 8 + k % 64 // 16 * 2 + k % 2
    tl.store(to, _gained(scale, k % 64 // 16 * 2 + k % 2, BITS))
    tl.store(to + BLOCK, zero)
    codes = _codes(x, zero[:, None], inverse[:, None], BITS)
    if D < P:
        codes = tl.where(head[None, :], codes, 0)
    codes = tl.reshape(codes, (2, 4, 4, 2, 2, 8, P // 16, 2))  # n M t h R g m r
    codes = tl.permute(codes, (0, 6, 1, 4, 5, 2, 3, 7))  # n m M R g t h r
    codes = tl.reshape(codes, (2, P // 16, BITS, 8 // BITS, 8, 4, 2, 2))  # n m o i g t h r
    codes = tl.permute(codes, (0, 1, 2, 4, 5, 6, 7, 3))
    _store_words(words + at * (4 * C * BITS), codes, P * BITS // 8, C * BITS // 8, BITS)
