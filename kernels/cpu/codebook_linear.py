"""y = x w^T on the CPU with codes of a table (kernels/native/codebook.h, else torch).

few rows of x   values of codes times x, sums and scales in float32
more            w = table[code] scale in float32, rounded once to x's dtype, some rows at a time
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmpq.kernels.cpu.dense import dense_in_pieces
from llmpq.kernels.cpu.native_codes import dequantize_codes, multiply_codes
from llmpq.kernels.formats.codebooks import E4M3, E8M0, Codebook
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.kernel_table import CPU_FLOAT_ROWS
from llmpq.kernels.native.library import DTYPE_CODES, address, library

if TYPE_CHECKING:
    from llmpq.kernels.weights.codebook_weight import CodebookWeight

KINDS = DTYPE_CODES | {E8M0: 3, E4M3: 4}
"""What codebook.h calls the scales."""


def codebook_linear_cpu(x_MK: Tensor, weight: CodebookWeight, bias: Tensor | None) -> Tensor:
    """Multiply x [M, K] by a weight whose codes are on the CPU."""
    native = library() is not None and x_MK.dtype in DTYPE_CODES and weight.layout is Layout.ROWS
    if native and 0 < x_MK.shape[0] <= CPU_FLOAT_ROWS:
        return gemv_codebook(x_MK, weight, bias)
    made = dequantize_rows if native else CodebookWeight.dequantize
    shape = weight.out_features, weight.in_features
    return dense_in_pieces(x_MK, shape, lambda *rows: made(weight, x_MK.dtype, *rows), bias)


def gemv_codebook(x_MK: Tensor, weight: CodebookWeight, bias: Tensor | None) -> Tensor:
    """Multiply codes as they are."""
    own, sizes = _addresses(weight), _sizes(weight)
    return multiply_codes("llmpq_codebook_rows", x_MK, bias, weight=own, sizes=sizes)


def dequantize_rows(weight: CodebookWeight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Return rows start..stop of w [N, K], computed in float32."""
    own, sizes = _addresses(weight), _sizes(weight)
    return dequantize_codes(
        "llmpq_codebook_dequantize", dtype, start, stop, weight=own, sizes=sizes
    )


@functools.cache
def _values(codebook: Codebook) -> Tensor:
    return torch.tensor(codebook.values, dtype=torch.float32)


def _addresses(weight: CodebookWeight) -> tuple[int, ...]:
    values = _values(weight.codebook)
    return tuple(map(address, (weight.plane, weight.scale, weight.factor, values)))


def _sizes(weight: CodebookWeight) -> tuple[int, ...]:
    kind = KINDS[weight.scale.dtype]
    return weight.out_features, weight.in_features, weight.group_size, kind
