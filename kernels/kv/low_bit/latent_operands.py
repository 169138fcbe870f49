"""Operands of attention over packed latents (latent_codes.py): words to right operands' registers.

    keys      channels x 64 tokens (r m g) of a tile: warp m has its own words
    values    tokens of a tile x 64 channels (r m g): warp m likewise

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


@triton.jit
def operand_at(kw, vw, i: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr):
    """The i-th operand of a tile's keys, and behind them of its values: halves of 128 threads.

    Four words a thread, of 2 bits two: of WIDE columns.
    """
    WIDE: tl.constexpr = 32 if BITS == 8 else 64
    WORDS: tl.constexpr = WIDE * BITS // 64  # of a thread
    KEYS: tl.constexpr = C // WIDE
    thread = tl.arange(0, 128)
    m, lane = thread // 32, thread % 32
    if i < KEYS:
        halves = kw.to(tl.pointer_type(tl.int16))
        number = m * (C * BITS // 64) + i * WORDS
    else:
        halves = vw.to(tl.pointer_type(tl.int16))
        j: tl.constexpr = i - KEYS
        number = (j // (64 // WIDE) * 4 + m) * BITS + j % (64 // WIDE) * WORDS
    at = number // 4 * 256 + lane * 8
    if WORDS == 2:
        at += number // 2 % 2 * 4
    return tl.load(halves + at[:, None] + tl.arange(0, 2 * WORDS)[None, :])


@triton.jit
def right_operand_of(halves, BITS: tl.constexpr, KW: tl.constexpr, EMULATE: tl.constexpr):
    """Words of 64 rows, some columns (kv_block.py) -> right operand [columns, 64 rows], fp16.

    Rows lie as (r m g), so that warp m has those of its words.
    """
    PLANES: tl.constexpr = 8 // BITS
    WORDS: tl.constexpr = halves.shape[1] // 2
    S: tl.constexpr = WORDS * PLANES // 2
    x = _fields(halves, BITS, EMULATE)
    x = tl.reshape(x, (4, 8, 4, WORDS, 2, 2, PLANES))  # m g t w h r i
    x = tl.permute(x, (3, 6, 2, 4, 5, 0, 1))  # w i t h r m g
    x = tl.reshape(x, (S, 2, 4, 2, 2, 4, 8))  # s half t h r m g
    if KW == 4:
        x = tl.permute(x, (0, 2, 1, 3, 4, 5, 6))
    return tl.reshape(x, (16 * S, 64))


@triton.jit
def in_columns(x, KW: tl.constexpr):
    """[.., 4 t, 4 S] by channel -> columns [.., 16 S] as `right_operand_of` has them."""
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
    """Probabilities [R, 64] in rows' order (r m g) -> in the columns' that values have."""
    R: tl.constexpr = p.shape[0]
    p = tl.reshape(p, (R, 2, 4, 4, 2))  # r m t h
    if KW == 4:  # noqa: SIM108  (a constexpr branch)
        p = tl.permute(p, (0, 2, 3, 1, 4))
    else:
        p = tl.permute(p, (0, 2, 1, 3, 4))
    return tl.reshape(p, (R, 64))


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
def tokens_of_rows():
    """A tile's tokens in rows' order (r m g)."""
    i = tl.arange(0, 64)
    return i // 8 % 4 * 16 + i % 8 * 2 + i // 32


@triton.jit
def in_parts(w, PARTS: tl.constexpr):
    """Columns [R, 64] in one part, or in two."""
    if PARTS == 1:
        return (w,)
    else:
        R: tl.constexpr = w.shape[0]
        return tl.split(tl.permute(tl.reshape(w, (R, 2, 32)), (0, 2, 1)))
