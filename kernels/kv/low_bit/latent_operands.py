"""Operands of attention over packed latents (latent_codes.py): words to right operands' registers.

    keys      channels x 128 tokens (r tile m g): warp (tile m) has its own words
    values    tokens x 64 channels (r m g): warp (r m) takes the row r of words that two warps read

Loads are whole vectors: of four words a thread, of 2 bits two. With 8 bits an operand has 32
channels or tokens, else 64.

C padded channels.  n m r g t s half h i: see kv_block.py.  KW: see unpack.py.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv.low_bit.unpack import _fields

HALF_8 = tl.constexpr("{.reg .b32 y; shr.b32 y, $1, $2; and.b32 $0, y, 0x00ff00ff;}")
HALF_4 = tl.constexpr(
    "{.reg .b32 y; shr.b32 y, $2, $3; and.b32 $0, y, 0x000f000f; and.b32 $1, y, 0x00f000f0;}"
)
HALF_2 = tl.constexpr(
    "{.reg .b32 y; shr.b32 y, $4, $5; and.b32 $0, y, 0x00030003; and.b32 $1, y, 0x000c000c;"
    "and.b32 $2, y, 0x00300030; and.b32 $3, y, 0x00c000c0;}"
)


@triton.jit
def keys_at(kw, i: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr):
    """Words of both tiles' i-th operand of keys: halves of 256 threads, warp (tile m)."""
    WORDS: tl.constexpr = 2 if BITS == 2 else 4  # of a thread
    thread = tl.arange(0, 256)
    number = thread // 32 % 4 * (C * BITS // 64) + i * WORDS
    at = thread // 128 * (4 * C * BITS) + number // 4 * 256 + thread % 32 * 8
    if WORDS == 2:
        at += number // 2 % 2 * 4
    halves = kw.to(tl.pointer_type(tl.int16))
    return tl.load(halves + at[:, None] + tl.arange(0, 2 * WORDS)[None, :])


