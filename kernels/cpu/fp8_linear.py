"""y = x w^T on the CPU with a weight kept in E4M3 (kernels/native/fp8.h, else torch).

few rows of x   codes times x, sums and scales in float32
more            w = code * scale in float32, rounded once to x's dtype, some rows at a time
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmpq.kernels.cpu.dense import dense_in_pieces
from llmpq.kernels.kernel_table import CPU_FLOAT_ROWS
from llmpq.kernels.native.library import DTYPE_CODES, address, call, library

if TYPE_CHECKING:
    from llmpq.kernels.weights.fp8_weight import Fp8Weight


def fp8_linear_cpu(x_MK: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Multiply x [M, K] by a weight whose codes are on the CPU."""
    native = library() is not None and x_MK.dtype in DTYPE_CODES
    if native and 0 < x_MK.shape[0] <= CPU_FLOAT_ROWS:
        return gemv_fp8(x_MK, weight, bias)
    made = dequantize_rows if native else _by_torch
    shape = weight.out_features, weight.in_features
    return dense_in_pieces(x_MK, shape, lambda *rows: made(weight, x_MK.dtype, *rows), bias)


def gemv_fp8(x_MK: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Multiply codes as they are."""
    x_MK, m, n = x_MK.contiguous(), x_MK.shape[0], weight.out_features
    y = x_MK.new_empty(m, n)
    bias = bias if bias is None else bias.to(x_MK.dtype)
    call(
        "llmpq_fp8_rows",
        address(x_MK),
        address(weight.codes_NK),
        address(weight.scale),
        address(bias),
        address(y),
        m,
        *_sizes(weight),
        DTYPE_CODES[x_MK.dtype],
        torch.get_num_threads(),
    )
    return y


def dequantize_rows(weight: Fp8Weight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Return rows start..stop of w [N, K], computed in float32."""
    w = torch.empty(stop - start, weight.in_features, dtype=dtype)
    call(
        "llmpq_fp8_dequantize",
        address(weight.codes_NK),
        address(weight.scale),
        address(w),
        start,
        stop,
        *_sizes(weight),
        DTYPE_CODES[dtype],
        torch.get_num_threads(),
    )
    return w


def _by_torch(weight: Fp8Weight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    return weight.dequantize(dtype, start, stop)


def _sizes(weight: Fp8Weight) -> tuple[int, ...]:
    n, k = weight.out_features, weight.in_features
    return n, k, weight.rows, weight.columns, weight.scale.shape[1]
