"""Norm, channel order and rounding of many tokens on Hopper, in Gluon: a warp owns whole groups.

    row of x -> shared memory -> in order, 16 channels of a group a lane -> weight -> codes, scale

The same sums as `norm_round_kernel` of round_kernels.py (its FORM 0) but for the order of a
product: the factor of an RMSNorm is a token's, so that it goes into the scales and leaves the codes
alone, and no code waits for it. A program asks for the next token's row before it rounds this one.

Bytes: x read once, one byte a channel and four a group written. H200, of torch's RMSNorm alone:
1.24 at M = 1024, 1.12 at 4096. No faster: 24 warps a multiprocessor instead of 16, by registers
spared (1.47, 1.20); a row as words of two channels (1.25, 1.11).

M tokens, K channels, G groups.
"""

# mypy: ignore-errors
# (Gluon bodies are not Python.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.atom.group_codes import bytes_of, codes_of


@gluon.jit(do_not_specialize=["M"])
def norm_codes_kernel(
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
    G: gl.constexpr,
    OUTLIERS: gl.constexpr,
    BLOCK: gl.constexpr,
    FULL: gl.constexpr,
    SIGNED: gl.constexpr,
    CLIP: gl.constexpr,
    NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_INDEX: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """NORM 0 leaves x, 1 is RMSNorm, 2 LayerNorm; FULL: BLOCK channels, none of padding."""
    lying: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    ordered: gl.constexpr = gl.BlockedLayout([16], [32], [num_warps], [0])
    grouped: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    width: gl.constexpr = (G + (1 if OUTLIERS > 0 else 0)) * 128
    column = gl.arange(0, BLOCK, layout=lying)
    inside = column < K
    slot = gl.arange(0, BLOCK, layout=ordered)
    last = slot // 128 == G
    channel = gl.where(last, normal + slot % 128, slot)
    real = gl.where(last, slot % 128 < OUTLIERS, slot < normal) & (slot < width)
    channel = gl.where(real, channel, 0)
    if HAS_INDEX:
        channel = gl.load(INDEX + channel)
    if NORM > 0:
        weight = gl.load(WEIGHT + channel).to(gl.float32)
        if HAS_BIAS:
            bias = gl.load(BIAS + channel).to(gl.float32)
    group = gl.arange(0, BLOCK // 128, layout=gl.SliceLayout(1, grouped))
    p = gl.arange(0, 128, layout=gl.SliceLayout(0, grouped))
    is_outlier = group == G
    outlier_byte = is_outlier.to(gl.int32)[:, None] + p[None, :] * 0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    raw = gl.load(X + first.to(gl.int64) * x_stride + column, mask=inside & (first < M), other=0.0)
    for row in range(first, M, programs):
        later = row + programs
        there = later + column * 0 < M
        if not FULL:
            there = there & inside
        raw_next = gl.load(X + later.to(gl.int64) * x_stride + column, mask=there, other=0.0)
        y = gl.gather(raw, channel, axis=0).to(gl.float32)
        factor = 1.0
        if NORM > 0:
            x = raw.to(gl.float32)
            if NORM == 2:
                mean = gl.sum(x, axis=0) / K
                x = gl.where(inside, x - mean, 0.0)
                y = y - mean
            factor = 1.0 / gl.sqrt_rn(gl.sum(x * x, axis=0) / K + eps)
            if HAS_BIAS:
                y = y * factor * weight + bias
                factor = 1.0
            else:
                y = y * weight
        if not FULL:
            y = gl.where(real, y, 0.0)
        y = gl.convert_layout(y.reshape((BLOCK // 128, 128)), grouped, assert_trivial=True)
        q, scale = codes_of(y, is_outlier, SIGNED, CLIP)
        at = row.to(gl.int64) * width + group[:, None] * 128 + p[None, :]
        if FULL:
            gl.store(OUT + at, bytes_of(q, outlier_byte))
        else:
            gl.store(OUT + at, bytes_of(q, outlier_byte), mask=(group * 128 < width)[:, None])
        scale *= factor
        if OUTLIERS > 0:
            gl.store(OUTLIER + row + group * 0, scale, mask=is_outlier)
        gl.store(SCALES + group * MS + row, scale, mask=group < G)
        raw = raw_next
