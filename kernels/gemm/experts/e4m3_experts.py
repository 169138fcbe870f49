"""Products of a mixture's experts whose weights are kept in E4M3, all of a layer in one launch.

    stack = Fp8Stack(first, E)     codes [E, N, K], scales [E, rows, columns]
    program                        rows of w of one expert x BM pairs at a time, as
                                   expert_kernel.py; values and scales as e4m3_fragments.py,
                                   of codes that lie row by row as e4m3_kernel.py
    FUSE                           gate rows and the up rows beside them; act(gate) up leaves

Legend as in expert_kernel.py.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.gemm.experts.expert_dispatch import ExpertDispatch
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.gemm.experts.store_pairs import store_pairs
from llmpq.kernels.gemm.float_codes.e4m3_fragments import columns_of, load_codes, step
from llmpq.kernels.gemm.float_codes.e4m3_kernel import multiply, scales
from llmpq.kernels.gemm.float_codes.fp8_products import on_hopper, step_of
from llmpq.kernels.overlap import overlaps

if TYPE_CHECKING:
    from llmpq.kernels.weights.fp8_weight import Fp8Weight


@triton.jit(do_not_specialize=["shares", "top", "limit", "slope", "rows", "columns"])
def e4m3_expert_kernel(
    X,
    W,
    S,
    BIAS,
    Y,
    order,
    runs,
    N,
    K,
    rows,
    columns,
    high,
    wide,
    top,
    shares,
    limit,
    slope,
    SHARED: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    FUSE: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y of one expert's pairs and BN rows of its w; grid (tiles of rows, runs, shares).

    `high`, `wide`: scales of an expert along N and K.
    """
    DT: tl.constexpr = X.dtype.element_ty
    tile, run, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e, first, end = (
        tl.load(runs + run * 3),
        tl.load(runs + run * 3 + 1),
        tl.load(runs + run * 3 + 2),
    )
    F = N // 2 if FUSE else N
    n, k = tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    live_n = n < F
    w_at = W + (e.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    s_at = S + (e.to(tl.int64) * high + n // rows) * wide
    up_at, s_up = w_at, s_at
    if FUSE:
        up_at = w_at + F.to(tl.int64) * K
        s_up = S + (e.to(tl.int64) * high + (n + F) // rows) * wide
    scale = scales(s_at, 0, live_n, columns, True)
    scale2 = scales(s_up, 0, live_n, columns, True)
    for m0 in range(first + share * BM, end, shares * BM):
        row = m0 + tl.arange(0, BM)
        live = row < end
        source = row
        if GATHER:
            source = tl.load(order + row, mask=live, other=0) // top
        x_at = X + source.to(tl.int64)[None, :] * K + k[:, None]
        acc = tl.zeros([BN, BM], tl.float32)
        acc2 = tl.zeros([BN, BM], tl.float32) if FUSE else 0
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            w_live, x_live = live_n[:, None], live[None, :]
            if not EVEN_K:
                w_live = w_live & (k0 + k < K)[None, :]
                x_live = x_live & (k0 + k < K)[:, None]
            code = tl.load(w_at + k0, mask=w_live, other=0)
            if not SHARED:
                scale = scales(s_at, k0, live_n, columns, False)
            if FUSE:
                code2 = tl.load(up_at + k0, mask=w_live, other=0)
                if not SHARED:
                    scale2 = scales(s_up, k0, live_n, columns, False)
            x = tl.load(x_at + k0, mask=x_live, other=0.0)
            acc = multiply(acc, code, scale, x, DT, BN, BM, INTERPRET)
            if FUSE:
                acc2 = multiply(acc2, code2, scale2, x, DT, BN, BM, INTERPRET)
        if tl.float16 == DT:
            # E4M3's bits stand in float16's, whose exponents have a bias of 15, not 7: 2^-8 of it.
            acc *= 256.0
            if FUSE:
                acc2 *= 256.0
        store_pairs(
            acc,
            acc2,
            Y,
            BIAS,
            order,
            row,
            live,
            tile * BN,
            e,
            N,
            limit,
            slope,
            BN,
            HAS_BIAS,
            not GATHER,
            FUSE,
            ACT,
        )


@triton.jit(do_not_specialize=["shares", "top", "limit", "slope", "rows", "columns"])
def fragment_expert_kernel(
    X,
    W,
    S,
    BIAS,
    Y,
    order,
    runs,
    N,
    K,
    rows,
    columns,
    high,
    wide,
    half,
    groups,
    top,
    shares,
    limit,
    slope,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    FUSE: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The same of codes as tensor cores take them; `half`: words of an expert's h = 0."""
    DT: tl.constexpr = X.dtype.element_ty
    BN: tl.constexpr = BH * WM * 16
    tile, run, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e, first, end = (
        tl.load(runs + run * 3),
        tl.load(runs + run * 3 + 1),
        tl.load(runs + run * 3 + 2),
    )
    F = N // 2 if FUSE else N
    block = tile * (BH * WM)
    left = F // 16 - block
    W += e.to(tl.int64) * half * 2 + block.to(tl.int64) * groups * 256
    up_on = F // 16 * groups * 256
    n = block * 16 + tl.arange(0, BN)
    live_n = n < F
    s_at = S + (e.to(tl.int64) * high + n // rows) * wide
    s_up = S + (e.to(tl.int64) * high + (n + F) // rows) * wide
    scale = scales(s_at, 0, live_n, columns, True)
    scale2 = scale
    if FUSE:
        scale2 = scales(s_up, 0, live_n, columns, True)
    k = columns_of(KWIDTH4)
    for m0 in range(first + share * BM, end, shares * BM):
        row = m0 + tl.arange(0, BM)
        live = row < end
        source = row
        if GATHER:
            source = tl.load(order + row, mask=live, other=0) // top
        x_at = X + source.to(tl.int64)[None, :] * K + k[:, None]
        acc = tl.zeros([BN, BM], tl.float32)
        acc2 = tl.zeros([BN, BM], tl.float32) if FUSE else 0
        for g in tl.range(0, groups, num_stages=STAGES):
            words = load_codes(W, half, left, groups, g, BH, WM, False)
            if not SHARED:
                scale = scales(s_at, g * 128, live_n, columns, False)
            if FUSE:
                words2 = load_codes(W + up_on, half, left, groups, g, BH, WM, False)
                if not SHARED:
                    scale2 = scales(s_up, g * 128, live_n, columns, False)
            x = tl.load(x_at + g * 128, mask=live[None, :], other=0.0)
            acc = step(acc, words, scale, x, DT, BH, WM, BM, KWIDTH4, INTERPRET)
            if FUSE:
                acc2 = step(acc2, words2, scale2, x, DT, BH, WM, BM, KWIDTH4, INTERPRET)
        if DT == tl.float16:
            acc *= 256.0
            if FUSE:
                acc2 *= 256.0
        store_pairs(
            acc,
            acc2,
            Y,
            BIAS,
            order,
            row,
            live,
            block * 16,
            e,
            N,
            limit,
            slope,
            BN,
            HAS_BIAS,
            not GATHER,
            FUSE,
            ACT,
        )


def fp8_product(
    like: Fp8Weight,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    x: Tensor,
    dispatch: ExpertDispatch,
    pairs: tuple[int, int],
    *,
    back: bool,
    gate: GateRule | None,
) -> Tensor:
    """Return every pair's row times its expert's weight, as `ExpertStack.product`.

    `like`: one expert's weight; `tensors`: codes, scales and biases of all; `pairs`:
    `expert_stack.rows_of`.
    """
    (codes_ENK, scale_ERC, bias_EN), (bm, shares), rule = tensors, pairs, gate or GateRule()
    n, k = like.out_features, like.in_features
    leave, fused = n if gate is None else n // 2, gate is not None
    y, pdl = x.new_empty(dispatch.order_C.numel(), leave), overlaps(x.device)
    same = {
        "SHARED": like.scale.shape[1] == 1,
        "HAS_BIAS": bias_EN is not None,
        "GATHER": not back,
        "BM": bm,
        "FUSE": fused,
        "ACT": rule.activation,
        "PDL": pdl,
        "INTERPRET": bool(knobs.runtime.interpret),
        "launch_pdl": pdl,
    }
    given = (x, codes_ENK, scale_ERC, x if bias_EN is None else bias_EN, y)
    scale = (like.rows, like.columns, *like.scale.shape)
    rest = (dispatch.per_token, shares, float(rule.limit), float(rule.slope))
    if like.fragment:
        high, warps, stages = fragment_tiles(bm, k // GROUP, fused=fused)
        tensors = (given[0], codes_ENK.view(torch.int32), *given[2:])
        fragment_expert_kernel[(triton.cdiv(leave, 16 * high * warps), dispatch.most_runs, shares)](
            *tensors,
            dispatch.order_C,
            dispatch.runs_E,
            n,
            k,
            *scale,
            n * k // 8,
            k // GROUP,
            *rest,
            **same,
            BH=high,
            WM=warps,
            STAGES=stages,
            KWIDTH4=not on_hopper(x.device) or bm < WGMMA,
            num_warps=warps,
            num_stages=stages,
        )
        return y
    bn, bk, stages, warps = tiles(bm, step_of(like), fused=fused)
    e4m3_expert_kernel[(triton.cdiv(leave, bn), dispatch.most_runs, shares)](
        *given,
        dispatch.order_C,
        dispatch.runs_E,
        n,
        k,
        *scale,
        *rest,
        **same,
        EVEN_K=k % bk == 0,
        BN=bn,
        BK=bk,
        STAGES=stages,
        num_warps=warps,
    )
    return y


WGMMA = 16
"""Pairs at a time from which Triton takes wgmma on Hopper."""


def fragment_tiles(bm: int, groups: int, *, fused: bool) -> tuple[int, int, int]:
    """Return blocks of 16 rows of w that a warp takes, warps and stages."""
    if bm > 32:
        return 1, 4, 3
    if fused:
        return 1, 4, 3
    return (1, 4, 3) if groups <= 8 else (1, 4, 4)


def tiles(bm: int, step: int, *, fused: bool) -> tuple[int, int, int, int]:
    """Return rows of w, columns, stages and warps of a program that takes bm pairs at a time."""
    bk = min(128, step)
    if bm <= 32:
        return (32 if fused else 64), bk, 4, 4
    if bm <= 64:
        return 64, 64, 3, 4
    return 128, 64, 3, 8
