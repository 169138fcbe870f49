"""act(gate) * up of a fused [M, 2 F] product, as one pass.

    gate_up [M, 2 F] = [g | u]   ->   out [M, F]          act: kernels/gemm/experts/gated.py

Bytes: 2 F read and F written per row; arithmetic in float32, one rounding. A program takes BLOCK
columns of one row.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.experts.gated import gated
from llmpq.kernels.overlap import overlaps

BLOCK = 2048
"""Columns of a program: 16 of a thread's, in 16-byte accesses."""

FEW_ROWS = 256
"""Rows up to which programs take half as many columns, so that they fill the GPU."""


@triton.jit(do_not_specialize=["limit", "slope"])
def gate_kernel(
    gate_up, out, features, limit, slope, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One block of columns of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < features
    at = gate_up + row * 2 * features + column
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + features, mask=live, other=0.0).to(tl.float32)
    value = gated(gate, up, limit, slope, ACT)
    tl.store(out + row * features + column, value.to(out.dtype.element_ty), mask=live)


def gate_mul(
    gate_up: Tensor, activation: str = "silu", *, limit: float = 0.0, slope: float = 1.0
) -> Tensor:
    """Return act(gate) * up [..., F] of [..., 2 F]; `limit` and `slope` are clamped_silu's."""
    features = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], features)
    rows = out.numel() // features
    block = min(BLOCK if rows > FEW_ROWS else BLOCK // 2, triton.next_power_of_2(features))
    pdl = overlaps(gate_up.device)
    gate_kernel[(rows, triton.cdiv(features, block))](
        gate_up,
        out,
        features,
        limit,
        slope,
        ACT=activation,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, min(4, block // 256)),
        launch_pdl=pdl,
    )
    return out
