"""Triton bodies that round W4A4's inputs where they are made, for groups of 128 channels.

    RMSNorm, LayerNorm or nothing -> channel order -> codes and scales     norm_round_kernel
    SiLU-mul, ReLU or GELU -> rotation if asked -> codes and scales        act_round_kernel

A program holds whole groups: a group's scale never leaves it. What is written is what the product
eats (`FORM` 0 or 1):

    0 codes    [M, (G + 1) * 128] bytes: codes * 2^-9 as e4m3, the outliers' as int8; SCALES
               float32 [G, MS], OUTLIER float32 [MS]: the outliers' (wgmma_codes.cu). A tile of
               tokens reads a run of each
    1 restored [M, (G + 3) * 128] in x's dtype: code * scale, the outliers three times, in the
               order of the fragment form (weights/atom_weight.py), for the weight-only kernels

`steps_kernel` turns form 0 into int8 values code * integer, for integer scales.

Bytes: one byte or two a channel written. x is read once, but where few tokens' norms are spread
over programs of a few groups each: every one of those sums the row itself, and reads its channels
where they lie.

M tokens, K channels, G groups, O outliers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _round(y, is_outlier, BITS: tl.constexpr, SIGNED: tl.constexpr, CLIP: tl.constexpr):
    """Codes as floats and scales of the groups y [R, 128]; outliers have 8 bits, no clip.

    16 bits are not rounded: y and whatever scale.
    """
    if BITS == 16:
        return y, tl.max(y, axis=1)
    half: tl.constexpr = 2 ** (BITS - 1)
    high = tl.max(y, axis=1)
    low = tl.min(y, axis=1)
    most = tl.maximum(high, -low)
    if SIGNED:
        scale = tl.where(high >= -low, high, low) * (CLIP / -half)
    else:
        scale = most * (CLIP / (half - 1))
    scale = tl.where(is_outlier, tl.div_rn(most, most * 0.0 + 127.0), scale)
    tiny: tl.constexpr = 1.1754943508222875e-38
    scale = tl.where(tl.abs(scale) < tiny, tiny, scale)
    limit = tl.where(is_outlier, 128.0, half)[:, None]
    # y / scale rounded as a division is, by a reciprocal and one correction: values of bfloat16 do
    # lie on edges (2.5 steps), and a code beside the twin's is a large error where a group is wide.
    wide = tl.broadcast_to(scale[:, None], y.shape)
    inverse = tl.broadcast_to(tl.div_rn(scale * 0.0 + 1.0, scale)[:, None], y.shape)
    q = y * inverse
    q = tl.fma(tl.fma(-q, wide, y), inverse, q)
    # Adding 1.5 * 2^23 rounds half to even.
    q = (q + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(q, -limit), limit - 1), scale


@triton.jit
def _bytes(q, is_outlier):
    """The codes of normal groups, times 2^-9, as bytes of e4m3, of outliers as int8."""
    small = (q * 0.001953125).to(tl.float8e4nv).to(tl.int8, bitcast=True)
    return tl.where(is_outlier[:, None], q.to(tl.int8), small)


@triton.jit
def _store(
    q,
    scale,
    group,
    live,
    row,
    OUT,
    SCALES,
    OUTLIER,
    MS,
    G: tl.constexpr,
    OUTLIERS: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Store groups [R, 128] of tokens `row` [R], group values `group` [R]; G is the outliers'."""
    p = tl.arange(0, 128)[None, :]
    is_outlier = group == G
    if FORM == 0:
        width: tl.constexpr = (G + (1 if OUTLIERS else 0)) * 128
        at = row.to(tl.int64)[:, None] * width + group[:, None] * 128 + p
        tl.store(OUT + at, _bytes(q, is_outlier), mask=live[:, None])
        tl.store(SCALES + group * MS + row, scale, mask=live & (group < G))
        if OUTLIERS:
            tl.store(OUTLIER + row, scale, mask=live & is_outlier)
    else:
        wide: tl.constexpr = (G + (3 if OUTLIERS else 0)) * 128
        # Where a channel stands in the fragment form: weights/atom_weight.py `fragment_order`.
        k = 64 * (p % 2) + 16 * (p // 32) + 8 * (p // 16 % 2) + 2 * (p // 4 % 4) + p % 4 // 2
        at = row.to(tl.int64)[:, None] * wide + group[:, None] * 128 + k
        value = (q if BITS == 16 else q * scale[:, None]).to(OUT.dtype.element_ty)
        tl.store(OUT + at, value, mask=live[:, None])
        if OUTLIERS:
            again = (live & is_outlier)[:, None]
            tl.store(OUT + at + 128, value, mask=again)
            tl.store(OUT + at + 256, value, mask=again)


@triton.jit(do_not_specialize=["M"])
def norm_round_kernel(
    X,
    WEIGHT,
    BIAS,
    INDEX,
    OUT,
    SCALES,
    OUTLIER,
    M,
    K,
    normal,
    x_stride,
    MS,
    eps,
    G: tl.constexpr,
    OUTLIERS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    CLIP: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_G groups of a token; NORM 0 leaves x, 1 is RMSNorm, 2 LayerNorm.

    WHOLE: all groups, and x is put in order through shared memory; else it is read in order, too.
    H200, of torch's RMSNorm alone, 4 groups a program: 0.41 at M = 1, 0.72 at 64 (whole: 1.6, 2.3).
    """
    row = tl.program_id(0)
    x_row = X + row.to(tl.int64) * x_stride
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    is_outlier = group == G
    p = tl.arange(0, 128)[None, :]
    slot = group[:, None] * 128 + p
    place = tl.where(is_outlier[:, None], normal + p, slot)
    real = tl.where(is_outlier[:, None], p < OUTLIERS, slot < normal)
    real = real & (group < G + (1 if OUTLIERS > 0 else 0))[:, None]
    channel = tl.where(real, place, 0)
    if HAS_INDEX:
        channel = tl.load(INDEX + channel)
    if NORM > 0:
        weight = tl.load(WEIGHT + channel).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(BIAS + channel).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, BLOCK_K)
    inside = column < K
    if NORM > 0 or WHOLE:
        x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    if WHOLE:
        y = tl.reshape(tl.gather(x, tl.reshape(channel, (BLOCK_G * 128,)), 0), (BLOCK_G, 128))
    else:
        y = tl.load(x_row + channel).to(tl.float32)
    if NORM == 2:
        mean = tl.sum(x, axis=0) / K
        x = tl.where(inside, x - mean, 0.0)
        y = y - mean
    if NORM > 0:
        y = y * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / K + eps)) * weight
        if HAS_BIAS:
            y += bias
    y = tl.where(real, y, 0.0)
    q, scale = _round(y, is_outlier, BITS, SIGNED, CLIP)
    live = group < G + (1 if OUTLIERS > 0 else 0)
    rows = row + group * 0
    _store(q, scale, group, live, rows, OUT, SCALES, OUTLIER, MS, G, OUTLIERS > 0, BITS, FORM)


@triton.jit
def _turned(y, R: tl.constexpr):
    """y [R, 128] times the signs of the Hadamard matrix: seven rounds of sums and differences."""
    for i in tl.static_range(7):
        pairs = tl.permute(tl.reshape(y, (R, 64 >> i, 2, 1 << i)), (0, 1, 3, 2))
        a, b = tl.split(pairs)
        y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, 128))
    return y


@triton.jit(do_not_specialize=["M"])
def act_round_kernel(
    X,
    OUT,
    SCALES,
    OUTLIER,
    M,
    F,
    normal,
    x_stride,
    MS,
    G: tl.constexpr,
    OUTLIERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    CLIP: tl.constexpr,
    ACT: tl.constexpr,
    ROTATE: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A group of BLOCK_M tokens; x is [M, 2F] for "silu". One warp: no barriers.

    ACT: "silu" silu(gate) * up, "relu", "gelu" (tanh form), "none"; rounded to x's dtype. ROTATE
    multiplies a group by the Hadamard matrix.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(1)
    is_outlier = group == G
    channel = tl.where(is_outlier, normal, group * 128) + tl.arange(0, 128)
    live = channel < tl.where(is_outlier, normal + OUTLIERS, normal)
    keep = (row < M)[:, None] & live[None, :]
    at = row.to(tl.int64)[:, None] * x_stride + channel[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.load(X + at, mask=keep, other=0.0).to(tl.float32)
    if ACT == "silu":
        y = y / (1.0 + tl.exp(-y)) * tl.load(X + at + F, mask=keep, other=0.0).to(tl.float32)
    elif ACT == "relu":
        y = tl.maximum(y, 0.0)
    elif ACT == "gelu":
        inner = 1.5957691216057308 * (y + 0.044715 * y * y * y)
        y = y / (1.0 + tl.exp(-inner))
    y = y.to(X.dtype.element_ty).to(tl.float32)
    if ROTATE:
        y = tl.where(is_outlier, y, _turned(y, BLOCK_M) * 0.08838834764831845)
    groups = row * 0 + group
    q, scale = _round(y, groups == G, BITS, SIGNED, CLIP)
    there = row < M
    _store(q, scale, groups, there, row, OUT, SCALES, OUTLIER, MS, G, OUTLIERS > 0, BITS, FORM)


@triton.jit
def _times(byte, steps):
    """code * steps of signs and counts, four a word, by way of code + 8 and code * steps + 128."""
    return tl.inline_asm_elementwise(
        "{.reg .b32 t, s; and.b32 t, $1, 0x0f0f0f0f; shr.u32 s, $1, 7; and.b32 s, s, 0x01010101;"
        "mul.lo.u32 s, s, 15; xor.b32 t, t, s; add.u32 t, t, 0x08080808; sub.u32 t, t, s;"
        "mad.lo.u32 t, t, $2, $6; xor.b32 $0, t, 0x80808080;}",
        "=r,r,r,r,r,r,r,r,r,r",
        [byte, steps, steps * (-0x08080808) + (-0x7F7F7F80)],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit(do_not_specialize=["M"])
def steps_kernel(
    CODES8,
    SCALES,
    UNIT,
    M,
    MS,
    G: tl.constexpr,
    OUTLIERS: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Codes of form 0, in their place: times integers 0 to STEPS, their scales in units.

    CODES8 [M, (G + 1) * 128]; UNIT [MS] float32. BLOCK_G groups of BLOCK_M tokens; the unit is that
    of all G <= ALL groups. The twin is `integer_scales` of formats/atom_rounding.py.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    every = tl.minimum(tl.arange(0, ALL), G - 1)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    most = tl.max(tl.abs(tl.load(SCALES + every[:, None] * MS + row[None, :])), axis=0)
    unit = tl.maximum(most * (1.0 / STEPS), 1.1754943508222875e-38)
    if tl.program_id(1) == 0:
        tl.store(UNIT + row, unit, mask=row < M)
    scale = tl.load(SCALES + tl.minimum(group, G - 1)[None, :] * MS + row[:, None])
    ratio = tl.div_rn(tl.abs(scale), tl.broadcast_to(unit[:, None], scale.shape))
    # Adding 1.5 * 2^23 rounds half to even.
    ratio = tl.minimum(tl.maximum((ratio + 12582912.0) - 12582912.0, 0.0), STEPS)
    steps = tl.where(scale < 0, -ratio, ratio).to(tl.int32)[:, :, None]
    width: tl.constexpr = (G + (1 if OUTLIERS else 0)) * 128
    at = row.to(tl.int64)[:, None, None] * width + group[None, :, None] * 128
    at += tl.arange(0, 128)[None, None, :]
    live = ((row < M)[:, None] & (group < G)[None, :])[:, :, None]
    # e4m3 values to 2^-6 in size are a sign and a count of 2^-9.
    byte = tl.load(CODES8 + at, mask=live, other=0)
    if INTERPRET:
        code = tl.where(byte < 0, -(byte & 127), byte)
        made = (code.to(tl.int32) * steps).to(tl.int8)
    else:
        made = _times(byte, tl.broadcast_to(steps, byte.shape))
    tl.store(CODES8 + at, made, mask=live)
