"""Host side of expert_rows.py: when it is taken, its warps and steps, the launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import knobs

from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.expert_rows import rows_expert_kernel
from llmpq.kernels.gemm.expert_sent import Sent
from llmpq.kernels.gemm.gated import GateRule
from llmpq.kernels.overlap import overlaps

MOST_EVEN = 0.0
"""Pairs of an expert, of an even routing, up to which the programs are taken."""


def takes(pairs: int, experts: int) -> bool:
    """Whether experts have so few pairs each."""
    return pairs <= MOST_EVEN * experts


REGISTERS = 128
"""Of a thread: the compiler asks for all steps' words and x at once otherwise."""


def form_of(groups: int, *, fused: bool) -> tuple[int, int, int]:
    """Return blocks of 16 rows of w, warps, and steps in flight of a program.

    Warps that leave as few steps past the last k-group as may be; `fused`: as many up rows.
    """
    some = [count for count in (4, 2, 8) if count <= groups] or [1]
    warps = min(some, key=lambda count: -groups % count)
    return (1 if fused else 2), warps, 4


def product(
    q: QuantizedWeight,
    bias: Tensor | None,
    x: Tensor,
    sent: Sent,
    *,
    back: bool,
    gate: GateRule | None,
) -> Tensor:
    """Return `ExpertStack.product` of a packed stack [E, ...] in groups."""
    rule, parts = gate or GateRule(), 1 if gate is None else 2
    blocks, groups = q.out_features // BLOCK_ROWS, -(-q.in_features // 128)
    high, warps, depth = form_of(groups, fused=gate is not None)
    y = x.new_empty(sent.order_C.numel(), q.out_features // parts)
    planes = (*q.planes, q.scale, q.scale if q.zero is None else q.zero)
    words = [t.view(t.shape[0], -1).view(torch.int32) for t in planes]
    pdl, interpret = overlaps(x.device), bool(knobs.runtime.interpret)
    rows_expert_kernel[(triton.cdiv(blocks // parts, high), sent.most_runs)](
        *(x, words[0], words[-3], words[-2], words[-1], x if bias is None else bias, y),
        *(sent.order_C, sent.runs_E, q.out_features, q.in_features, blocks, groups),
        *(sent.per_token, float(rule.limit), float(rule.slope)),
        BITS=q.bits,
        SYMMETRIC=q.symmetric,
        EVEN_K=q.in_features % 128 == 0,
        EVEN_G=groups % warps == 0,
        HAS_BIAS=bias is not None,
        GATHER=not back,
        BH=high,
        WM=warps,
        STEPS=triton.cdiv(groups, warps),
        D=depth,
        FUSE=gate is not None,
        ACT=rule.activation,
        PDL=pdl,
        INTERPRET=interpret,
        num_warps=warps,
        maxnreg=REGISTERS,
        launch_pdl=pdl,
    )
    return y
