"""`splitk_gemm_kernel`: y = x w^T for more rows of x; K may be split over programs.

    program = BN = 16*BH*WM rows of w x BM rows of x x a share of K
        words --> registers --> code - zero --> left operand of wgmma (mma.sync before sm_90)
        x --> shared memory --> right operand
    STAGES 1: D k-groups of words ahead in registers while D are multiplied; else a cp.async
    pipeline of STAGES. Both win somewhere (tuned/).
    Shares of a tile leave float32 sums in a workspace; the last one to arrive adds them in order:
    no float atomics, and results do not depend on the timing.

Moves bits/8 + 2/128 (scale) bytes per weight, once. With STAGES 1 weights are requested before
the previous kernel has ended (PDL), x only after.
M rows of x, K in, N out; `blocks` of 16 rows of w, `groups` k-groups.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.operands.k_group import accumulate, load_x
from llmpq.kernels.gemm.operands.packed_operands import (
    accumulator_scale,
    finish,
    load_pairs,
    load_tile,
)
from llmpq.kernels.gemm.operands.scaled_operand import (
    SHARE,
    load_scaled,
    scale_words,
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
        return load_tile(P0, P1, S, Z, left, groups, g, BITS, GROUPED, SYMMETRIC, BH, WM, False)
    else:
        return load_scaled(
            P0, P1, S, Z, left, groups, g, FORM, BITS, GROUPED, SYMMETRIC, BH, WM, False
        )


@triton.jit(do_not_specialize=["M", "blocks", "groups", "split"])
def splitk_gemm_kernel(
    X,
    P0,
    P1,
    S,
    Z,
    BIAS,
    RESIDUAL,
    Y,
    PARTIAL,
    ARRIVED,
    M,
    N,
    K,
    blocks,
    groups,
    split,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALE_W: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    XS: tl.constexpr,
    PDL: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
):
    """y = x w^T, grid (tiles of BM rows of x, tiles of rows of w, split).

    Tiles of x come first so that a long x stays in the L2 and w is streamed once.
    """
    DT: tl.constexpr = X.dtype.element_ty
    WORDS: tl.constexpr = 192 if BITS == 3 else 256
    BN: tl.constexpr = BH * WM * 16
    m0 = tl.program_id(0) * BM
    tile, part = tl.program_id(1), tl.program_id(2)
    block = tile * (BN // 16)
    left = blocks - block
    S_GROUPS = groups if GROUPED else 1
    P0 += block.to(tl.int64) * groups * WORDS
    P1 += block.to(tl.int64) * groups * WORDS
    S += block * S_GROUPS * scale_words(FORM, GROUPED)
    if FORM != "nvfp4":
        Z += block * S_GROUPS * scale_words(FORM, GROUPED)
    steps = groups // D
    first, last = part * steps // split, (part + 1) * steps // split

    channel_zero = 0
    if not GROUPED:
        channel_scale = load_pairs(S, left, 1, 0, BH, WM, False)
        if not SYMMETRIC:
            channel_zero = load_pairs(Z, left, 1, 0, BH, WM, False)
    k = tl.arange(0, 128)
    if KWIDTH4:  # operand position 16 s + 4 c + 2 k3 + k0 holds k = 16 s + 8 k3 + 2 c + k0
        k = k // 16 * 16 + k // 2 % 2 * 8 + k // 4 % 4 * 2 + k % 2
    row_ok = (m0 + tl.arange(0, BM) < M)[None, :]
    at = X + (m0 + tl.arange(0, BM)).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)

    if STAGES > 1:
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        for g in tl.range(first, last, num_stages=STAGES):
            now = _load(P0, P1, S, Z, left, groups, g, BITS, GROUPED, SYMMETRIC, BH, WM, FORM)
            if not GROUPED:
                # Scaled here all the same: Triton 3.6 pipelines a sum that wgmma itself carries on
                # without waiting for it to have read the operand that the next step unpacks.
                now = (now[0], channel_scale, channel_zero)
            x = load_x(at, g, row_ok, k[:, None], K, EVEN_K)
            acc = accumulate(
                acc,
                now,
                x,
                channel_zero,
                BITS,
                DT,
                GROUPED if GROUPED else 1,
                SYMMETRIC,
                SCALE_W,
                BH,
                WM,
                BM,
                KWIDTH4,
                INTERPRET,
                FORM,
                ASM,
            )
    else:
        ahead = ()
        for i in tl.static_range(D):
            ahead += (
                _load(
                    P0,
                    P1,
                    S,
                    Z,
                    left,
                    groups,
                    first * D + i,
                    BITS,
                    GROUPED,
                    SYMMETRIC,
                    BH,
                    WM,
                    FORM,
                ),
            )
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        for step in tl.range(first, last, num_stages=XS):
            xs = ()
            for i in tl.static_range(D):
                xs += (load_x(at, step * D + i, row_ok, k[:, None], K, EVEN_K),)
            now = ahead
            after = tl.minimum(step + 1, last - 1) * D
            ahead = ()
            for i in tl.static_range(D):
                ahead += (
                    _load(
                        P0,
                        P1,
                        S,
                        Z,
                        left,
                        groups,
                        after + i,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        BH,
                        WM,
                        FORM,
                    ),
                )
            for i in tl.static_range(D):
                acc = accumulate(
                    acc,
                    now[i],
                    xs[i],
                    channel_zero,
                    BITS,
                    DT,
                    GROUPED,
                    SYMMETRIC,
                    SCALE_W,
                    BH,
                    WM,
                    BM,
                    KWIDTH4,
                    INTERPRET,
                    FORM,
                    ASM,
                )

    if not GROUPED and STAGES == 1:
        s = accumulator_scale(channel_scale, DT, BH, WM, False)
        acc = tl.reshape(tl.reshape(acc, (BN, BM // 8, 4, 2)) * s, (BN, BM))
    if FORM == "nvfp4":
        row = tl.minimum(block * 16 + tl.arange(0, BN), N - 1)
        acc *= tl.load(Z + row)[:, None] * SHARE
    if not SPLIT:
        finish(
            acc,
            Y,
            BIAS,
            RESIDUAL,
            block * 16,
            m0,
            M,
            N,
            blocks * 16,
            BN,
            BM,
            HAS_BIAS,
            HAS_RESIDUAL,
        )
    else:
        slot = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        shared = tile * tl.num_programs(0) + tl.program_id(0)
        slab = PARTIAL + shared.to(tl.int64) * split * (BN * BM)
        tl.store(slab + part * (BN * BM) + slot, acc)
        tl.debug_barrier()  # every thread's sums are written before this program counts itself
        before = tl.atomic_add(ARRIVED + shared, 1, sem="acq_rel")
        if before == split - 1:
            total = tl.zeros([BN, BM], tl.float32)
            for share in range(split):
                total += tl.load(slab + share * (BN * BM) + slot, cache_modifier=".cg")
            finish(
                total,
                Y,
                BIAS,
                RESIDUAL,
                block * 16,
                m0,
                M,
                N,
                blocks * 16,
                BN,
                BM,
                HAS_BIAS,
                HAS_RESIDUAL,
            )
            tl.store(ARRIVED + shared, 0)
