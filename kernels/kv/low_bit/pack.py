"""Quantise a block of one head's keys or values and store it as packed words.

A warp's thread 4g + t loads just what its words hold (formats/kv_block.py), 16 bytes at a time:
keys: rows of its g, channels t*D/4 ...; values: tokens 4t ..., channels g*D/8 ... . Rounding and
packing then stay in its registers; only the least and greatest of a group cross threads.

D: head_dim.  n: tile of the block.  m r g t o i h M R: see kv_block.py.  j: 8 channels of a load.
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
def _load(new, ring, pos, d, start, stride_t, D: tl.constexpr, READ_NEW: tl.constexpr):
    """Load channels d of positions pos: from the ring below `start`, from the step above."""
    old = (pos < start) & (d >= 0)
    x = tl.load(ring + pos % RING * D + d, mask=old, other=0.0)
    if READ_NEW:
        y = tl.load(new + (pos - start) * stride_t + d, mask=(pos >= start) & (d >= 0), other=0.0)
        x = tl.where(old, x, y)
    return x.to(tl.float32)


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
def _store_words(ptr, x, WORDS: tl.constexpr, BITS: tl.constexpr):
    """(n, m, o, g, t, h, r, i) codes -> words in the order of kv_block.py, WORDS a thread."""
    PLANES: tl.constexpr = 8 // BITS
    j = tl.arange(0, 4 * PLANES)
    shift = j // (2 * PLANES) * 16 + j // PLANES % 2 * 8 + j % PLANES * BITS
    x = tl.reshape(x, (WORDS * 32, 4 * PLANES)) << shift[None, :]
    x = tl.permute(tl.reshape(tl.sum(x, 1), (WORDS // 4, 4, 32)), (0, 2, 1))
    to = tl.arange(0, WORDS * 8)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(ptr + to, tl.reshape(x, (WORDS * 8, 4)))


@triton.jit
def pack_keys(
    new, ring, words, params, at, block, start, stride_t,
    D: tl.constexpr, BITS: tl.constexpr, KEY_GROUP: tl.constexpr, READ_NEW: tl.constexpr,
):  # fmt: skip
    """Quantise and pack the keys of one block of one head into page-and-head `at`."""
    Q: tl.constexpr = D // 4
    VEC: tl.constexpr = min(8, Q)
    NC: tl.constexpr = Q // VEC
    row = tl.arange(0, 512 * NC)[:, None]  # r n m c g t
    lane = row % 32
    tile_row = row // (32 * NC) % 4 * 16 + lane // 4 * 2 + row // (256 * NC)
    token = row // (128 * NC) % 2 * 64 + tile_row
    channel = lane % 4 * Q + row // 32 % NC * VEC + tl.arange(0, VEC)[None, :]
    x = _load(new, ring, block * BLOCK + token, channel, start, stride_t, D, READ_NEW)
    if KEY_GROUP == 0:
        x = tl.permute(tl.reshape(x, (2, 2, 4, NC, 8, 4, VEC)), (0, 1, 2, 4, 3, 5, 6))
        x = tl.reshape(x, (128, D))  # r n m g, c t j
        scale, zero, inverse = _grid(tl.min(x, 1), tl.max(x, 1), BITS)
        k = tl.arange(0, 128)
        to = params + at * (2 * BLOCK) + k // 32 % 2 * 64 + k % 8 * 8 + k // 8 % 4 * 2 + k // 64
        tl.store(to, scale)
        tl.store(to + BLOCK, zero)
        codes = tl.reshape(
            _codes(x, zero[:, None], inverse[:, None], BITS), (2, 2, 4, 8, NC, 4, VEC)
        )
        codes = tl.permute(codes, (1, 2, 3, 5, 0, 4, 6))  # n m g t r c j
    else:
        N: tl.constexpr = BLOCK // KEY_GROUP
        x = tl.permute(tl.reshape(x, (2, 2, 2, 2, NC, 8, 4, VEC)), (1, 2, 0, 3, 5, 4, 6, 7))
        x = tl.reshape(x, (N, KEY_GROUP, D))  # n and half of m first, c t j last
        scale, zero, inverse = _grid(tl.min(x, 1), tl.max(x, 1), BITS)
        k = tl.arange(0, D)
        channels = k // VEC % 4 * Q + k // (4 * VEC) * VEC + k % VEC
        to = params + (at * N + tl.arange(0, N))[:, None] * (2 * D) + channels[None, :]
        tl.store(to, _gained(scale, (channels % Q // 2)[None, :], BITS))
        tl.store(to + D, zero)
        codes = _codes(x, zero[:, None, :], inverse[:, None, :], BITS)
        codes = tl.reshape(codes, (2, 2, 2, 2, 8, NC, 4, VEC))
        codes = tl.permute(codes, (0, 1, 3, 4, 6, 2, 5, 7))  # n m m g t r c j
    codes = tl.reshape(codes, (2, 4, 8, 4, 2, D * BITS // 64, 8 // BITS, 2))  # n m g t r o i h
    codes = tl.permute(codes, (0, 1, 5, 2, 3, 7, 4, 6))
    _store_words(words + at * (4 * D * BITS), codes, D * BITS // 8, BITS)


@triton.jit
def pack_values(
    new, ring, words, params, at, block, start, stride_t,
    D: tl.constexpr, BITS: tl.constexpr, READ_NEW: tl.constexpr,
):  # fmt: skip
    """Quantise and pack the values of one block of one head into page-and-head `at`."""
    S: tl.constexpr = D // 8
    VEC: tl.constexpr = min(8, S)
    NC: tl.constexpr = S // VEC
    row = tl.arange(0, 1024 * NC)[:, None]  # h R M%2 c n M//2 g t
    lane = row % 32
    high = row // 64 % 2 * 64 + row // 32 % 2 * 32 + row // (128 * NC) % 2 * 16
    token = high + lane % 4 * 4 + row // (512 * NC) * 2 + row // (256 * NC) % 2
    channel = lane // 4 * S + row // 128 % NC * VEC + tl.arange(0, VEC)[None, :]
    x = _load(new, ring, block * BLOCK + token, channel, start, stride_t, D, READ_NEW)
    x = tl.reshape(x, (2, 2, 2, NC, 2, 2, 8, 4, VEC))
    x = tl.reshape(tl.permute(x, (4, 5, 2, 7, 0, 1, 6, 3, 8)), (128, D))  # n M t h R, g c j
    scale, zero, inverse = _grid(tl.min(x, 1), tl.max(x, 1), BITS)
    k = tl.arange(0, 128)
    to = params + at * (2 * BLOCK) + k // 64 * 64 + k % 16 // 2 * 8 + k % 64 // 16 * 2 + k % 2
    tl.store(to, _gained(scale, k % 64 // 16 * 2 + k % 2, BITS))
    tl.store(to + BLOCK, zero)
    codes = _codes(x, zero[:, None], inverse[:, None], BITS)
    codes = tl.reshape(codes, (2, 4, 4, 2, 2, 8, D // 16, 2))  # n M t h R g m r
    codes = tl.permute(codes, (0, 6, 1, 4, 5, 2, 3, 7))  # n m M R g t h r
    codes = tl.reshape(codes, (2, D // 16, BITS, 8 // BITS, 8, 4, 2, 2))  # n m o i g t h r
    codes = tl.permute(codes, (0, 1, 2, 4, 5, 6, 7, 3))
    _store_words(words + at * (4 * D * BITS), codes, D * BITS // 8, BITS)
