"""RMSNorm of rows in one pass.

    n = x * rsqrt(mean(x^2) + eps) * w          float32 inside, one rounding

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
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    columns,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < columns
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    out = x * scale * weight
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of the rows of x [..., h]."""
    columns = x.shape[-1]
    if columns > MAX_COLUMNS:
        raise ValueError(f"rms_norm holds rows of at most {MAX_COLUMNS} columns, got {columns}")
    if x.stride(-1) != 1 or x.ndim > 2:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    pdl = overlaps(x.device)
    rms_norm_kernel[(out.numel() // columns,)](
        x,
        weight,
        out,
        columns,
        x.stride(0) if x.ndim == 2 else columns,
        eps,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=pdl,
    )
    return out
