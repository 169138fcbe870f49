"""Weighted sum of the outputs of experts, added to the residual stream in one launch.

    y [T, h] = x [T, h] + sum_j w [T, k]_j made [T, k, h]_j + sigmoid(n . g) s [T, h]

s: what the MLP that all tokens share gives of n [T, h]; without g it counts whole. A program takes
BLOCK columns of a token, and of n and g all: few KiB of the L2, where a product, a sigmoid and two
passes over s would be launches of their own.

Bytes: k + 1 rows read and one written a token, with s and n three more read; sums in float32, one
rounding.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps

BLOCK = 256
"""Columns of a program: few tokens fill the GPU."""
GATED_WARPS = 4
"""Of a program that reads all columns of n and g: at once, or it would wait for each block."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What all tokens get beside their experts."""

    made_Th: Tensor
    given_Th: Tensor | None = None
    """What its gate is of; None: it counts whole."""
    gate_1h: Tensor | None = None


@triton.jit
def weighted_sum_kernel(
    x_ptr,
    weights,
    made,
    shared,
    given,
    gate,
    out,
    columns,
    shared_stride,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_X: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < columns
    c = tl.arange(0, PADDED)
    if GATED:
        g = tl.load(gate + c, mask=c < columns, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_X:
        total = tl.load(x_ptr + token * columns + column, mask=live, other=0.0).to(tl.float32)
    if SHARED:
        own = tl.load(shared + token * shared_stride + column, mask=live, other=0.0).to(tl.float32)
        if GATED:
            n = tl.load(given + token * columns + c, mask=c < columns, other=0.0)
            own *= tl.sigmoid(tl.sum(n.to(tl.float32) * g, 0))
        total += own
    for j in tl.static_range(TOP):
        weight = tl.load(weights + token * TOP + j).to(tl.float32)
        row = made + (token * ROWS + j) * columns
        total += weight * tl.load(row + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=live)


def weighted_sum(
    weight_Tk: Tensor, made_Ch: Tensor, x_Th: Tensor | None = None, *, shared: Shared | None = None
) -> Tensor:
    """Return each token's weighted sum of its k rows of `made` [T k, h], and x where given.

    A token may have more rows there, behind those. Rows of `shared` may lie further apart.
    """
    tokens, columns = weight_Tk.shape[0], made_Ch.shape[1]
    out, pdl = made_Ch.new_empty(tokens, columns), overlaps(made_Ch.device)
    x = out if x_Th is None else x_Th.contiguous()
    beside = out if shared is None else shared.made_Th
    given = None if shared is None else shared.given_Th
    gate = None if shared is None else shared.gate_1h
    weighted_sum_kernel[(tokens, triton.cdiv(columns, BLOCK))](
        x,
        weight_Tk.contiguous(),
        made_Ch.contiguous(),
        beside,
        out if given is None else given.contiguous(),
        out if gate is None else gate.contiguous(),
        out,
        columns,
        beside.stride(0),
        TOP=weight_Tk.shape[1],
        ROWS=made_Ch.shape[0] // tokens,
        BLOCK=BLOCK,
        PADDED=1 if gate is None else triton.next_power_of_2(columns),
        HAS_X=x_Th is not None,
        SHARED=shared is not None,
        GATED=gate is not None,
        PDL=pdl,
        num_warps=1 if gate is None else GATED_WARPS,
        launch_pdl=pdl,
    )
    return out
