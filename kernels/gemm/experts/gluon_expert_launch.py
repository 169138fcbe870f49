"""Host side of gluon_expert_*.py (Hopper, a prompt's rows): what fits, descriptors, launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.experts.expert_blocks import gather_kernel
from llmpq.kernels.gemm.experts.expert_dispatch import ExpertDispatch
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.gemm.experts.stack_words import StackWords
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.overlap import overlaps

STAGES, PACKED_STAGES = 4, 6
"""Slots of the ring, of 48 and of 16 KiB."""
OWN = 256
"""Rows of w of an item."""
BROAD_FROM, BROAD_STAGES = 128, 5
"""Pairs of an expert, of an even routing, from which packed w that is not gated is multiplied by
256 rows of x at a time: it is unpacked half as often."""
LEAST_COLUMNS = 256
"""The ring is filled from one row of items before the loop over its columns begins."""
GATHERED = (16, 512)
"""Rows that a program of the gathering takes, and columns at a time."""


def fits(x: Tensor, dispatch: ExpertDispatch) -> bool:
    """Whether many pairs' rows can be read by TMA, here."""
    if x.device.type != "cuda" or x.element_size() != 2 or dispatch.blocks is None:
        return False
    columns = x.shape[1]
    aligned = columns % 8 == 0 and columns >= LEAST_COLUMNS
    return aligned


def product(
    stack: Tensor | StackWords,
    bias: Tensor | None,
    x: Tensor,
    dispatch: ExpertDispatch,
    *,
    back: bool,
    gate: GateRule | None,
) -> Tensor:
    """Return `ExpertStack.product` of a stack: [E, N, K], or the planes of all experts [E, ...]."""
    x, rule, pdl = x.contiguous(), gate or GateRule(), overlaps(x.device)
    if isinstance(stack, Tensor):
        way, n = _dense(stack, x, dispatch, back=back), stack.shape[1]
    else:
        way, n = _packed(stack, dispatch, gate), stack.like.out_features
    if not back and not way.constants.get("SEEK"):
        x = gathered(x, dispatch)
    leave = n if gate is None else n // 2
    y = x.new_empty(dispatch.order_C.numel(), leave)
    way.kernel[(multiprocessors(x.device),)](
        _boxes(x, way.rows),
        *way.weights,
        x if bias is None else bias,
        y,
        dispatch.order_C,
        way.blocks,
        way.count,
        n,
        leave,
        *way.columns,
        triton.cdiv(leave, way.own if gate is None else way.own // 2),
        float(rule.limit),
        float(rule.slope),
        **way.constants,
        FUSE=gate is not None,
        ACT=rule.activation,
        HAS_BIAS=bias is not None,
        GATHER=not back,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return y


@dataclass(frozen=True)
class _Way:
    """A kernel, what it is given of its weights and of their columns, its items and constants."""

    kernel: Any
    weights: tuple[Any, ...]
    columns: tuple[int, ...]
    blocks: Tensor | None
    count: Tensor | None
    rows: int
    own: int
    constants: dict[str, int | bool | str]


def _dense(weight: Tensor, x: Tensor, dispatch: ExpertDispatch, *, back: bool) -> _Way:
    """Return 16-bit programs, which gather x themselves where its columns are whole slots."""
    from llmpq.kernels.gemm.experts.gluon_expert_dense import dense_kernel

    columns = weight.shape[2]
    return _Way(
        dense_kernel,
        (_boxes(weight, 64), x, dispatch.per_token, columns),
        (triton.cdiv(columns, 64),),
        dispatch.blocks,
        dispatch.count,
        128,
        OWN,
        {"STAGES": STAGES, "SEEK": not back and columns % 64 == 0},
    )


def _packed(stack: StackWords, dispatch: ExpertDispatch, gate: GateRule | None) -> _Way:
    """Return programs of packed words, which take turns: short blocks last."""
    from llmpq.kernels.gemm.experts.gluon_expert_packed import packed_kernel

    q, words = stack.like, stack.words
    height, experts = q.out_features // BLOCK_ROWS, words[0].shape[0]
    broad = gate is None and dispatch.order_C.numel() >= BROAD_FROM * experts
    assert dispatch.count is not None
    return _Way(
        packed_kernel,
        tuple(words),
        (height, experts * height, triton.cdiv(q.in_features, 128)),
        dispatch.broad if broad else dispatch.apart,
        dispatch.count[3:] if broad else dispatch.count,
        256 if broad else 128,
        OWN // 2 if broad else OWN,
        {
            "BITS": q.bits,
            "GROUPED": q.group_size is not None,
            "SYMMETRIC": "e2m1" if stack.is_e2m1 else q.symmetric,
            "STAGES": BROAD_STAGES if broad else PACKED_STAGES,
            "BROAD": broad,
        },
    )


def gathered(x: Tensor, dispatch: ExpertDispatch) -> Tensor:
    """Return the row of every pair's token [C, K], sorted by expert."""
    pairs, (rows, columns) = dispatch.order_C.numel(), GATHERED
    made, pdl = x.new_empty(pairs, x.shape[1]), overlaps(x.device)
    gather_kernel[(triton.cdiv(pairs, rows),)](
        x.contiguous(),
        dispatch.order_C,
        made,
        pairs,
        dispatch.per_token,
        x.shape[1],
        BR=rows,
        BK=columns,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return made


def _boxes(tensor: Tensor, rows: int) -> Any:
    """Return a descriptor of [*, columns] in boxes of `rows` rows and 64 columns."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    flat = tensor.view(-1, tensor.shape[-1])
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(flat, list(flat.shape), [flat.shape[1], 1], [rows, 64], layout)
