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

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.kv.register_operands import prefetch
from llmpq.kernels.overlap import overlaps

MOST_ROWS = 32


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


def few_dense(
    x: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None,
    form: DenseForm,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x w^T + bias + residual of rows x [M, K]."""
    (rows, k), n = x.shape, weight_NK.shape[0]
    pdl = overlaps(x.device)
    y = x.new_empty(rows, n) if out is None else out
    few_dense_kernel[(triton.cdiv(n, form.bn),)](
        *(x, weight_NK, y if bias is None else bias, y if residual is None else residual, y),
        *(rows, n, k),
        BM=16 if rows <= 16 else 32,
        BN=form.bn,
        BK=form.bk,
        STAGES=form.stages,
        AHEAD=form.ahead if pdl else 0,
        EVEN_K=k % form.bk == 0,
        HAS_BIAS=bias is not None,
        ADDS=residual is not None,
        PDL=pdl,
        INTERPRET=bool(knobs.runtime.interpret),
        num_warps=form.warps,
        launch_pdl=pdl,
    )
    return y
