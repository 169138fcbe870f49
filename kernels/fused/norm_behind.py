"""RMSNorm behind attention or MLP, the residual stream and the next norm, in one pass.

    y = x + a * rsqrt(mean(a^2) + eps) * w        the norm behind, rounded; the sum, rounded
    n = y * rsqrt(mean(y^2) + eps') * w'                where a norm follows at once

Roundings are those of three passes. y takes a's place. Bytes: a and x read once, y and n written
once; a program holds one row in registers.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.fused.rms_norm import MAX_COLUMNS
from llmpq.kernels.overlap import overlaps

Following = tuple[Tensor, float]
"""Weight and eps of the norm that follows."""


@triton.jit
def norm_behind_kernel(
    a_ptr,
    x_ptr,
    weight_ptr,
    next_ptr,
    out_ptr,
    columns,
    eps,
    next_eps,
    NEXT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < columns
    place = row * columns + column
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    if NEXT:
        next_weight = tl.load(next_ptr + column, mask=live, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    a = tl.load(a_ptr + place, mask=live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=live, other=0.0).to(tl.float32)
    normed = a * tl.rsqrt(tl.sum(a * a, 0) / columns + eps) * weight
    y = (x + normed.to(a_ptr.dtype.element_ty).to(tl.float32)).to(a_ptr.dtype.element_ty)
    tl.store(a_ptr + place, y, mask=live)
    if NEXT:
        wide = y.to(tl.float32)
        n = wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + next_eps) * next_weight
        tl.store(out_ptr + place, n.to(out_ptr.dtype.element_ty), mask=live)


def norm_behind(
    a: Tensor, x: Tensor, weight: Tensor, eps: float, following: Following | None = None
) -> tuple[Tensor, Tensor]:
    """Return y = x + norm(a) in a's place, and y normed by what follows, y itself without."""
    columns = a.shape[-1]
    if columns > MAX_COLUMNS:
        raise ValueError(f"norm_behind holds rows of at most {MAX_COLUMNS} columns, got {columns}")
    if not a.is_contiguous() or a.shape != x.shape:
        raise ValueError(f"norm_behind: got {list(a.shape)}, {list(x.shape)}, expected rows alike")
    out = a if following is None else torch.empty_like(a)
    next_weight, next_eps = (weight, eps) if following is None else following
    block, pdl = triton.next_power_of_2(columns), overlaps(a.device)
    norm_behind_kernel[(a.numel() // columns,)](
        a,
        x.contiguous(),
        weight,
        next_weight,
        out,
        columns,
        eps,
        next_eps,
        NEXT=following is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=pdl,
    )
    return a, out
