"""Triton body that rounds inputs of the portable products in the pass that makes them.

    norm, gate or activation of a row, or the row itself -> channel order -> codes and scales

`_made` is what makes them, `_codes` and `_compressed` the epilogue that all of them share. What is
made is rounded to x's dtype first, and a norm's sum is that of fused/rms_norm.py, in its order:
codes are those of two passes, bit for bit.

A program holds a row, so that a token's one scale (W8A8) never leaves it. Bytes: x read once (rows
in another order, or normed, a second time from the L1), a byte a channel and four a scale written.

M tokens, K channels, G groups of a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.gemm.experts.gated import gated


@triton.jit
def _nearest(x):
    """Round half to even: adding 1.5 * 2^23 leaves no bits below one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _codes(y, BITS: tl.constexpr, SIGNED: tl.constexpr, CLIP: tl.constexpr):
    """Atom's codes [G, 128 or 64] and scales [G] of y, whose last axis is a group.

    SIGNED: scales have the sign that gives the largest value the code -half, which symmetric
    grids leave unused. CLIP: the share of the largest value that the grid reaches.
    """
    half: tl.constexpr = 2 ** (BITS - 1)
    high = tl.max(y, axis=1)
    low = tl.min(y, axis=1)
    if SIGNED:
        scale = tl.where(high >= -low, high, low) * (CLIP / -half)
    else:
        scale = tl.maximum(high, -low) * (CLIP / (half - 1))
    tiny: tl.constexpr = 1.1754943508222875e-38
    scale = tl.where(tl.abs(scale) < tiny, tiny, scale)
    q = _nearest(tl.div_rn(y, tl.broadcast_to(scale[:, None], y.shape)))
    return tl.minimum(tl.maximum(q, -half), half - 1), scale


@triton.jit
def _compressed(y, DT: tl.constexpr):
    """int8 codes and scales of the rows y [G, K] as compressed-tensors defines them for DT.

    Quotients of 16-bit values are a product with the reciprocal: once rounded to 16 bits they are
    those of a division, whatever the two are (tests/kernels/atom/test_atom_interpret.py).
    """
    scale = tl.maximum(tl.max(y, axis=1), -tl.min(y, axis=1))
    scale = tl.div_rn(scale, scale * 0.0 + 127.5).to(DT).to(tl.float32)
    eps: tl.constexpr = (
        0.0009765625 if tl.float16 == DT else 0.0078125 if tl.bfloat16 == DT else 2.0**-23
    )
    scale = tl.where(scale == 0.0, eps, scale)
    if tl.float32 == DT:
        q = tl.div_rn(y, tl.broadcast_to(scale[:, None], y.shape))
    else:
        # The reciprocal of a number below 2^-126 is none.
        larger = tl.where(scale < 2.0**-100, 2.0**64, 1.0)
        q = y * larger[:, None] * tl.div_rn(scale * 0.0 + 1.0, scale * larger)[:, None]
    q = _nearest(q.to(DT).to(tl.float32))
    return tl.minimum(tl.maximum(q, -128.0), 127.0), scale


@triton.jit
def _channels(INDEX, place, live, HAS_INDEX: tl.constexpr):
    """Which of a row's channels stand at places."""
    return tl.load(INDEX + place, mask=live, other=0) if HAS_INDEX else place


@triton.jit
def _factor(x_row, columns, eps, MAKING: tl.constexpr, BLOCK: tl.constexpr):
    """What an RMSNorm multiplies a row by."""
    factor = 1.0
    if MAKING == "rms":
        column = tl.arange(0, BLOCK)
        x = tl.load(x_row + column, mask=column < columns, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    return factor


@triton.jit
def _made(x_row, WEIGHT, channel, live, columns, factor, DT: tl.constexpr, MAKING: tl.constexpr):
    """What a product takes at channels, in float32, as DT holds it; zero where not live."""
    y = tl.load(x_row + channel, mask=live, other=0.0).to(tl.float32)
    if MAKING == "rms":
        y = y * factor * tl.load(WEIGHT + channel, mask=live, other=0.0).to(tl.float32)
    elif MAKING == "silu":
        up = tl.load(x_row + columns + channel, mask=live, other=0.0).to(tl.float32)
        y = gated(y, up, 0.0, 1.0, "silu")
    elif MAKING == "relu":
        y = tl.maximum(y, 0.0)
    return tl.where(live, y.to(DT).to(tl.float32), 0.0)


@triton.jit
def round_input_kernel(
    X,
    WEIGHT,
    INDEX,
    CODES,
    SCALES,
    columns,
    normal,
    outliers,
    x_stride,
    eps,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    CLIP: tl.constexpr,
    MAKING: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    COMPRESSED: tl.constexpr,
):
    """Make a token's channels and round them: normal ones by groups, then the outliers.

    MAKING: "none", an RMSNorm "rms", "silu" of [gate | up] of `columns` each, "relu".
    Channels come in the order of INDEX.
    """
    DT: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_row = X + row * x_stride
    # normal channels, all groups of the row at once
    within = tl.arange(0, BLOCK_GROUP)[None, :]
    place = tl.arange(0, BLOCK_G)[:, None] * GROUP + within
    live = (place < normal) & (within < GROUP)
    channel = _channels(INDEX, place, live, HAS_INDEX)
    factor = _factor(x_row, columns, eps, MAKING, BLOCK)
    y = _made(x_row, WEIGHT, channel, live, columns, factor, DT, MAKING)
    if COMPRESSED:
        q, scale = _compressed(y, DT)
    else:
        q, scale = _codes(y, BITS, SIGNED, CLIP)
    width = GROUPS * GROUP
    code_row = CODES + row * (width + (outliers > 0) * 128)
    scale_row = SCALES + row * (GROUPS + 1)
    groups = tl.arange(0, BLOCK_G)
    tl.store(code_row + place, q.to(tl.int8), mask=(place < width) & (within < GROUP))
    tl.store(scale_row + groups, scale, mask=groups < GROUPS)

    # outliers: 8 bits, one scale
    if outliers > 0:
        slot = tl.arange(0, 128)[None, :]
        there = slot < outliers
        kept = _channels(INDEX, normal + slot, there, HAS_INDEX)
        wide = _made(x_row, WEIGHT, kept, there, columns, factor, DT, MAKING)
        kept_q, kept_scale = _codes(wide, 8, False, 1.0)
        tl.store(code_row + width + slot, kept_q.to(tl.int8))
        tl.store(scale_row + GROUPS + tl.zeros((1,), tl.int32), kept_scale)
