"""y = x w^T with codes in small groups or of a table, words to registers (chunk_operand.py).

    up to 8 rows of x   program = 16 BH rows of w, all of K: its WM warps take the k-groups in turn
    more                program = 16 BH WM rows of w x BM rows of x x a share of K
    dequantise          program = 16 BH WM rows of w x a k-group

A part of 32 or 64 k has a float32 sum of its own, scaled before it is added. Shares of K leave
sums in a workspace; the last one to arrive adds them in order.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.chunks.chunk_operand import chunk, load_parts, load_quarter
from llmpq.kernels.gemm.packed_operands import accumulator_scale, dot, finish
from llmpq.kernels.gemm.rows_kernel import _first


@triton.jit
def _load(
    P0, P1, S, Z, left, groups, g, BITS: tl.constexpr, PARTS: tl.constexpr,
    SYMMETRIC: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Words, scales and zeros of a k-group."""
    w0 = (load_quarter(P0, left, groups, g, 0, BH, WM, BATCH),)
    w1 = (load_quarter(P0, left, groups, g, 1, BH, WM, BATCH),)
    if BITS == 8:
        w0 += (load_quarter(P1, left, groups, g, 0, BH, WM, BATCH),)
        w1 += (load_quarter(P1, left, groups, g, 1, BH, WM, BATCH),)
    scales = load_parts(S, left, groups, g, PARTS, BH, WM, BATCH)
    zeros = ()
    if BITS > 0 and not SYMMETRIC:
        zeros = load_parts(Z, left, groups, g, PARTS, BH, WM, BATCH)
    return (w0, w1), scales, zeros


@triton.jit
def _x_part(
    X, step: tl.constexpr, part: tl.constexpr, M, K, groups, WM: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_G: tl.constexpr,
):  # fmt: skip
    """32 k of x of step `step` as [WM, 32, 8], those of groups already done masked to zero."""
    first = _first(step * WM, groups, WM, EVEN_G)
    f = tl.arange(0, WM * 256)
    warp, row = f // 64 % WM, f // 8 % 8
    k = warp * 128 + part * 32 + f // (64 * WM) * 8 + f // 2 % 4 * 2 + f % 2
    keep = row < M
    if not EVEN_G:
        keep = keep & (first + warp >= step * WM)
    if not EVEN_K:
        keep = keep & (first * 128 + k < K)
    x = tl.load(X + first * 128 + row * K + k, mask=keep, other=0.0)
    x = tl.reshape(x, (2, 2, WM, 8, 4, 2))
    x = tl.permute(x, (2, 0, 1, 4, 5, 3))
    return tl.reshape(x, (WM, 32, 8))


