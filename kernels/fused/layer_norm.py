"""LayerNorm of rows in one pass, with the biases that a layer's products leave to it.

    y = x + before                                       (where there is one)
    n = (y - mean(y)) * rsqrt(var(y) + eps) * w + b      float32 inside, one rounding
    x = y + after                                        (where either is there), in x's place

A product that adds the residual stream itself cannot add a bias, too. The norm between a layer's
two such products reads the stream anyway: it adds the first one's bias (`before`) and, ahead of
time, the second one's (`after`), which saves two passes over it.

Bytes: every operand read once, every result written once; a program holds one row in registers.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps

MAX_COLUMNS = 16384
"""Columns of a row that a program's registers hold."""


@triton.jit
def layer_norm_kernel(
    x_ptr,
    before_ptr,
    after_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    columns,
    eps,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < columns
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = row * columns + column
    x = tl.load(x_ptr + place, mask=live, other=0.0).to(tl.float32)
    if BEFORE:
        x += tl.load(before_ptr + column, mask=live, other=0.0).to(tl.float32)
    if BEFORE or AFTER:
        total = x
        if AFTER:
            total += tl.load(after_ptr + column, mask=live, other=0.0).to(tl.float32)
        tl.store(x_ptr + place, total.to(x_ptr.dtype.element_ty), mask=live)
    mean = tl.sum(x, 0) / columns
    centred = tl.where(live, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
    out = centred * scale * weight + bias
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=live)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Return LayerNorm of the rows of x + before; x [..., h] becomes x + before + after."""
    columns = x.shape[-1]
    if columns > MAX_COLUMNS:
        raise ValueError(f"layer_norm holds rows of at most {MAX_COLUMNS} columns, got {columns}")
    if not x.is_contiguous():
        assert before is None and after is None, "sums are written in place, between no gaps"
        x = x.contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    pdl = overlaps(x.device)
    layer_norm_kernel[(x.numel() // columns,)](
        x,
        x if before is None else before,
        x if after is None else after,
        weight,
        bias,
        out,
        columns,
        eps,
        BLOCK=block,
        BEFORE=before is not None,
        AFTER=after is not None,
        PDL=pdl,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=pdl,
    )
    return out