@triton.jit
def values_at(vw, i: tl.constexpr, BITS: tl.constexpr):
    """Words of a tile's i-th operand of values: halves of 256 threads, warp (r m)."""
    WORDS: tl.constexpr = 2 if BITS == 2 else 4
    PARTS: tl.constexpr = 2 if BITS == 8 else 1
    thread = tl.arange(0, 256)
    number = (i // PARTS * 4 + thread // 32 % 4) * BITS + i % PARTS * WORDS
    at = number // 4 * 256 + thread % 32 * 8
    if WORDS == 2:
        at += number // 2 % 2 * 4
    halves = vw.to(tl.pointer_type(tl.int16))
    return tl.load(halves + at[:, None] + tl.arange(0, 2 * WORDS)[None, :])


@triton.jit
def key_operand(halves, BITS: tl.constexpr, KW: tl.constexpr, EMULATE: tl.constexpr):
    """Words of 128 tokens, some channels -> right operand [channels, 128 (r tile m g)], fp16."""
    PLANES: tl.constexpr = 8 // BITS
    WORDS: tl.constexpr = halves.shape[1] // 2
    S: tl.constexpr = WORDS * PLANES // 2
    x = _fields(halves, BITS, EMULATE)
    x = tl.reshape(x, (2, 4, 8, 4, WORDS, 2, 2, PLANES))  # tile m g t w h r i
    x = tl.permute(x, (4, 7, 3, 5, 6, 0, 1, 2))  # w i t h r tile m g
    x = tl.reshape(x, (S, 2, 4, 2, 2, 2, 4, 8))  # s half t h r tile m g
    if KW == 4:
        x = tl.permute(x, (0, 2, 1, 3, 4, 5, 6, 7))
    return tl.reshape(x, (16 * S, 128))


@triton.jit
def _half_plane(x, shift, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Emulate one plane of one row r."""
    MASK: tl.constexpr = (2**BITS - 1) << (BITS * PLANE)
    return ((x >> shift) & MASK).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _half_fields(x, shift, BITS: tl.constexpr, EMULATE: tl.constexpr):
    """[...] int16 halves of words -> fp16 [..., 8 / BITS planes] of the row that `shift` says."""
    if BITS == 8:
        if EMULATE:
            return _half_plane(x, shift, 0, 8)
        return tl.inline_asm_elementwise(
            HALF_8, "=&r,r,r,r", [x, shift], dtype=tl.float16, is_pure=True, pack=2
        )
    elif BITS == 4:
        if EMULATE:
            return tl.join(_half_plane(x, shift, 0, 4), _half_plane(x, shift, 1, 4))
        a, b = tl.inline_asm_elementwise(
            HALF_4, "=&r,=&r,r,r,r", [x, shift], dtype=(tl.float16, tl.float16), is_pure=True,
            pack=2,
        )  # fmt: skip
        return tl.join(a, b)
    else:
        if EMULATE:
            even = tl.join(_half_plane(x, shift, 0, 2), _half_plane(x, shift, 2, 2))
            return tl.join(even, tl.join(_half_plane(x, shift, 1, 2), _half_plane(x, shift, 3, 2)))
        a, b, c, d = tl.inline_asm_elementwise(
            HALF_2, "=&r,=&r,=&r,=&r,r,r,r", [x, shift],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
        return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def value_operand(halves, BITS: tl.constexpr, KW: tl.constexpr, EMULATE: tl.constexpr):
    """Words of 64 channels, some tokens -> right operand [tokens, 64 channels (r m g)], fp16."""
    PLANES: tl.constexpr = 8 // BITS
    WORDS: tl.constexpr = halves.shape[1] // 2
    S: tl.constexpr = WORDS * PLANES // 2
    shift = tl.arange(0, 256)[:, None] // 128 * 8 + tl.zeros([256, 2 * WORDS], tl.int32)
    x = _half_fields(halves, shift, BITS, EMULATE)
    x = tl.reshape(x, (2, 4, 8, 4, WORDS, 2, PLANES))  # r m g t w h i
    x = tl.permute(x, (4, 6, 3, 5, 0, 1, 2))  # w i t h r m g
    x = tl.reshape(x, (S, 2, 4, 2, 2, 4, 8))  # s half t h r m g
    if KW == 4:
        x = tl.permute(x, (0, 2, 1, 3, 4, 5, 6))
    return tl.reshape(x, (16 * S, 64))


@triton.jit
def in_columns(x, KW: tl.constexpr):
    """[.., 4 t, 4 S] by channel -> columns [.., 16 S] as `_right` has them."""
    R: tl.constexpr = x.shape[0]
    S: tl.constexpr = x.shape[2] // 4
    x = tl.reshape(x, (R, 4, S, 2, 2))  # t s half h
    if KW == 4:  # noqa: SIM108  (a constexpr branch)
        x = tl.permute(x, (0, 2, 1, 3, 4))
    else:
        x = tl.permute(x, (0, 2, 3, 1, 4))
    return tl.reshape(x, (R, 16 * S))


@triton.jit
def by_token(p, KW: tl.constexpr):
    """Probabilities [R, 128 (r tile m g)] -> either tile's [R, 64] as values' columns are."""
    R: tl.constexpr = p.shape[0]
    p = tl.reshape(p, (R, 2, 2, 4, 4, 2))  # r tile m t h
    if KW == 4:  # noqa: SIM108  (a constexpr branch)
        p = tl.permute(p, (0, 3, 4, 1, 5, 2))  # m t r h tile
    else:
        p = tl.permute(p, (0, 3, 1, 4, 5, 2))  # m r t h tile
    return tl.split(tl.reshape(p, (R, 64, 2)))


@triton.jit
def key_channel(i: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """Channels [4 t, WIDE / 4] of an operand of keys."""
    EACH: tl.constexpr = WIDE // 4
    return tl.arange(0, 4)[:, None] * (C // 4) + EACH * i + tl.arange(0, EACH)[None, :]


@triton.jit
def value_channel(chunk: tl.constexpr, C: tl.constexpr):
    """Channels [8 g, 8 (m r)] of a chunk of values."""
    return tl.arange(0, 8)[:, None] * (C // 8) + 8 * chunk + tl.arange(0, 8)[None, :]


@triton.jit
def tokens_of_scores():
    """Where a block's tokens are in thread order, in scores' order (r tile m g)."""
    i = tl.arange(0, 128)
    return i // 32 % 2 * 64 + i % 8 * 8 + i // 8 % 4 * 2 + i // 64


@triton.jit
def in_parts(w, PARTS: tl.constexpr):
    """Columns [R, 64] in one part, or in two."""
    if PARTS == 1:
        return (w,)
    else:
        R: tl.constexpr = w.shape[0]
        return tl.split(tl.permute(tl.reshape(w, (R, 2, 32)), (0, 2, 1)))
