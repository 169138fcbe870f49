"""RMSNorm of rows in one pass, optionally of the sum with a residual, which is returned as well.

    y = x + residual                    (where there is one)        rounded to x's dtype
    n = y * rsqrt(mean(y^2) + eps) * w                              float32 inside, one rounding

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
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, columns, x_stride, eps,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < columns
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * columns + column, mask=live, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * columns + column, rounded, mask=live)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    out = x * scale * weight
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of the rows of x [..., h]."""
    return _launch(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + residual and its RMSNorm."""
    return _launch(x, residual, weight, eps)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    columns = x.shape[-1]
    if columns > MAX_COLUMNS:
        raise ValueError(f"rms_norm holds rows of at most {MAX_COLUMNS} columns, got {columns}")
    if x.stride(-1) != 1 or x.ndim > 2:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(columns)
    pdl = overlaps(x.device)
    rms_norm_kernel[(out.numel() // columns,)](
        x,
        x if residual is None else residual.contiguous(),
        weight,
        total,
        out,
        columns,
        x.stride(0) if x.ndim == 2 else columns,
        eps,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        PDL=pdl,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=pdl,
    )
    return total, out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin: float32 arithmetic, one rounding."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The twin of `add_rms_norm`: the sum is rounded before it is normalised."""
    total = (x.float() + residual.float()).to(x.dtype)
    return total, rms_norm_reference(total, weight, eps)
