"""Few rows of x times a 16-bit w: all of K in one program, w asked for before its turn (PDL).

    program     BN rows of w x all rows of x; tiles [BN, BK] of w and [BM, BK] of x by a cp.async
                pipeline of STAGES; the sum leaves with bias and residual
    ahead       what a program reads first is asked of the L2 while the kernel in front ends

cuBLAS's products of a decode step begin when the kernel in front has ended, and split K of small
ones over a second launch.

M rows of x, K in, N out.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.l2_prefetch import prefetch
from llmpq.kernels.overlap import overlaps

MOST_ROWS = 0
"""Rows of x that these programs take."""
MOST_WEIGHTS = 1 << 25
"""Of w: larger products last so long that cuBLAS's start is nothing."""


@triton.jit
def _ask(w_ptr, first, N, K, BN: tl.constexpr, AHEAD: tl.constexpr):
    """Ask the L2 for the first AHEAD bytes of BN rows of w, 128 lanes for them all."""
    lane = tl.arange(0, 128)
    PARTS: tl.constexpr = 128 // BN
    SIZE: tl.constexpr = AHEAD // PARTS
    row, at = first + lane // PARTS, lane % PARTS * SIZE
    size = tl.where(row < N, tl.minimum(tl.maximum(2 * K - at, 0), SIZE), 0)
    prefetch(w_ptr.to(tl.int64) + row.to(tl.int64) * (2 * K) + at, size)


@triton.jit(do_not_specialize=["M"])
def few_dense_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """BN columns of y."""
    first = tl.program_id(0) * BN
    n, m, k = first + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        if AHEAD > 0:
            _ask(w_ptr, first, N, K, BN, AHEAD)
        gdc_wait()
    row = tl.minimum(n, N - 1).to(tl.int64)
    w_at = w_ptr + row[:, None] * K + k[None, :]
    x_at = x_ptr + tl.minimum(m, M - 1)[:, None] * K + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_at + k0)
            x = tl.load(x_at + k0)
        else:
            inside = (k0 + k < K)[None, :]
            w = tl.load(w_at + k0, mask=inside, other=0.0)
            x = tl.load(x_at + k0, mask=inside, other=0.0)
        if INTERPRET:
            acc = tl.dot(x.to(tl.float32), tl.trans(w).to(tl.float32), acc)
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    live = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADDS:
        acc += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=live)


@dataclass(frozen=True)
class DenseForm:
    """Rows of w of a program, columns of a step, stages, warps, bytes of a row asked for early."""

    bn: int
    bk: int
    stages: int
    warps: int
    ahead: int


def takes(x: Tensor, weight_NK: Tensor) -> bool:
    """Whether a product is of so few rows that these programs are the faster ones."""
    n, k = weight_NK.shape
    fits = x.element_size() == 2 and k % 8 == 0 and x.dtype == weight_NK.dtype
    few = x.numel() <= MOST_ROWS * k and n * k <= MOST_WEIGHTS
    return fits and few and weight_NK.is_contiguous() and overlaps(x.device)


def form_of(n: int, k: int, rows: int) -> DenseForm:
    """Return how few rows are multiplied."""
    return DenseForm(16, 256, 4, 4, 4096)


def few_dense(
    x: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    into_residual: bool = False,
    form: DenseForm | None = None,
) -> Tensor:
    """Return x w^T + bias + residual; the sum may take the residual's place."""
    n, k = weight_NK.shape
    x_MK = x.reshape(-1, k).contiguous()
    rows, pdl = x_MK.shape[0], overlaps(x.device)
    form = form or form_of(n, k, rows)
    added = None if residual is None else residual.reshape(rows, n).contiguous()
    y = added if into_residual and added is not None else x_MK.new_empty(rows, n)
    few_dense_kernel[(triton.cdiv(n, form.bn),)](
        *(x_MK, weight_NK, y if bias is None else bias, y if added is None else added, y),
        *(rows, n, k),
        BM=16 if rows <= 16 else 32,
        BN=form.bn,
        BK=form.bk,
        STAGES=form.stages,
        AHEAD=form.ahead if pdl else 0,
        EVEN_K=k % form.bk == 0,
        HAS_BIAS=bias is not None,
        ADDS=added is not None,
        PDL=pdl,
        INTERPRET=bool(knobs.runtime.interpret),
        num_warps=form.warps,
        launch_pdl=pdl,
    )
    return y.view(*x.shape[:-1], n)


def few_dense_reference(
    x: Tensor, weight_NK: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The twin: float64, one rounding."""
    y = x.double() @ weight_NK.double().T
    for more in (bias, residual):
        y = y if more is None else y + more.double()
    return y.to(x.dtype)
