"""Products of a mixture's experts with a prompt's rows: 16-bit w, 128 rows of x by 256 of w.

    program     one block of `expert_blocks.py` (64 rows where an expert has no more left) x BN
                rows of w, BK columns at a time; programs of an expert follow one another, its
                blocks of rows side by side under one tile of w
    x           gathered row by row with cp.async; w by TMA where there is one, or with cp.async
    FUSE        a tile holds BN / 2 gate rows and the BN / 2 up rows beside them, and what leaves
                is act(gate) * up

`expert_kernel.dense_expert_kernel` is the simple one, for any card and few rows.
"""

# mypy: ignore-errors
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.experts.gated import gated

BN, BK, STAGES, WARPS = 256, 64, 3, 8
"""Rows and columns of w at a time, tiles on their way, warps of a program."""
TAIL = 64
"""Rows of x of a block whose expert has no more left."""


@triton.jit
def _load_w(
    W,
    DESC,
    row,
    n_left,
    k0,
    K,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
):
    """w [BN, BK] from `row` on, n_left rows and K columns of which count."""
    if TMA:
        return DESC.load([row, k0])
    else:
        n = tl.arange(0, BN)
        k = k0 + tl.arange(0, BK)
        at = W + (row + n).to(tl.int64)[:, None] * K + k[None, :]
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=(n < n_left)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _dot(x, w, acc, INTERPRET: tl.constexpr):
    """acc + x w^T; Triton's interpreter multiplies bfloat16 as float32."""
    if INTERPRET:
        return tl.dot(x.to(tl.float32), w.to(tl.float32).T, acc)
    else:
        return tl.dot(x, w.T, acc)


@triton.jit
def _tile(
    X,
    W,
    DESC,
    BIAS,
    Y,
    order,
    e,
    m0,
    end,
    n_tile,
    N,
    K,
    top,
    limit,
    slope,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    FUSE: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y of rows m0 .. m0 + BM of x, those before `end`, and of tile `n_tile` of expert e's w.

    F is the number of y's columns: half of N where gate and up rows are fused.
    """
    m = m0 + tl.arange(0, BM)
    safe = tl.minimum(m, end - 1)
    source = safe
    if GATHER:
        source = tl.load(order + safe) // top
    k = tl.arange(0, BK)
    x_at = X + source.to(tl.int64)[:, None] * K + k[None, :]
    OWN: tl.constexpr = BN // 2 if FUSE else BN
    F = N // 2 if FUSE else N
    n0 = n_tile * OWN
    row = e * N + n0
    acc = tl.zeros([BM, OWN], tl.float32)
    acc2 = tl.zeros([BM, OWN], tl.float32) if FUSE else 0
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_at + k0)
        else:
            x = tl.load(x_at + k0, mask=(k0 + k < K)[None, :], other=0.0)
        w = _load_w(W, DESC, row, F - n0, k0, K, OWN, BK, TMA, EVEN_K and EVEN_N)
        if FUSE:
            w2 = _load_w(W, DESC, row + F, F - n0, k0, K, OWN, BK, TMA, EVEN_K and EVEN_N)
        acc = _dot(x, w, acc, INTERPRET)
        if FUSE:
            acc2 = _dot(x, w2, acc2, INTERPRET)
    n = n0 + tl.arange(0, OWN)
    if HAS_BIAS:
        at = BIAS + e.to(tl.int64) * N + n
        acc += tl.load(at, mask=n < F, other=0.0).to(tl.float32)[None, :]
        if FUSE:
            acc2 += tl.load(at + F, mask=n < F, other=0.0).to(tl.float32)[None, :]
    if FUSE:
        acc = gated(acc, acc2, limit, slope, ACT)
    to = m
    if not GATHER:
        to = tl.load(order + safe)
    at = Y + to.to(tl.int64)[:, None] * F + n[None, :]
    tl.store(at, acc.to(Y.dtype.element_ty), mask=(m < end)[:, None] & (n < F)[None, :])


@triton.jit(do_not_specialize=["limit", "slope", "top", "tiles"])
def wide_expert_kernel(
    X,
    W,
    DESC,
    BIAS,
    Y,
    order,
    blocks,
    count,
    N,
    K,
    top,
    tiles,
    limit,
    slope,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TAIL: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    FUSE: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y of one block of rows and one of `tiles` of w; grid (most blocks x tiles)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    block = program // tiles
    if block < tl.load(count):
        e, first = tl.load(blocks + block * 4), tl.load(blocks + block * 4 + 1)
        end, before = tl.load(blocks + block * 4 + 2), tl.load(blocks + block * 4 + 3)
        own = (end - first + BM - 1) // BM
        place = program - before * tiles
        m0 = first + place % own * BM
        if end - m0 <= TAIL:
            _tile(
                X,
                W,
                DESC,
                BIAS,
                Y,
                order,
                e,
                m0,
                end,
                place // own,
                N,
                K,
                top,
                limit,
                slope,
                TAIL,
                BN,
                BK,
                STAGES,
                GATHER,
                FUSE,
                ACT,
                HAS_BIAS,
                TMA,
                EVEN_K,
                EVEN_N,
                INTERPRET,
            )
        else:
            _tile(
                X,
                W,
                DESC,
                BIAS,
                Y,
                order,
                e,
                m0,
                end,
                place // own,
                N,
                K,
                top,
                limit,
                slope,
                BM,
                BN,
                BK,
                STAGES,
                GATHER,
                FUSE,
                ACT,
                HAS_BIAS,
                TMA,
                EVEN_K,
                EVEN_N,
                INTERPRET,
            )
