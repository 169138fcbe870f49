"""`gemv_kernel`: y = x w^T for a few rows of x (M <= 8, best to 2); all of K in one program.

    program = 16*BH rows of w; its WM warps take the k-groups in turn
        warp w:  words --> registers --> code - zero --> mma.sync with x's fragment
    D k-groups of words in flight per warp before the first use; no loop, no shared memory; the
    warps' sums are added once, at the end

Moves bits/8 + 2/128 (scale) bytes per weight. The weights are requested before the previous
kernel has ended (PDL: they do not depend on it), x only after.
M rows of x, K in, N out; `blocks` of 16 rows of w, `groups` k-groups.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.operands.k_group import first_group, load_x_step
from llmpq.kernels.gemm.operands.packed_operands import (
    accumulator_scale,
    dot,
    finish,
    load_pairs,
    load_tile,
    unpack,
    zero_constants,
)
from llmpq.kernels.gemm.operands.scaled_operand import (
    SHARE,
    load_scaled,
    scale_words,
    scaled_operand,
)


@triton.jit
def _load(
    P0,
    P1,
    S,
    Z,
    left,
    groups,
    g,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    FORM: tl.constexpr,
):
    if FORM == "":
        return load_tile(P0, P1, S, Z, left, groups, g, BITS, GROUPED, SYMMETRIC, BH, WM, True)
    else:
        return load_scaled(
            P0, P1, S, Z, left, groups, g, FORM, BITS, GROUPED, SYMMETRIC, BH, WM, True
        )


@triton.jit(do_not_specialize=["M"])
def gemv_kernel(
    X,
    P0,
    P1,
    S,
    Z,
    BIAS,
    RESIDUAL,
    Y,
    M,
    N,
    K,
    blocks,
    groups,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_G: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    STEPS: tl.constexpr,
    D: tl.constexpr,
    XD: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
):
    """y = x w^T for M <= 8: STEPS * WM >= groups; steps past the last group are multiplied by 0."""
    DT: tl.constexpr = X.dtype.element_ty
    WORDS: tl.constexpr = 192 if BITS == 3 else 256
    block = tl.program_id(0) * BH
    left = blocks - block
    S_GROUPS = groups if GROUPED else 1
    P0 += block.to(tl.int64) * groups * WORDS
    P1 += block.to(tl.int64) * groups * WORDS
    S += block * S_GROUPS * scale_words(FORM, GROUPED)
    if FORM != "nvfp4":
        Z += block * S_GROUPS * scale_words(FORM, GROUPED)

    # Weights: D steps ahead of their use. A step that would start past the last group re-reads
    # the last WM groups' start; x is zero there.
    tiles = ()
    for i in tl.static_range(min(D, STEPS)):
        tiles += (
            _load(
                P0,
                P1,
                S,
                Z,
                left,
                groups,
                first_group(i * WM, groups, WM, EVEN_G),
                BITS,
                GROUPED,
                SYMMETRIC,
                BH,
                WM,
                FORM,
            ),
        )
    if not GROUPED:
        channel_scale = load_pairs(S, left, 1, 0, BH, 1, True)
        if not SYMMETRIC:
            channel_zero = load_pairs(Z, left, 1, 0, BH, 1, True)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    xs = ()
    for i in tl.static_range(min(XD, STEPS)):
        xs += (load_x_step(X, i, M, K, groups, WM, EVEN_K, EVEN_G),)

    acc = tl.zeros([WM, BH * 16, 8], tl.float32)
    for i in tl.static_range(STEPS):
        if i + D < STEPS:
            tiles += (
                _load(
                    P0,
                    P1,
                    S,
                    Z,
                    left,
                    groups,
                    first_group((i + D) * WM, groups, WM, EVEN_G),
                    BITS,
                    GROUPED,
                    SYMMETRIC,
                    BH,
                    WM,
                    FORM,
                ),
            )
        if i + XD < STEPS:
            xs += (load_x_step(X, i + XD, M, K, groups, WM, EVEN_K, EVEN_G),)
        words, scale, zero = tiles[i]
        zeros = ()
        if FORM != "":
            w = scaled_operand(
                tiles[i], FORM, ASM, BITS, GROUPED, SYMMETRIC, DT, BH, WM, True, True, INTERPRET
            )
        else:
            if not SYMMETRIC:
                if GROUPED:
                    zeros = zero_constants(zero, BITS, DT, INTERPRET)
                else:
                    wide = tl.broadcast_to(tl.reshape(channel_zero, (BH, 1, 32)), (BH, WM, 32))
                    zeros = zero_constants(tl.reshape(wide, (BH * WM * 32,)), BITS, DT, INTERPRET)
            w = unpack(words, zeros, BITS, DT, SYMMETRIC, BH, WM, True, True, INTERPRET)
        if GROUPED and FORM == "":
            t = dot(w, xs[i], tl.zeros([WM, BH * 16, 8], tl.float32), INTERPRET)
            t = tl.reshape(t, (WM, BH * 16, 1, 4, 2))
            acc += tl.reshape(t * accumulator_scale(scale, DT, BH, WM, True), (WM, BH * 16, 8))
        else:
            acc = dot(w, xs[i], acc, INTERPRET)
    total = tl.sum(acc, axis=0)
    if FORM == "nvfp4":
        row = tl.minimum(block * 16 + tl.arange(0, BH * 16), N - 1)
        total *= tl.load(Z + row)[:, None] * SHARE
    if not GROUPED:
        s = tl.reshape(accumulator_scale(channel_scale, DT, BH, 1, True), (BH * 16, 1, 4, 1))
        total = tl.reshape(tl.reshape(total, (BH * 16, 1, 4, 2)) * s, (BH * 16, 8))
    finish(
        total,
        Y,
        BIAS,
        RESIDUAL,
        block * 16,
        0,
        M,
        N,
        blocks * 16,
        BH * 16,
        8,
        HAS_BIAS,
        HAS_RESIDUAL,
    )
