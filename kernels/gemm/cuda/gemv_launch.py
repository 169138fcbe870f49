"""Host side of `gemv.cu`: few rows of x, and w in float16, on GPUs before Ampere.

float16 alone: these cards have no bfloat16. Where there is no NVRTC that knows the card, Triton or
torch's operators dequantise, and cuBLAS multiplies (kernel_table.py).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from llmpq.kernels import nvrtc
from llmpq.kernels.formats.packed_words import INTEGERS, PackedWords
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP, Layout
from llmpq.kernels.gemm.cuda.cuda_text import defined, part
from llmpq.kernels.gemm.operands.linear_operands import LinearOperands
from llmpq.kernels.gemm.ranking.config import ProductPlan
from llmpq.kernels.kernel_table import Kernel, eligible
from llmpq.kernels.multiprocessors import device_of, multiprocessors

TENSOR_CORES_FROM = (7, 5)
"""The oldest card with mma.m16n8k8."""
ROWS_TENSOR, ROWS_PLAIN = (8, 16, 32), (1, 2, 4, 8)
"""Rows of x that a program may multiply: more take several programs, each of which reads w."""
WARPS, MORE_WARPS = 8, 16
"""Of a program; the second where programs are fewer than twice the multiprocessors."""


def serves(x_MK: Tensor, q: PackedWords) -> bool:
    """Whether a product of few rows is this kernel's; x's rows follow each other."""
    kernels = eligible(q.kernel_form, device_of(q.device), x_MK.shape[0])
    if Kernel.CUDA_GEMV not in kernels or x_MK.dtype != torch.float16:
        return False
    return x_MK.data_ptr() % 4 == 0 and readable(q)


def readable(q: PackedWords) -> bool:
    """Whether words are whole numbers in blocks, K is even, and NVRTC compiles for the card."""
    return (
        q.form in INTEGERS
        and q.layout is Layout.FRAGMENT
        and q.scale.dtype == torch.float16
        and q.in_features % 2 == 0
        and q.out_features >= BLOCK_ROWS
        and nvrtc.compiles_for(torch.cuda.get_device_capability(q.device))
    )


def launch(
    plan: ProductPlan, operands: LinearOperands, *, tensor_cores: bool | None = None
) -> None:
    """Launch the kernel, which chooses its own tiles.

    `tensor_cores`: as the card has them, unless a test says otherwise.
    """
    q, x_MK, m, groups = operands.q, operands.x_MK, operands.rows, operands.groups
    bias_N, residual_MN, device = operands.bias_N, operands.residual_MN, x_MK.device
    capability = torch.cuda.get_device_capability(device)
    tensor = capability >= TENSOR_CORES_FROM if tensor_cores is None else tensor_cores
    tiles = ROWS_TENSOR if tensor else ROWS_PLAIN
    rows = next((tile for tile in tiles if tile >= m), tiles[-1])
    planes, scale, zero = q.block_words()
    programs = operands.blocks * -(-m // rows)
    wide = programs < 2 * multiprocessors(device) and groups >= 2 * WARPS and rows <= 8
    warps = MORE_WARPS if wide else WARPS
    _function("cuda_gemv", _constants(q), rows, warps, tensor, capability).launch(
        device,
        programs,
        32 * warps,
        (
            planes[0].data_ptr(),
            planes[-1].data_ptr(),
            scale.data_ptr(),
            zero.data_ptr(),
            x_MK.data_ptr(),
            0 if bias_N is None else bias_N.data_ptr(),
            0 if residual_MN is None else residual_MN.data_ptr(),
            operands.y_MN.data_ptr(),
            nvrtc.integer(m),
            nvrtc.integer(q.out_features),
            nvrtc.integer(x_MK.shape[1]),
            nvrtc.integer(groups),
        ),
        overlapping=False,
    )


def dequantize(q: PackedWords) -> Tensor:
    """Return w [N, K] in float16 of a `readable` weight; rows past the last full block by torch."""
    n, k = q.out_features, q.in_features
    blocks, groups = n // BLOCK_ROWS, -(-k // GROUP)
    w_NK = torch.empty(n, k, dtype=torch.float16, device=q.device)
    planes, scale, zero = q.block_words()
    capability = torch.cuda.get_device_capability(q.device)
    _function("cuda_dequantize", _constants(q), 1, WARPS, False, capability).launch(
        q.device,
        -(-blocks * groups // WARPS),
        32 * WARPS,
        (
            planes[0].data_ptr(),
            planes[-1].data_ptr(),
            scale.data_ptr(),
            zero.data_ptr(),
            w_NK.data_ptr(),
            nvrtc.integer(blocks),
            nvrtc.integer(k),
            nvrtc.integer(groups),
        ),
        overlapping=False,
    )
    if blocks * BLOCK_ROWS < n:
        w_NK[blocks * BLOCK_ROWS :] = q.cut(blocks * BLOCK_ROWS, n).dequantize(torch.float16)
    return w_NK


def text(constants: tuple[tuple[str, int], ...], rows: int, warps: int, tensor: bool) -> str:
    """Return the kernels' whole text."""
    every = (*constants, ("ROWS", rows), ("WARPS", warps), ("TENSOR", int(tensor)))
    return defined(dict(every)) + part("gemv.cu")


def _constants(q: PackedWords) -> tuple[tuple[str, int], ...]:
    """Return what a weight's form is to the kernels; PARTS: scales of a k-group, 0: one a row."""
    parts = 0 if q.group_size is None else GROUP // q.group_size
    return ("BITS", q.bits), ("ZEROS", int(not q.symmetric)), ("PARTS", parts)


@functools.cache
def _function(
    name: str,
    constants: tuple[tuple[str, int], ...],
    rows: int,
    warps: int,
    tensor: bool,
    capability: tuple[int, int],
) -> nvrtc.CudaFunction:
    """Return a form's kernel; a graph may hold it, so it is kept."""
    architecture = nvrtc.architecture(capability)
    return nvrtc.CudaFunction(name, text(constants, rows, warps, tensor), 0, architecture)
