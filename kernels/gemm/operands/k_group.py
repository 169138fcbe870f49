"""One k-group of a product: x loaded, w times x added to the sums. Shared by gemv, splitk_gemm, the
experts' and FP8's kernels.

Symbols as in splitk_gemm.py and gemv.py.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.gemm.operands.e2m1_operand import own_sum
from llmpq.kernels.gemm.operands.packed_operands import (
    accumulator_scale,
    dot,
    pair_floats,
    unpack,
    zero_constants,
)
from llmpq.kernels.gemm.operands.scaled_operand import scaled_operand


@triton.jit
def scale_operand(
    w, pairs, DT: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr, INTERPRET: tl.constexpr
):
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


@triton.jit
def add_scaled(
    acc,
    tile,
    x,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BM: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc += w x of one k-group of scaled values; a sum of its own, as in expert_kernel.py."""
    w = scaled_operand(
        tile, FORM, ASM, BITS, GROUPED, SYMMETRIC, DT, BH, WM, False, KWIDTH4, INTERPRET
    )
    t = dot(w, x, tl.zeros([BH * WM * 16, BM], tl.float32), INTERPRET)
    return acc + own_sum(t, INTERPRET)


@triton.jit
def accumulate(
    acc,
    tile,
    x,
    channel_zero,
    BITS: tl.constexpr,
    DT: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SCALE_W: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BM: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
):
    """acc += scale * (code - zero) x of one k-group; not GROUPED, the scale waits for the end."""
    if FORM != "":
        acc = add_scaled(
            acc, tile, x, FORM, ASM, BITS, GROUPED, SYMMETRIC, DT, BH, WM, BM, KWIDTH4, INTERPRET
        )
    else:
        words, scale, zero = tile
        zeros = ()
        if not SYMMETRIC:
            if GROUPED:
                zeros = zero_constants(zero, BITS, DT, INTERPRET)
            else:
                zeros = zero_constants(channel_zero, BITS, DT, INTERPRET)
        w = unpack(words, zeros, BITS, DT, SYMMETRIC, BH, WM, False, KWIDTH4, INTERPRET)
        BN: tl.constexpr = BH * WM * 16
        if not GROUPED:
            acc = dot(w, x, acc, INTERPRET)
        elif SCALE_W:
            acc = dot(scale_operand(w, scale, DT, BH, WM, INTERPRET), x, acc, INTERPRET)
        else:
            t = dot(w, x, tl.zeros([BN, BM], tl.float32), INTERPRET)
            t = tl.reshape(t, (BN, BM // 8, 4, 2))
            acc += tl.reshape(t * accumulator_scale(scale, DT, BH, WM, False), (BN, BM))
    return acc


@triton.jit
def load_x(at, group, row_ok, k, K, EVEN_K: tl.constexpr):
    """x [128, BM] of one k-group."""
    if EVEN_K:
        return tl.load(at + group * 128, mask=row_ok, other=0.0)
    else:
        return tl.load(at + group * 128, mask=row_ok & (group * 128 + k < K), other=0.0)


@triton.jit
def first_group(group, groups, WM: tl.constexpr, EVEN_G: tl.constexpr):
    """First of WM k-groups from `group` on; moved back where they would pass the last one."""
    if EVEN_G:
        return group
    else:
        return tl.minimum(group, groups - WM)


@triton.jit
def load_x_step(
    X,
    step: tl.constexpr,
    M,
    K,
    groups,
    WM: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_G: tl.constexpr,
):
    """x of step `step`: the groups that `load_tile` reads, those already done masked to zero."""
    first = first_group(step * WM, groups, WM, EVEN_G)
    f = tl.arange(0, WM * 1024)
    warp = f // 64 % WM
    row = f // 8 % 8
    k = warp * 128 + f // (64 * WM) * 8 + f // 2 % 4 * 2 + f % 2
    keep = row < M
    if not EVEN_G:
        keep = keep & (first + warp >= step * WM)
    if not EVEN_K:
        keep = keep & (first * 128 + k < K)
    x = tl.load(X + first * 128 + row * K + k, mask=keep, other=0.0)
    x = tl.permute(tl.reshape(x, (8, 2, WM, 8, 4, 2)), (2, 0, 4, 1, 5, 3))
    return tl.reshape(x, (WM, 128, 8))
