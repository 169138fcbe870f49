"""Which (token, expert) pairs go to which expert, found on the device: nothing comes to the host.

Few pairs: one launch, a program for each (`expert_kernel.assign_pairs_kernel`) or for each expert
(`assign_kernel`). Many, a prompt's: the two of `expert_blocks.py`, which also write the blocks of
rows that `expert_wide.py` reads.

An MLP that all tokens share can be an expert more (`beside`): each token has a pair more, its last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from llmpq.kernels.gemm.experts.expert_blocks import (
    BLOCK,
    MOST_EXPERTS,
    SHORT,
    WIDE,
    count_kernel,
    place_kernel,
)
from llmpq.kernels.gemm.experts.expert_kernel import assign_kernel, assign_pairs_kernel
from llmpq.kernels.overlap import overlaps

ASSIGN_STEP = 8192
"""Pairs that a program counts at a time: a prompt's take a few waits for memory, not dozens."""
MANY = 64
"""Pairs of an even routing's expert beyond which they come in blocks: half of one is filled."""


@dataclass(frozen=True)
class ExpertDispatch:
    """Which pairs go to which expert."""

    order_C: Tensor
    """Numbers of pairs, sorted by expert."""
    runs_E: Tensor
    """[E, 3]: an expert, its first row among these and its end; of few pairs, who has any first.

    Of no more pairs than experts [C, 3], a run each; only that of an expert's first has rows."""
    per_token: int
    blocks: Tensor | None = None
    """[most there can be, 4]: expert, first row, end row, its first block; of many pairs only."""
    apart: Tensor | None = None
    """The same, short blocks behind all others."""
    broad: Tensor | None = None
    """The same, of 256 rows."""
    count: Tensor | None = None
    """Blocks that there are, two zeros, broad blocks."""

    @property
    def most_runs(self) -> int:
        """Runs, from the first on, that can have rows."""
        experts = self.runs_E.shape[0]
        return experts if self.blocks is not None else min(experts, self.order_C.numel())


def assign(expert_TK: Tensor, experts: int, *, beside: bool = False) -> ExpertDispatch:
    """Sort the pairs [T, k] by expert; `beside`: all tokens go to expert number E, too."""
    device, pairs = expert_TK.device, expert_TK.numel()
    many = pairs > MANY * experts and experts <= MOST_EXPERTS
    if pairs <= experts and not many:
        return _assign_pairs(expert_TK.contiguous(), experts, beside=beside)
    if beside:
        raise ValueError(f"{pairs} pairs of {experts} experts are too many for a shared one beside")
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    runs = torch.empty(experts, 3, dtype=torch.int32, device=device)
    dispatch = ExpertDispatch(order, runs, expert_TK.shape[1])
    if many:
        return _assign_many(expert_TK.contiguous(), experts, dispatch)
    step = min(ASSIGN_STEP, max(16, triton.next_power_of_2(pairs)))
    pdl = overlaps(device)
    assign_kernel[(experts,)](
        expert_TK.contiguous(),
        order,
        runs,
        pairs,
        experts,
        EP=_padded(experts),
        STEP=step,
        PDL=pdl,
        num_warps=1 if step <= 256 else 8 if step > 1024 else 4,
        launch_pdl=pdl,
    )
    return dispatch


def _assign_pairs(expert_TK: Tensor, experts: int, *, beside: bool) -> ExpertDispatch:
    (tokens, per_token), device = expert_TK.shape, expert_TK.device
    pairs, pdl = tokens * per_token, overlaps(device)
    order = torch.empty(pairs + beside * tokens, dtype=torch.int32, device=device)
    runs = torch.empty(pairs + beside, 3, dtype=torch.int32, device=device)
    assign_pairs_kernel[(pairs + beside,)](
        expert_TK,
        order,
        runs,
        pairs,
        experts,
        per_token,
        STEP=triton.next_power_of_2(pairs),
        BESIDE=beside,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return ExpertDispatch(order, runs, per_token + beside)


def _assign_many(expert_TK: Tensor, experts: int, dispatch: ExpertDispatch) -> ExpertDispatch:
    pairs, device = expert_TK.numel(), expert_TK.device
    programs, padded = triton.cdiv(pairs, BLOCK), _padded(experts)
    counts = torch.empty(programs, padded, dtype=torch.int32, device=device)
    most = pairs // WIDE + min(experts, pairs)
    blocks, apart, broad = (
        torch.empty(most, 4, dtype=torch.int32, device=device) for _ in range(3)
    )
    count = torch.empty(4, dtype=torch.int32, device=device)
    pdl = overlaps(device)
    launch = {"PDL": pdl, "num_warps": 8, "launch_pdl": pdl}
    count_kernel[(programs,)](expert_TK, counts, pairs, EP=padded, BLOCK=BLOCK, **launch)
    place_kernel[(max(programs, experts),)](
        expert_TK,
        counts,
        dispatch.order_C,
        dispatch.runs_E,
        blocks,
        apart,
        broad,
        count,
        pairs,
        experts,
        programs,
        EP=padded,
        BLOCK=BLOCK,
        WIDE=WIDE,
        SHORT=SHORT,
        **launch,
    )
    return ExpertDispatch(
        dispatch.order_C, dispatch.runs_E, dispatch.per_token, blocks, apart, broad, count
    )


def _padded(experts: int) -> int:
    return max(16, triton.next_power_of_2(experts))
