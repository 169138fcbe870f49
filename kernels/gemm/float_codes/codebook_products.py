"""y = x w^T on a GPU with 4-bit codes of a table (weights/codebook_weight.py).

Words of FRAGMENT are multiplied as W4's are (scaled/). Here are bytes of ROWS: rows that are no
whole blocks, groups of 128, float32 scales, MXFP4 with scales above 2.

    k-group of 128, one row of w     byte j:  [ k=j+64 | k=j ]        (weight_layout.py, ROWS)
    product      E2M1: program = BM rows of x, BN of w, every `splits`-th k-group: two products of
                 K = 64
    dequantise   program = 16 rows of w x one k-group; then cuBLAS, for more rows of x

A code of E2M1 is a float32 of 2^-126 its value once its sign is at bit 31 and its other bits from
bit 22 on; others are looked up in 16 values, which stay in the L1: in a pipelined product that
took three times as long as making w first (H200). Numbers are rounded to x's
dtype after their scale. Parts of a split K are float32, added in the order of the splits; a row's
factor comes last.
"""

# mypy: ignore-errors
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.codebooks import E4M3, E8M0, Codebook
from llmpq.kernels.formats.weight_layout import GROUP, Layout
from llmpq.kernels.gemm.linear_gpu import linear_gpu
from llmpq.kernels.gemm.scaled.small_groups import split_product
from llmpq.kernels.kernel_table import Kernel, eligible
from llmpq.kernels.multiprocessors import device_of

if TYPE_CHECKING:
    from llmpq.kernels.weights.codebook_weight import CodebookWeight

HALF = 64


@triton.jit
def half_values(
    P,
    S,
    T,
    row,
    inside,
    group,
    groups,
    HALF: tl.constexpr,
    G: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE: tl.constexpr,
    UPPER: tl.constexpr,
    BN: tl.constexpr,
):
    """w [BN, 64] of the lower or upper half of a k-group, float32, without a row's factor."""
    PER: tl.constexpr = HALF // G
    at = (row.to(tl.int64) * groups + group)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    code = tl.load(P + at, mask=inside[:, None], other=0).to(tl.int32) >> (4 * UPPER) & 15
    if E2M1:
        bits = (code & 8) << 28 | (code & 7) << 22
        w = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    else:
        w = tl.load(T + code)
    s_at = (row.to(tl.int64) * groups + group)[:, None] * (2 * PER) + UPPER * PER
    s_at += tl.arange(0, PER)[None, :]
    if SCALE == "e8m0":
        s = tl.load(S + s_at, mask=inside[:, None], other=0).to(tl.int32)
        scale = (s << 23).to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        s = tl.load(S + s_at, mask=inside[:, None], other=0).to(tl.int32)
        s = (s & 128) << 24 | (s & 127) << 20
        scale = s.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        scale = tl.load(S + s_at, mask=inside[:, None], other=0.0).to(tl.float32)
    return tl.reshape(tl.reshape(w, (BN, PER, G)) * scale[:, :, None], (BN, HALF))


@triton.jit
def codebook_gemm_kernel(
    X,
    P,
    S,
    T,
    OUT,
    M,
    N,
    K,
    groups,
    splits,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HALF: tl.constexpr,
    G: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE: tl.constexpr,
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
            w = half_values(P, S, T, row, inside, group, groups, HALF, G, E2M1, SCALE, upper, BN)
            acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision="ieee")
    to = (split.to(tl.int64) * M + m)[:, None] * N + row[None, :]
    tl.store(OUT + to, acc, mask=(m < M)[:, None] & inside[None, :])


@triton.jit
def codebook_dequantize_kernel(
    P,
    S,
    T,
    F,
    OUT,
    N,
    K,
    groups,
    BN: tl.constexpr,
    HALF: tl.constexpr,
    G: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
):
    """OUT [N, K] = w; grid (row tiles, k-groups)."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    group = tl.program_id(1)
    inside = row < N
    for upper in tl.static_range(2):
        w = half_values(P, S, T, row, inside, group, groups, HALF, G, E2M1, SCALE, upper, BN)
        if HAS_FACTOR:
            w *= tl.load(F + row, mask=inside, other=0.0)[:, None]
        k = group * (2 * HALF) + upper * HALF + tl.arange(0, HALF)
        to = OUT + row.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(to, w.to(OUT.dtype.element_ty), mask=inside[:, None] & (k < K)[None, :])


def codebook_linear_gpu(
    x_MK: Tensor, q: CodebookWeight, bias: Tensor | None, residual_MN: Tensor | None
) -> Tensor:
    """Return y [M, N] = x w^T (+ bias) (+ residual), in x's dtype."""
    rows = x_MK.shape[0]
    if q.layout is Layout.FRAGMENT and x_MK.dtype in (torch.float16, torch.bfloat16):
        return linear_gpu(x_MK, q, bias, residual_MN)
    if Kernel.ROWS_GEMM not in _kernels(q, rows):
        y_MN = functional.linear(x_MK, dequantized(q, x_MK.dtype), bias)
        return y_MN if residual_MN is None else y_MN + residual_MN
    y = split_product(codebook_gemm_kernel, x_MK, q.out_features, _operands(q), _constants(q))
    if q.factor is not None:
        y = y * q.factor
    for more in (bias, residual_MN):
        y = y if more is None else y + more
    return y.to(x_MK.dtype)


def dequantized(q: CodebookWeight, dtype: torch.dtype) -> Tensor:
    """Return w [N, K]; by torch where Triton may not run, and of an expert's words."""
    if Kernel.DEQUANTIZE not in _kernels(q, 0):
        return q.dequantize(dtype)
    n, k = q.out_features, q.in_features
    out = torch.empty(n, k, dtype=dtype, device=q.device)
    groups = triton.cdiv(k, GROUP)
    plane, scale, table = _operands(q)
    codebook_dequantize_kernel[(triton.cdiv(n, 16), groups)](
        plane,
        scale,
        table,
        table if q.factor is None else q.factor,
        out,
        n,
        k,
        groups,
        **_constants(q) | {"BN": 16, "HAS_FACTOR": q.factor is not None},
        num_warps=2,
    )
    return out


def _kernels(q: CodebookWeight, rows: int) -> tuple[Kernel, ...]:
    """Return what may multiply bytes as they are stored; torch what is not."""
    if q.layout is not Layout.ROWS or q.group_size > HALF:
        return (Kernel.DEQUANTIZE_TORCH,)
    return eligible(q.kernel_form, device_of(q.device), rows)


@functools.cache
def _table(codebook: Codebook, device: torch.device) -> Tensor:
    return torch.tensor(codebook.values, dtype=torch.float32, device=device)


def _operands(q: CodebookWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales as they are loaded, and the table."""
    scale = q.scale.view(torch.uint8) if q.scale.dtype is E4M3 else q.scale
    return q.plane, scale, _table(q.codebook, q.device)


def _constants(q: CodebookWeight) -> dict[str, object]:
    kind = {E8M0: "e8m0", E4M3: "e4m3"}.get(q.scale.dtype, "float")
    e2m1 = q.codebook is Codebook.E2M1
    return {"HALF": HALF, "G": q.group_size, "E2M1": e2m1, "SCALE": kind}
