"""Triton pieces shared by the weight kernels: packed words to tensor-core operands, no shuffles.

`load_tile` fetches words, scales and zeros as they are stored; `unpack` makes them the left operand
of a product (unpack_assembly.py; shifts and masks in the interpreter, which lacks inline assembly);
`finish` adds bias and residual and stores y.

Legend: a tile is BN = 16 * BH * WM rows (rows split over WM warps) of one k-group, or, BATCH,
16 * BH rows of WM k-groups (k split over the warps). lane = 4 r + c. DT: float16 or bfloat16.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.gemm.operands.unpack_assembly import (
    B3,
    B3Z,
    B4,
    B4Z,
    B8,
    B8Z,
    BZ3,
    BZ4,
    BZ8,
    F3,
    F3Z,
    F4,
    F4Z,
    F8,
    F8Z,
    FZ3,
    FZ4,
    FZ8,
    O8I1,
    O8I2,
    O8I3,
    O8I4,
    O8I6,
    O32I3,
    O32I7,
    O32I9,
)
from llmpq.kernels.gemm.operands.unpack_shifts import (
    interpret3,
    interpret4,
    interpret8,
    join8,
    join32,
)


@triton.jit
def load_words(
    base,
    blocks,
    groups,
    group,
    WORDS: tl.constexpr,
    PART: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Words of a tile, flat. 4 bit (WORDS 256): (bh, jj/2, warp, lane, 4). 3 bit (WORDS 192), word
    PART of each triple: (bh, warp, lane, h). `blocks` are left from `base` on, later ones clamped.
    """
    if WORDS == 256:
        f = tl.arange(0, BH * WM * 256)
        inner = f // (128 * WM) % 2 * 128 + f % 128
        warp, bh = f // 128 % WM, f // (256 * WM)
    else:
        f = tl.arange(0, BH * WM * 64)
        inner = PART * 64 + f % 64
        warp, bh = f // 64 % WM, f // (64 * WM)
    if BATCH:
        at = tl.minimum(bh, blocks - 1) * groups * WORDS + warp * WORDS + inner
    else:
        at = tl.minimum(bh * WM + warp, blocks - 1) * groups * WORDS + inner
    # The group stays out of `at`, so that all groups share one address a lane.
    return tl.load(base + group * WORDS + at, eviction_policy="evict_first")


@triton.jit
def load_pairs(
    base, blocks, groups, group, BH: tl.constexpr, WM: tl.constexpr, BATCH: tl.constexpr
):
    """Scales (or zeros) of rows r and r + 8 as one 32-bit pair a lane: (bh, warp, r, c)."""
    f = tl.arange(0, BH * WM * 32)
    warp, bh = f // 32 % WM, f // (32 * WM)
    if BATCH:
        at = tl.minimum(bh, blocks - 1) * groups * 8 + warp * 8 + f // 4 % 8
    else:
        at = tl.minimum(bh * WM + warp, blocks - 1) * groups * 8 + f // 4 % 8
    return tl.load(base + group * 8 + at)


@triton.jit
def pair_floats(pairs, DT: tl.constexpr):
    """The two values of 32-bit pairs, as float32."""
    if DT == tl.float16:
        low = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = ((pairs >> 16) << 16).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def accumulator_scale(
    pairs, DT: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr, BATCH: tl.constexpr
):
    """Scale pairs as float32 [(warp,) rows, 1, 4, 1]: an accumulator's columns are (n/8, c, 2)."""
    low, high = pair_floats(pairs, DT)
    s = tl.reshape(tl.join(low, high), (BH, WM, 8, 4, 2))
    if BATCH:
        return tl.reshape(tl.permute(s, (1, 0, 4, 2, 3)), (WM, BH * 16, 1, 4, 1))
    else:
        return tl.reshape(tl.permute(s, (0, 1, 4, 2, 3)), (BH * WM * 16, 1, 4, 1))


@triton.jit
def spread(t, BITS: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr):
    """Per-lane values (bh, warp, r, c) repeated for each word of the lane."""
    if BITS == 3:
        t = tl.reshape(t, (BH, WM, 8, 4, 1))
        return tl.reshape(tl.broadcast_to(t, (BH, WM, 8, 4, 2)), (BH * WM * 64,))
    else:
        t = tl.reshape(t, (BH, 1, WM, 8, 4, 1))
        return tl.reshape(tl.broadcast_to(t, (BH, 2, WM, 8, 4, 4)), (BH * WM * 256,))


