"""Packed words to operands that carry their scales, for tiles of many rows of x.

Scaling the accumulator instead needs a second one and waits for the tensor core at every k-group;
scaling here costs four multiplications a word. Legend as in gemm_tiles.py.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.gemm_assembly import B4S, B4ZS, F4S, F4ZS, O8I3, O8I5, SPLAT
from llmpq.kernels.gemm_shifts import join8
from llmpq.kernels.gemm_tiles import arrange, pair_floats, spread


@triton.jit
def unpack_scaled(
    words,
    zeros,
    pairs,
    DT: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    KWIDTH4: tl.constexpr,
):
    """scale * (code - zero) in DT of 4-bit words, as an operand [rows, 128 k]."""
    s = tl.inline_asm_elementwise(
        SPLAT, "=r,=r,r", [pairs], dtype=(tl.int32,) * 2, is_pure=True, pack=1
    )
    s0, s1 = spread(s[0], 4, BH, WM), spread(s[1], 4, BH, WM)
    if SYMMETRIC:
        if DT == tl.float16:
            o = tl.inline_asm_elementwise(
                F4S, O8I3, [words, s0, s1], dtype=(tl.float16,) * 8, is_pure=True, pack=1
            )
        else:
            o = tl.inline_asm_elementwise(
                B4S, O8I3, [words, s0, s1], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
            )
    else:
        z0, z1 = spread(zeros[0], 4, BH, WM), spread(zeros[1], 4, BH, WM)
        if DT == tl.float16:
            o = tl.inline_asm_elementwise(
                F4ZS, O8I5, [words, z0, z1, s0, s1], dtype=(tl.float16,) * 8, is_pure=True, pack=1
            )
        else:
            o = tl.inline_asm_elementwise(
                B4ZS, O8I5, [words, z0, z1, s0, s1], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
            )
    return arrange(join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]), 4, BH, WM, False, KWIDTH4)


@triton.jit
def scaled(w, pairs, DT: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr, INTERPRET: tl.constexpr):
    """w * scale in DT: for tiles so wide that scaling the accumulator would need a second one."""
    low, high = pair_floats(pairs, DT)
    s = tl.reshape(tl.join(low.to(DT), high.to(DT)), (BH, WM, 8, 4, 2))
    s = tl.reshape(tl.permute(s, (0, 1, 4, 2, 3)), (BH * WM * 16, 1, 4, 1))
    w = tl.reshape(w, (BH * WM * 16, 16, 4, 2))
    s = tl.broadcast_to(s, (BH * WM * 16, 16, 4, 2))
    if INTERPRET:
        w = (w.to(tl.float32) * s.to(tl.float32)).to(DT)
    elif DT == tl.float16:
        w = tl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [w, s], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        w = tl.inline_asm_elementwise(
            "{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z;}",
            "=r,r,r",
            [w, s],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return tl.reshape(w, (BH * WM * 16, 128))
