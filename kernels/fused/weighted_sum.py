"""Weighted sum of the outputs of experts, added to the residual stream in one launch.

    y [T, h] = x [T, h] + sum_j w [T, k]_j made [T, k, h]_j      program: BLOCK columns of a token

Bytes: k + 1 rows read and one written a token; sums in float32, one rounding.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps

BLOCK = 256
"""Columns of a program: few tokens fill the GPU."""


@triton.jit
def weighted_sum_kernel(
    x_ptr,
    weights,
    made,
    out,
    columns,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < columns
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_X:
        total = tl.load(x_ptr + token * columns + column, mask=live, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP):
        weight = tl.load(weights + token * TOP + j).to(tl.float32)
        row = made + (token * TOP + j) * columns
        total += weight * tl.load(row + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=live)


def weighted_sum(weight_Tk: Tensor, made_Ch: Tensor, x_Th: Tensor | None = None) -> Tensor:
    """Return each token's weighted sum of its k rows of `made` [T k, h], and x where given."""
    tokens, columns = weight_Tk.shape[0], made_Ch.shape[1]
    out, pdl = made_Ch.new_empty(tokens, columns), overlaps(made_Ch.device)
    x = out if x_Th is None else x_Th.contiguous()
    weighted_sum_kernel[(tokens, triton.cdiv(columns, BLOCK))](
        x,
        weight_Tk.contiguous(),
        made_Ch.contiguous(),
        out,
        columns,
        TOP=weight_Tk.shape[1],
        BLOCK=BLOCK,
        HAS_X=x_Th is not None,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return out


def weighted_sum_reference(
    weight_Tk: Tensor, made_Ch: Tensor, x_Th: Tensor | None = None
) -> Tensor:
    """The twin: float32 sums, one rounding."""
    total_Th = (weight_Tk.float()[:, :, None] * made_Ch.float().view(*weight_Tk.shape, -1)).sum(1)
    return (total_Th if x_Th is None else x_Th.float() + total_Th).to(made_Ch.dtype)
