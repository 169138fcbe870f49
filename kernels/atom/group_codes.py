"""Shared by round_norm.py and round_activation.py, in Gluon: groups to codes and scales.

A code is written as the e4m3 number code * 2^-9. Up to 2^-5 the values of e4m3 lie 2^-9 apart, so
that the conversion to e4m3 is the rounding to the nearest code, ties to even. Outliers are int8.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108
# (Gluon bodies are not Python.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def codes_of(y, is_outlier, SIGNED: gl.constexpr, CLIP: gl.constexpr):
    """Of groups y [R, 128]: y / scale (times 2^-9 but for outliers), to be rounded; and the scale.

    As a division rounds it, by a reciprocal and one correction: round_kernels.py says why.
    """
    high = gl.max(y, axis=1)
    low = gl.min(y, axis=1)
    most = gl.maximum(high, -low)
    if SIGNED:
        scale = gl.where(high >= -low, high, low) * (CLIP / -8)
    else:
        scale = most * (CLIP / 7)
    scale = gl.where(is_outlier, gl.div_rn(most, most * 0.0 + 127.0), scale)
    tiny: gl.constexpr = 1.1754943508222875e-38
    scale = gl.where(gl.abs(scale) < tiny, tiny, scale)
    step = scale * gl.where(is_outlier, 1.0, 512.0)
    inverse = gl.div_rn(scale * 0.0 + 1.0, step)[:, None].broadcast_to(y.shape)
    q = y * inverse
    q = gl.fma(gl.fma(-q, step[:, None].broadcast_to(y.shape), y), inverse, q)
    q = gl.minimum(q, gl.where(is_outlier, 127.0, 7 / 512)[:, None])
    if (8.0 if SIGNED else 7.0) / CLIP > 8.5:
        q = gl.maximum(q, gl.where(is_outlier, -127.0, -8 / 512)[:, None])
    return q, scale


@gluon.jit
def bytes_of(q, is_outlier):
    """Round to bytes, four a word; `is_outlier` int32 as large as q. Outliers: the low byte of
    q + 1.5 * 2^23 is q as an integer."""
    return gl.inline_asm_elementwise(
        "{.reg .pred p; .reg .b16 lo, hi; .reg .b32 a, b, c, d;"
        "setp.ne.b32 p, $5, 0;"
        "cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;"
        "mov.b32 $0, {lo, hi}; @!p bra DONE;"
        "add.rn.f32 a, $1, 0f4B400000; add.rn.f32 b, $2, 0f4B400000;"
        "add.rn.f32 c, $3, 0f4B400000; add.rn.f32 d, $4, 0f4B400000;"
        "prmt.b32 a, a, b, 0x0040; prmt.b32 c, c, d, 0x0040; prmt.b32 $0, a, c, 0x5410;"
        "DONE: }",
        "=r,f,f,f,f,r,r,r,r",
        [q, is_outlier],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )
