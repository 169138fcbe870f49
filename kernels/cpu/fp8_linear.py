"""y = x w^T on the CPU with a weight kept in E4M3 (kernels/native/fp8.h, else torch).

few rows of x   codes times x, sums and scales in float32
more            w = code * scale in float32, rounded once to x's dtype, some rows at a time
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmpq.kernels.cpu.dense import dense_in_pieces
from llmpq.kernels.cpu.native_codes import dequantize_codes, multiply_codes
from llmpq.kernels.kernel_table import CPU_FLOAT_ROWS
from llmpq.kernels.native.library import DTYPE_CODES, address, library

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
    own, sizes = _addresses(weight), _sizes(weight)
    return multiply_codes("llmpq_fp8_rows", x_MK, bias, weight=own, sizes=sizes)


def dequantize_rows(weight: Fp8Weight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Return rows start..stop of w [N, K], computed in float32."""
    own, sizes = _addresses(weight), _sizes(weight)
    return dequantize_codes("llmpq_fp8_dequantize", dtype, start, stop, weight=own, sizes=sizes)


def _by_torch(weight: Fp8Weight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    return weight.dequantize(dtype, start, stop)


def _addresses(weight: Fp8Weight) -> tuple[int, ...]:
    return address(weight.codes_NK), address(weight.scale)


def _sizes(weight: Fp8Weight) -> tuple[int, ...]:
    n, k = weight.out_features, weight.in_features
    return n, k, weight.rows, weight.columns, weight.scale.shape[1]
