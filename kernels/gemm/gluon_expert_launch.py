"""Host side of gluon_expert_*.py (Hopper, a prompt's rows): what fits, descriptors, launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.expert_blocks import gather_kernel
from llmpq.kernels.gemm.expert_sent import Sent
from llmpq.kernels.gemm.gated import GateRule
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.overlap import overlaps

CAPABILITY = (9, 0)
"""Triton compiles these kernels for no other."""
STAGES, PACKED_STAGES = 4, 8
"""Slots of the ring, of 48 and of 16 KiB."""
OWN = 256
"""Rows of w of an item."""
BROAD, BROAD_STAGES = True, 5
"""Whether packed w that is not gated meets 256 rows of x: it is unpacked half as often."""
FREE = True
"""Whether programs of 16-bit w take whichever item comes next, not every so many-th."""
SEEK = False
"""Whether programs of 16-bit w gather x themselves."""
LEAST_COLUMNS = 256
"""The ring is filled from one row of items before the loop over its columns begins."""
GATHERED = (16, 512)
"""Rows that a program of the gathering takes, and columns at a time."""


def fits(x: Tensor, sent: Sent) -> bool:
    """Whether many pairs' rows can be read by TMA, here."""
    if x.device.type != "cuda" or x.element_size() != 2 or sent.blocks is None:
        return False
    columns = x.shape[1]
    aligned = columns % 8 == 0 and columns >= LEAST_COLUMNS
    return aligned and torch.cuda.get_device_capability(x.device) == CAPABILITY


def product(
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    x: Tensor,
    sent: Sent,
    *,
    back: bool,
    gate: GateRule | None,
) -> Tensor:
    """Return `ExpertStack.product` of a stack: [E, N, K], or the planes of all experts [E, ...]."""
    x, rule = x.contiguous(), gate or GateRule()
    kernel, weights, columns, constants = _parts(weight, x, sent, back=back)
    if kernel is not None and "BITS" in constants:
        constants["BROAD"] = BROAD and gate is None
        constants["STAGES"] = BROAD_STAGES if constants["BROAD"] else PACKED_STAGES
    if not back and not constants.get("SEEK"):
        x = gathered(x, sent)
    n = weight.shape[1] if isinstance(weight, Tensor) else weight.out_features
    leave, own = (n, OWN) if gate is None else (n // 2, OWN // 2)
    y = x.new_empty(sent.order_C.numel(), leave)
    blocks, count, box = sent.blocks if constants.get("FREE") else sent.apart, sent.count, 128
    if constants.get("BROAD"):
        assert sent.count is not None
        blocks, count, box, own = sent.broad, sent.count[3:], 256, OWN // 2
    given = (x if bias is None else bias, y, sent.order_C, blocks, count, n, leave)
    pdl = overlaps(x.device)
    kernel[(multiprocessors(x.device),)](
        *(_boxes(x, box), *weights, *given),
        *(*columns, triton.cdiv(leave, own), float(rule.limit), float(rule.slope)),
        **constants,
        FUSE=gate is not None,
        ACT=rule.activation,
        HAS_BIAS=bias is not None,
        GATHER=not back,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return y


def _parts(
    weight: Tensor | QuantizedWeight, x: Tensor, sent: Sent, *, back: bool
) -> tuple[Any, tuple[Any, ...], tuple[int, ...], dict[str, int | bool]]:
    """Return a kernel, its weights and what belongs to them, sizes of columns, constants."""
    from llmpq.kernels.gemm.gluon_expert_dense import dense_kernel
    from llmpq.kernels.gemm.gluon_expert_packed import packed_kernel

    if isinstance(weight, Tensor):
        columns = weight.shape[2]
        constants = {"STAGES": STAGES, "FREE": FREE}
        constants["SEEK"] = SEEK and not back and columns % 64 == 0
        rows = (_boxes(weight, 64), x, sent.per_token, columns)
        return dense_kernel, rows, (triton.cdiv(columns, 64),), constants
    scale = weight.scale
    planes = (*weight.planes, scale, scale if weight.zero is None else weight.zero)
    words = [t.view(t.shape[0], -1).view(torch.int32) for t in planes]
    height = weight.out_features // BLOCK_ROWS
    return (
        packed_kernel,
        (words[0], words[-3], words[-2], words[-1]),
        (height, scale.shape[0] * height, triton.cdiv(weight.in_features, 128)),
        {
            "BITS": weight.bits,
            "GROUPED": weight.group_size is not None,
            "SYMMETRIC": weight.symmetric,
        },
    )


def gathered(x: Tensor, sent: Sent) -> Tensor:
    """Return the row of every pair's token [C, K], sorted by expert."""
    pairs, (rows, columns) = sent.order_C.numel(), GATHERED
    made, pdl = x.new_empty(pairs, x.shape[1]), overlaps(x.device)
    gather_kernel[(triton.cdiv(pairs, rows),)](
        *(x.contiguous(), sent.order_C, made, pairs, sent.per_token, x.shape[1]),
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
