"""y = x w^T on a GPU where 32 or 64 weights share a scale: ROWS bytes, a kernel for few rows of x.

Whole blocks of 16 rows are words (scaled_operand.py); here are the rows behind them.

    k-group of 128, one row of w     ROWS of weight_layout.py; 4 bits: byte j [ k=j+64 | k=j ]
    halves of it                     64 weights: 2 groups of 32, or 1 of 64, each scaled by itself
    product      program = BM rows of x, BN of w, every SPLITS-th k-group: two products of K = 64
    dequantise   program = 16 rows of w x one k-group; then cuBLAS, for more rows of x

Parts of a split K are float32 and added in the order of the splits.

Cost: bits/8 + 2/G bytes moved a weight (4/G with zeros).
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.packed_words import PackedWords
from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.kernel_table import Kernel, KernelForm, eligible
from llmpq.kernels.multiprocessors import device_of, multiprocessors

BN = 32
HALF = 64
PROGRAMS_PER_SM = 4


@triton.jit
def half_weights(
    P0,
    P1,
    S,
    Z,
    row,
    inside,
    group,
    groups,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    G: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    UPPER: tl.constexpr,
    BN: tl.constexpr,
):
    """w [BN, 64] of the lower or upper half of a k-group, float32."""
    PER: tl.constexpr = HALF // G
    k_group = (row.to(tl.int64) * groups + group)[:, None]
    k = tl.arange(0, HALF)[None, :]
    if BITS == 3:
        field = k // 16
        at = k_group * (3 * HALF // 4) + k % 16
        code = tl.load(P0 + at + 16 * UPPER, mask=inside[:, None], other=0).to(tl.int32)
        third = tl.load(P0 + at + 32, mask=inside[:, None], other=0).to(tl.int32)
        code = (code >> (2 * field) & 3) | (third >> (2 * field + UPPER) & 1) << 2
    else:
        at = k_group * HALF + k
        code = tl.load(P0 + at, mask=inside[:, None], other=0).to(tl.int32) >> (4 * UPPER) & 15
        if BITS == 8:
            low = tl.load(P1 + at, mask=inside[:, None], other=0).to(tl.int32)
            code = code * 16 + (low >> (4 * UPPER) & 15)
    s_at = (row.to(tl.int64) * groups + group)[:, None] * (2 * PER) + UPPER * PER
    s_at += tl.arange(0, PER)[None, :]
    scale = tl.load(S + s_at, mask=inside[:, None], other=0.0).to(tl.float32)
    w = tl.reshape(code.to(tl.float32), (BN, PER, G))
    if SYMMETRIC:
        w -= 1 << (BITS - 1)
    else:
        w -= tl.load(Z + s_at, mask=inside[:, None], other=0.0).to(tl.float32)[:, :, None]
    return tl.reshape(w * scale[:, :, None], (BN, HALF))


@triton.jit
def product_kernel(
    X,
    P0,
    P1,
    S,
    Z,
    OUT,
    M,
    N,
    K,
    groups,
    splits,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    G: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """OUT [splits, M, N] float32; grid (row tiles of w, row tiles of x, splits)."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    inside = row < N
    k = tl.arange(0, HALF)
    acc = tl.zeros([BM, BN], tl.float32)
    for group in tl.range(split, groups, splits):
        for upper in tl.static_range(2):
            at = group * (2 * HALF) + upper * HALF + k
            here = (m < M)[:, None] & (at < K)[None, :]
            x = tl.load(X + m.to(tl.int64)[:, None] * K + at[None, :], mask=here, other=0.0)
            w = half_weights(
                P0, P1, S, Z, row, inside, group, groups, HALF, BITS, G, SYMMETRIC, upper, BN
            )
            acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision="ieee")
    to = (split.to(tl.int64) * M + m)[:, None] * N + row[None, :]
    tl.store(OUT + to, acc, mask=(m < M)[:, None] & inside[None, :])


@triton.jit
def dequantize_kernel(
    P0,
    P1,
    S,
    Z,
    OUT,
    N,
    K,
    groups,
    BN: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    G: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """OUT [N, K] = w; grid (row tiles, k-groups)."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    group = tl.program_id(1)
    inside = row < N
    for upper in tl.static_range(2):
        w = half_weights(
            P0, P1, S, Z, row, inside, group, groups, HALF, BITS, G, SYMMETRIC, upper, BN
        )
        k = group * (2 * HALF) + upper * HALF + tl.arange(0, HALF)
        to = OUT + row.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(to, w.to(OUT.dtype.element_ty), mask=inside[:, None] & (k < K)[None, :])


def multiply(
    x_MK: Tensor, q: PackedWords, bias: Tensor | None, residual_MN: Tensor | None
) -> Tensor:
    """Return y [M, N] = x w^T (+ bias) (+ residual), in x's dtype."""
    rows = x_MK.shape[0]
    if Kernel.ROWS_GEMM not in eligible(KernelForm.ROWS, device_of(q.device), rows):
        y_MN = functional.linear(x_MK, dequantized(q, x_MK.dtype), bias)
        return y_MN if residual_MN is None else y_MN + residual_MN
    y = split_product(product_kernel, x_MK, q.out_features, _operands(q), _constants(q))
    for more in (bias, residual_MN):
        y = y if more is None else y + more
    return y.to(x_MK.dtype)


def split_product(
    kernel: Any, x_MK: Tensor, n: int, operands: Sequence[Tensor], constants: Mapping[str, Any]
) -> Tensor:
    """Return x w^T [M, N] in float32, K split over as many programs as the GPU has room for."""
    rows, k = x_MK.shape
    tiles, groups = triton.cdiv(n, BN), triton.cdiv(k, GROUP)
    splits = max(1, min(groups, PROGRAMS_PER_SM * multiprocessors(x_MK.device) // tiles))
    part = x_MK.new_empty(splits, rows, n, dtype=torch.float32)
    kernel[(tiles, 1, splits)](
        x_MK.contiguous(),
        *operands,
        part,
        rows,
        n,
        k,
        groups,
        splits,
        **constants,
        BM=max(16, triton.next_power_of_2(rows)),
        BN=BN,
        num_warps=4,
    )
    return part[0] if splits == 1 else part.sum(0)


def dequantized(q: PackedWords, dtype: torch.dtype) -> Tensor:
    """Return w [N, K]; where Triton may not run by torch."""
    if Kernel.DEQUANTIZE not in eligible(KernelForm.ROWS, device_of(q.device), 0):
        return q.dequantize(dtype)
    n, k = q.out_features, q.in_features
    out = q.scale.new_empty(n, k, dtype=dtype)
    groups = triton.cdiv(k, GROUP)
    dequantize_kernel[(triton.cdiv(n, 16), groups)](
        *_operands(q), out, n, k, groups, **_constants(q) | {"BN": 16}, num_warps=2
    )
    return out


def _operands(q: PackedWords) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return planes, scales and zeros; scales stand in for the zeros of a symmetric weight."""
    return q.planes[0], q.planes[-1], q.scale, q.scale if q.zero is None else q.zero


def _constants(q: PackedWords) -> dict[str, int | bool]:
    assert q.group_size is not None
    return {"HALF": HALF, "BITS": q.bits, "G": q.group_size, "SYMMETRIC": q.symmetric}