@triton.jit(do_not_specialize=["M"])
def chunk_rows_kernel(
    X, P0, P1, S, Z, T, BIAS, RESIDUAL, Y, M, N, K, blocks, groups,
    BITS: tl.constexpr, PARTS: tl.constexpr, SYMMETRIC: tl.constexpr, SDT: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, EVEN_K: tl.constexpr, EVEN_G: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr,
    STEPS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """y = x w^T for M <= 8: STEPS * WM >= groups; steps past the last group are multiplied by 0."""
    DT: tl.constexpr = X.dtype.element_ty
    block = tl.program_id(0) * BH
    left = blocks - block
    P0 += block.to(tl.int64) * groups * 256
    P1 += block.to(tl.int64) * groups * 256
    S += block * groups * (8 * PARTS)
    Z += block * groups * (8 * PARTS)
    tiles = ()
    for i in tl.static_range(min(D, STEPS)):
        g = _first(i * WM, groups, WM, EVEN_G)
        tiles += (_load(P0, P1, S, Z, left, groups, g, BITS, PARTS, SYMMETRIC, BH, WM, True),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([WM, BH * 16, 8], tl.float32)
    for i in tl.static_range(STEPS):
        if i + D < STEPS:
            g = _first((i + D) * WM, groups, WM, EVEN_G)
            tiles += (_load(P0, P1, S, Z, left, groups, g, BITS, PARTS, SYMMETRIC, BH, WM, True),)
        words, scales, zeros = tiles[i]
        for c in tl.static_range(4):
            if c * PARTS % 4 == 0:
                t = tl.zeros([WM, BH * 16, 8], tl.float32)
            x = _x_part(X, i, c, M, K, groups, WM, EVEN_K, EVEN_G)
            w = chunk(
                words[c % 2], 0 if len(zeros) == 0 else zeros[c * PARTS // 4], T, ASM1 if c > 1 else ASM0,
                c // 2, BITS, SYMMETRIC, DT, BH, WM, True, INTERPRET,
            )  # fmt: skip
            t = dot(w, x, t, INTERPRET)
            if (c + 1) * PARTS % 4 == 0:
                s = accumulator_scale(scales[c * PARTS // 4], SDT, BH, WM, True)
                t = tl.reshape(t, (WM, BH * 16, 1, 4, 2)) * s
                acc += tl.reshape(t, (WM, BH * 16, 8))
    total = tl.sum(acc, axis=0)
    finish(
        total, Y, BIAS, RESIDUAL, block * 16, 0, M, N, blocks * 16, BH * 16, 8, HAS_BIAS,
        HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _load_x(at, k, row_ok, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at + k[:, None], mask=row_ok, other=0.0)
    else:
        return tl.load(at + k[:, None], mask=row_ok & (k < K)[:, None], other=0.0)


@triton.jit(do_not_specialize=["M", "blocks", "groups", "split"])
def chunk_tile_kernel(
    X, P0, P1, S, Z, T, BIAS, RESIDUAL, Y, PARTIAL, ARRIVED, M, N, K, blocks, groups, split,
    BITS: tl.constexpr, PARTS: tl.constexpr, SYMMETRIC: tl.constexpr, SDT: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, BH: tl.constexpr,
    WM: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """y = x w^T, grid (tiles of BM rows of x, tiles of rows of w, split)."""
    DT: tl.constexpr = X.dtype.element_ty
    BN: tl.constexpr = BH * WM * 16
    m0 = tl.program_id(0) * BM
    tile, share = tl.program_id(1), tl.program_id(2)
    block = tile * (BN // 16)
    left = blocks - block
    P0 += block.to(tl.int64) * groups * 256
    P1 += block.to(tl.int64) * groups * 256
    S += block * groups * (8 * PARTS)
    Z += block * groups * (8 * PARTS)
    first, last = share * groups // split, (share + 1) * groups // split
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    k = tl.arange(0, 32)
    row_ok = (m0 + tl.arange(0, BM) < M)[None, :]
    at = X + (m0 + tl.arange(0, BM)).to(tl.int64)[None, :] * K
    acc = tl.zeros([BN, BM], tl.float32)
    for g in tl.range(first, last, num_stages=STAGES):
        words, scales, zeros = _load(
            P0, P1, S, Z, left, groups, g, BITS, PARTS, SYMMETRIC, BH, WM, False
        )
        for c in tl.static_range(4):
            if c * PARTS % 4 == 0:
                t = tl.zeros([BN, BM], tl.float32)
            x = _load_x(at, g * 128 + c * 32 + k, row_ok, K, EVEN_K)
            w = chunk(
                words[c % 2], 0 if len(zeros) == 0 else zeros[c * PARTS // 4], T, ASM1 if c > 1 else ASM0,
                c // 2, BITS, SYMMETRIC, DT, BH, WM, False, INTERPRET,
            )  # fmt: skip
            t = dot(w, x, t, INTERPRET)
            if (c + 1) * PARTS % 4 == 0:
                s = accumulator_scale(scales[c * PARTS // 4], SDT, BH, WM, False)
                t = tl.reshape(t, (BN, BM // 8, 4, 2)) * s
                acc += tl.reshape(t, (BN, BM))
    n0, end = block * 16, blocks * 16
    if not SPLIT:
        finish(acc, Y, BIAS, RESIDUAL, n0, m0, M, N, end, BN, BM, HAS_BIAS, HAS_RESIDUAL)
    else:
        slot = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        shared = tile * tl.num_programs(0) + tl.program_id(0)
        slab = PARTIAL + shared.to(tl.int64) * split * (BN * BM)
        tl.store(slab + share * (BN * BM) + slot, acc)
        tl.debug_barrier()  # every thread's sums are written before this program counts itself
        before = tl.atomic_add(ARRIVED + shared, 1, sem="acq_rel")
        if before == split - 1:
            total = tl.zeros([BN, BM], tl.float32)
            for other in range(split):
                total += tl.load(slab + other * (BN * BM) + slot, cache_modifier=".cg")
            finish(total, Y, BIAS, RESIDUAL, n0, m0, M, N, end, BN, BM, HAS_BIAS, HAS_RESIDUAL)
            tl.store(ARRIVED + shared, 0)


@triton.jit
def chunk_numbers_kernel(
    P0, P1, S, Z, T, OUT, K, blocks, groups,
    BITS: tl.constexpr, PARTS: tl.constexpr, SYMMETRIC: tl.constexpr, SDT: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, EVEN_K: tl.constexpr, BH: tl.constexpr,
    WM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """OUT [16 * blocks, K] = w; grid (row tiles, k-groups)."""
    DT: tl.constexpr = OUT.dtype.element_ty
    BN: tl.constexpr = BH * WM * 16
    block, g = tl.program_id(0) * (BH * WM), tl.program_id(1)
    left = blocks - block
    P0 += block.to(tl.int64) * groups * 256
    P1 += block.to(tl.int64) * groups * 256
    S += block * groups * (8 * PARTS)
    Z += block * groups * (8 * PARTS)
    words, scales, zeros = _load(
        P0, P1, S, Z, left, groups, g, BITS, PARTS, SYMMETRIC, BH, WM, False
    )
    row = block * 16 + tl.arange(0, BN)
    to = OUT + row.to(tl.int64)[:, None] * K
    keep = (row < blocks * 16)[:, None]
    for c in tl.static_range(4):
        w = chunk(
            words[c % 2], 0 if len(zeros) == 0 else zeros[c * PARTS // 4], T, ASM1 if c > 1 else ASM0,
            c // 2, BITS, SYMMETRIC, DT, BH, WM, False, INTERPRET,
        )  # fmt: skip
        s = accumulator_scale(scales[c * PARTS // 4], SDT, BH, WM, False)
        w = tl.reshape(tl.reshape(w.to(tl.float32), (BN, 4, 4, 2)) * s, (BN, 32))
        k = g * 128 + c * 32 + tl.arange(0, 32)
        ok = keep if EVEN_K else keep & (k < K)[None, :]
        tl.store(to + k[None, :], w.to(DT), mask=ok)
