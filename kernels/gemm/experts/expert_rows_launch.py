"""Host side of expert_rows.py: when it is taken, its warps and steps, the launch."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton import knobs

from llmpq.kernels.formats.packed_words import PackedWords
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.experts.expert_dispatch import ExpertDispatch
from llmpq.kernels.gemm.experts.expert_rows import rows_expert_kernel
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.gemm.experts.stack_words import StackWords
from llmpq.kernels.overlap import overlaps

MOST_EVEN = 4
"""Pairs of an expert, of an even routing, up to which programs are taken: 2 of them measured."""
SHORT = 8
"""k-groups up to which a warp takes all of K."""
STEPS = 4
"""k-groups of a warp at most where several share K: all are asked for at once."""
DEEP = 16
"""k-groups up to which two warps take gated products of a pair an expert (up of Qwen3-30B-A3B at 8
rows, H100; at 32, two pairs, neither way was faster)."""
LEAST = 4
"""k-groups up to which one warp takes all of K, however few programs there are (down of
Qwen3-Next-80B-A3B, H200: 4.2 us at one row, by four warps 5.3)."""
IDLE = 2
"""Programs a multiprocessor that walk over K, below which more and shorter ones are taken."""


@dataclass(frozen=True)
class RowsForm:
    """Blocks of 16 rows of w, warps, k-groups a warp has in flight, registers of a thread."""

    high: int
    warps: int
    depth: int
    registers: int


def form_of(
    q: PackedWords, pairs: int, experts: int, programs: int, *, fused: bool
) -> RowsForm | None:
    """Return the form in which few pairs are multiplied; None where programs that walk over K are
    faster (H200, 4 bits).

    `programs`: how many of the latter a multiprocessor would have.
    """
    groups = -(-q.in_features // 128)
    whole = q.group_size is not None and q.in_features % 128 == 0
    if q.form or q.bits != 4 or not whole or pairs > MOST_EVEN * experts:
        return None
    warps = next((count for count in (4, 2) if groups % count == 0), 0)
    if not fused and groups <= LEAST:
        return RowsForm(2, 1, 4, 128)
    if programs < IDLE and warps and groups <= STEPS * warps:
        return RowsForm(1, warps, 4, 168 if fused else 128)
    if fused and pairs <= experts and groups % 2 == 0 and groups <= DEEP:
        return RowsForm(1, 2, 4, 168)
    return RowsForm(2, 1, 4, 128) if groups <= SHORT and not fused else None


def product(
    stack: StackWords,
    form: RowsForm,
    bias: Tensor | None,
    x: Tensor,
    dispatch: ExpertDispatch,
    *,
    back: bool,
    gate: GateRule | None,
) -> Tensor:
    """Return `ExpertStack.product` of a packed stack [E, ...] in groups."""
    q, words = stack.like, stack.words
    rule, parts = gate or GateRule(), 1 if gate is None else 2
    blocks, groups = q.out_features // BLOCK_ROWS, -(-q.in_features // 128)
    y = x.new_empty(dispatch.order_C.numel(), q.out_features // parts)
    pdl, interpret = overlaps(x.device), bool(knobs.runtime.interpret)
    rows_expert_kernel[(triton.cdiv(blocks // parts, form.high), dispatch.most_runs)](
        x,
        *words,
        x if bias is None else bias,
        y,
        dispatch.order_C,
        dispatch.runs_E,
        q.out_features,
        q.in_features,
        blocks,
        groups,
        dispatch.per_token,
        float(rule.limit),
        float(rule.slope),
        BITS=q.bits,
        SYMMETRIC=q.symmetric,
        EVEN_K=q.in_features % 128 == 0,
        HAS_BIAS=bias is not None,
        GATHER=not back,
        BH=form.high,
        WM=form.warps,
        STEPS=groups // form.warps,
        D=form.depth,
        FUSE=gate is not None,
        ACT=rule.activation,
        PDL=pdl,
        INTERPRET=interpret,
        num_warps=form.warps,
        maxnreg=form.registers,
        launch_pdl=pdl,
    )
    return y
