"""Host side of `ring_gemv.cu` (Hopper, few rows of x): its form, shared memory and launch."""

from __future__ import annotations

import ctypes
import functools

import torch

from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.gemm.operands.linear_operands import LinearOperands
from llmpq.kernels.gemm.ranking.config import Config, ProductPlan
from llmpq.kernels.gemm.ranking.ring_plan import TILE, RingForm
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.nvrtc import CudaFunction


class _Work(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("M", "N", "K", "blocks", "groups"))


def launch(plan: ProductPlan, operands: LinearOperands) -> None:
    """Launch the kernel; y may be the residual's memory."""
    q, x_MK = operands.q, operands.x_MK
    planes, scale, zero = q.block_words()
    form = _form(
        plan.config, x_MK, bits=q.bits, zeros=not q.symmetric, grouped=q.group_size is not None
    )
    pointers = (planes[0], planes[-1], scale, zero, operands.bias_N, operands.residual_MN)
    _launch(form, plan, x_MK, operands.y_MN, pointers, operands.blocks)


def dense(
    plan: ProductPlan,
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    residual_MN: torch.Tensor | None,
    y_MN: torch.Tensor,
) -> None:
    """Launch it with a weight [N, K] of 16 bits, N in sixteens; y may be the residual's memory."""
    form = _form(plan.config, x_MK, bits=16, zeros=False, grouped=False)
    pointers = (w_NK, w_NK, None, None, None, residual_MN)
    _launch(form, plan, x_MK, y_MN, pointers, w_NK.shape[0] // 16)


def serves(x_MK: torch.Tensor) -> bool:
    """Whether the kernel can read x: K in whole groups, rows that start on 16 bytes."""
    return x_MK.shape[1] % GROUP == 0 and x_MK.data_ptr() % 16 == 0


def _form(config: Config, x_MK: torch.Tensor, *, bits: int, zeros: bool, grouped: bool) -> RingForm:
    return RingForm(
        bits=bits,
        kind="f16" if x_MK.dtype == torch.float16 else "bf16",
        zeros=zeros,
        grouped=grouped,
        tiles=-(-x_MK.shape[0] // TILE),
        warps=config.warps,
        parts=config.blocks,
        ring=config.stages,
        phase=config.x_depth,
    )


def _launch(
    form: RingForm,
    plan: ProductPlan,
    x_MK: torch.Tensor,
    y_MN: torch.Tensor,
    pointers: tuple[torch.Tensor | None, ...],
    blocks: int,
) -> None:
    (m, k), n, device = x_MK.shape, y_MN.shape[1], x_MK.device
    groups = k // GROUP
    _function(form, form.shared_bytes(groups, m)).launch(
        device,
        min(multiprocessors(device), blocks),
        32 * form.warps,
        (
            x_MK.data_ptr(),
            y_MN.data_ptr(),
            *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
            _Work(m, n, k, blocks, groups),
        ),
        overlapping=plan.pdl,
    )


@functools.cache
def _function(form: RingForm, shared_bytes: int) -> CudaFunction:
    """Return a form's kernel; a graph may hold it, so it is kept."""
    from llmpq.kernels.gemm.cuda.ring_text import text

    return CudaFunction("ring_gemv", text(form), shared_bytes)
