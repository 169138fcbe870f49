"""Norm, channel order and rounding of many tokens on Hopper, in Gluon: a warp owns whole groups.

    row of x -> norm -> shared memory -> in order, 16 channels of a group a lane -> codes, scale

The same sums as `norm_round_kernel` of atom_round.py (its FORM 0), whose layouts Triton chooses: it
spreads a group over warps, which meet at fourteen barriers a token (H200, M = 4096: 56 us).

Bytes: x read once, one byte a channel and a scale a group written.

M tokens, K channels, G groups.
"""

# mypy: ignore-errors
# (Gluon bodies are not Python.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit(do_not_specialize=["M"])
def norm_codes_kernel(
    X, WEIGHT, BIAS, INDEX, OUT, SCALES, OUTLIER, M, K, normal, x_stride, MS, eps,
    G: gl.constexpr, OUTLIERS: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr,
    BITS: gl.constexpr, SIGNED: gl.constexpr, CLIP: gl.constexpr, NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_INDEX: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """ROWS tokens one after the other; NORM 0 leaves x, 1 is RMSNorm, 2 LayerNorm."""
    lying: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    ordered: gl.constexpr = gl.BlockedLayout([16], [32], [num_warps], [0])
    grouped: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    half: gl.constexpr = 2 ** (BITS - 1)
    width: gl.constexpr = (G + (1 if OUTLIERS > 0 else 0)) * 128
    column = gl.arange(0, BLOCK, layout=lying)
    inside = column < K
    if NORM > 0:
        weight = gl.load(WEIGHT + column, mask=inside, other=0.0).to(gl.float32)
        if HAS_BIAS:
            bias = gl.load(BIAS + column, mask=inside, other=0.0).to(gl.float32)
    slot = gl.arange(0, BLOCK, layout=ordered)
    last = slot // 128 == G
    channel = gl.where(last, normal + slot % 128, slot)
    real = gl.where(last, slot % 128 < OUTLIERS, slot < normal) & (slot < width)
    channel = gl.where(real, channel, 0)
    if HAS_INDEX:
        channel = gl.load(INDEX + channel)
    group = gl.arange(0, BLOCK // 128, layout=gl.SliceLayout(1, grouped))
    p = gl.arange(0, 128, layout=gl.SliceLayout(0, grouped))
    is_outlier = group == G
    limit = gl.where(is_outlier, 128.0, half)
    for turn in range(ROWS):
        row = gl.program_id(0) * ROWS + turn
        x = gl.load(X + row.to(gl.int64) * x_stride + column, mask=inside & (row < M), other=0.0)
        x = x.to(gl.float32)
        if NORM == 2:
            x = gl.where(inside, x - gl.sum(x, axis=0) / K, 0.0)
        if NORM > 0:
            x = x * (1.0 / gl.sqrt_rn(gl.sum(x * x, axis=0) / K + eps)) * weight
            if HAS_BIAS:
                x += bias
        y = gl.where(real, gl.gather(x, channel, axis=0), 0.0)
        y = gl.convert_layout(y.reshape((BLOCK // 128, 128)), grouped, assert_trivial=True)
        high = gl.max(y, axis=1)
        low = gl.min(y, axis=1)
        most = gl.maximum(high, -low)
        if SIGNED:
            scale = gl.where(high >= -low, high, low) * (CLIP / -half)
        else:
            scale = most * (CLIP / (half - 1))
        scale = gl.where(is_outlier, gl.div_rn(most, most * 0.0 + 127.0), scale)
        tiny: gl.constexpr = 1.1754943508222875e-38
        scale = gl.where(gl.abs(scale) < tiny, tiny, scale)
        # y / scale as a division rounds it: atom_round.py.
        inverse = gl.div_rn(scale * 0.0 + 1.0, scale)
        q = y * inverse[:, None]
        q = gl.fma(gl.fma(-q, scale[:, None].broadcast_to(y.shape), y),
                   inverse[:, None].broadcast_to(y.shape), q)  # fmt: skip
        q = (q + 12582912.0) - 12582912.0
        q = gl.minimum(gl.maximum(q, -limit[:, None]), limit[:, None] - 1)
        small = q.to(gl.float8e4nv).to(gl.int8, bitcast=True)
        # The low byte of q + 1.5 * 2^23 is q as an integer.
        whole = (q + 12582912.0).to(gl.int32, bitcast=True).to(gl.int8)
        byte = gl.where(is_outlier[:, None], whole, small)
        live = (group * 128 < width) & (row < M)
        at = row.to(gl.int64) * width + group[:, None] * 128 + p[None, :]
        gl.store(OUT + at, byte, mask=live[:, None])
        rest = scale
        for i in gl.static_range(3):
            term = rest.to(gl.bfloat16)
            gl.store(SCALES + (3 * group + i) * MS + row, term, mask=live & (group < G))
            rest -= term.to(gl.float32)
        if OUTLIERS > 0:
            gl.store(OUTLIER + row + group * 0, scale, mask=live & is_outlier)