@triton.jit
def zero_constants(pairs, BITS: tl.constexpr, DT: tl.constexpr, INTERPRET: tl.constexpr):
    """What `unpack` needs of a tile's zero pairs, per lane: a tuple of tensors."""
    if INTERPRET:
        return pair_floats(pairs, DT)
    elif DT == tl.float16:
        if BITS == 4:
            return tl.inline_asm_elementwise(
                FZ4, "=r,=r,r", [pairs], dtype=(tl.int32,) * 2, is_pure=True, pack=1
            )
        elif BITS == 8:
            return tl.inline_asm_elementwise(
                FZ8, "=r,=r,r", [pairs], dtype=(tl.int32,) * 2, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                FZ3, "=r,=r,=r,=r,=r,=r,r", [pairs], dtype=(tl.int32,) * 6, is_pure=True, pack=1
            )
    elif BITS == 8:
        return tl.inline_asm_elementwise(
            BZ8, "=r,=r,=r,=r,r", [pairs], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    elif BITS == 3:
        return tl.inline_asm_elementwise(
            BZ3, "=r,=r,=r,=r,r", [pairs], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            BZ4, "=r,=r,r", [pairs], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )


@triton.jit
def unpack(
    words,
    zeros,
    BITS: tl.constexpr,
    DT: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Words (a tuple) and `zero_constants` to code - zero as an operand [(warp,) rows, 128 k].

    KWIDTH4 orders k inside 16 as (c, k3, k0): mma.sync operands that come from a join hold four
    neighbours of that order a thread (Triton's kWidth); otherwise k lies as stored, (k3, c, k0).
    """
    if INTERPRET:
        if SYMMETRIC:
            half: tl.constexpr = 1 << (BITS - 1)
            z = (half, half)
        else:
            z = (spread(zeros[0], BITS, BH, WM), spread(zeros[1], BITS, BH, WM))
        if BITS == 4:
            t = interpret4(words[0], z, DT)
        elif BITS == 8:
            t = interpret8(words[0], words[1], z, DT)
        else:
            t = join32(interpret3(words, z, DT))
    elif BITS == 3:
        if SYMMETRIC:
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    F3,
                    O32I3,
                    [words[0], words[1], words[2]],
                    dtype=(tl.float16,) * 32,
                    is_pure=True,
                    pack=1,
                )
            else:
                o = tl.inline_asm_elementwise(
                    B3,
                    O32I3,
                    [words[0], words[1], words[2]],
                    dtype=(tl.bfloat16,) * 32,
                    is_pure=True,
                    pack=1,
                )
        elif DT == tl.float16:
            z0, z1, y0 = (
                spread(zeros[0], BITS, BH, WM),
                spread(zeros[1], BITS, BH, WM),
                spread(zeros[2], BITS, BH, WM),
            )
            y1, y2, z2 = (
                spread(zeros[3], BITS, BH, WM),
                spread(zeros[4], BITS, BH, WM),
                spread(zeros[5], BITS, BH, WM),
            )
            o = tl.inline_asm_elementwise(
                F3Z,
                O32I9,
                [words[0], words[1], words[2], z0, z1, y0, y1, y2, z2],
                dtype=(tl.float16,) * 32,
                is_pure=True,
                pack=1,
            )
        else:
            z0, z1 = spread(zeros[0], BITS, BH, WM), spread(zeros[1], BITS, BH, WM)
            y0, y1 = spread(zeros[2], BITS, BH, WM), spread(zeros[3], BITS, BH, WM)
            o = tl.inline_asm_elementwise(
                B3Z,
                O32I7,
                [words[0], words[1], words[2], z0, z1, y0, y1],
                dtype=(tl.bfloat16,) * 32,
                is_pure=True,
                pack=1,
            )
        t = join32(o)
    elif BITS == 4:
        if SYMMETRIC:
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    F4, O8I1, [words[0]], dtype=(tl.float16,) * 8, is_pure=True, pack=1
                )
            else:
                o = tl.inline_asm_elementwise(
                    B4, O8I1, [words[0]], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
                )
        else:
            z0, z1 = spread(zeros[0], BITS, BH, WM), spread(zeros[1], BITS, BH, WM)
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    F4Z, O8I3, [words[0], z0, z1], dtype=(tl.float16,) * 8, is_pure=True, pack=1
                )
            else:
                o = tl.inline_asm_elementwise(
                    B4Z, O8I3, [words[0], z0, z1], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
                )
        t = join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
    else:
        if SYMMETRIC:
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    F8, O8I2, [words[0], words[1]], dtype=(tl.float16,) * 8, is_pure=True, pack=1
                )
            else:
                o = tl.inline_asm_elementwise(
                    B8, O8I2, [words[0], words[1]], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
                )
        else:
            z0, z1 = spread(zeros[0], BITS, BH, WM), spread(zeros[1], BITS, BH, WM)
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    F8Z,
                    O8I4,
                    [words[0], words[1], z0, z1],
                    dtype=(tl.float16,) * 8,
                    is_pure=True,
                    pack=1,
                )
            else:
                y0, y1 = spread(zeros[2], BITS, BH, WM), spread(zeros[3], BITS, BH, WM)
                o = tl.inline_asm_elementwise(
                    B8Z,
                    O8I6,
                    [words[0], words[1], z0, z1, y0, y1],
                    dtype=(tl.bfloat16,) * 8,
                    is_pure=True,
                    pack=1,
                )
        t = join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
    return placed(t, BITS, BH, WM, KWIDTH4, BATCH)


@triton.jit
def placed(
    t,
    BITS: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    KWIDTH4: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Joined values of words as an operand [(warp,) rows, 128 k]."""
    # To (warp, bh, r3, r | h, jj/2, jj%2, k3, c, k0), then the warp and k3 where they belong.
    if BITS == 3:  # bh, warp, r, c, h | k0, r3, k3, jj%2, jj/2
        t = tl.permute(
            tl.reshape(t, (BH, WM, 8, 4, 2, 2, 2, 2, 2, 2)), (1, 0, 6, 2, 4, 9, 8, 7, 3, 5)
        )
    else:  # bh, jj/2, warp, r, c, jj%2, k3 | k0, r3, h
        t = tl.permute(
            tl.reshape(t, (BH, 2, WM, 8, 4, 2, 2, 2, 2, 2)), (2, 0, 8, 3, 9, 1, 5, 6, 4, 7)
        )
    if KWIDTH4:
        t = tl.permute(t, (0, 1, 2, 3, 4, 5, 6, 8, 7, 9))
    if BATCH:
        return tl.reshape(t, (WM, BH * 16, 128))
    else:
        t = tl.permute(t, (1, 0, 2, 3, 4, 5, 6, 7, 8, 9))
        return tl.reshape(t, (BH * WM * 16, 128))


@triton.jit
def load_tile(
    P0,
    P1,
    S,
    Z,
    blocks,
    groups,
    group,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Everything a tile needs from memory: (words, scale pairs, zero pairs)."""
    if BITS == 3:
        words = (
            load_words(P0, blocks, groups, group, 192, 0, BH, WM, BATCH),
            load_words(P0, blocks, groups, group, 192, 1, BH, WM, BATCH),
            load_words(P0, blocks, groups, group, 192, 2, BH, WM, BATCH),
        )
    elif BITS == 8:
        words = (
            load_words(P0, blocks, groups, group, 256, 0, BH, WM, BATCH),
            load_words(P1, blocks, groups, group, 256, 0, BH, WM, BATCH),
        )
    else:
        words = (load_words(P0, blocks, groups, group, 256, 0, BH, WM, BATCH),)
    scale = 0
    zero = 0
    if GROUPED:
        scale = load_pairs(S, blocks, groups, group, BH, WM, BATCH)
        if not SYMMETRIC:
            zero = load_pairs(Z, blocks, groups, group, BH, WM, BATCH)
    return words, scale, zero


@triton.jit
def dot(w, x, acc, INTERPRET: tl.constexpr):
    """acc + w x; the interpreter multiplies bfloat16 as if it were integers, so widen there."""
    if INTERPRET:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc)
    else:
        return tl.dot(w, x, acc)


@triton.jit
def finish(
    acc,
    Y,
    BIAS,
    RESIDUAL,
    n0,
    m0,
    M,
    N,
    last,
    BN: tl.constexpr,
    BM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Add bias and residual to acc [BN, BM] and store it, transposed, into y [M, N]."""
    n = n0 + tl.arange(0, BN)
    m = m0 + tl.arange(0, BM)
    at = m[None, :].to(tl.int64) * N + n[:, None]
    keep = (m < M)[None, :] & (n < last)[:, None]
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=n < last, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        acc += tl.load(RESIDUAL + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=keep)
