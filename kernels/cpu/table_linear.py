"""y = x w^T on the CPU with codes of a table (kernels/native/table.h, else torch).

few rows of x   numbers of codes times x, sums and scales in float32
more            w = table[code] scale in float32, rounded once to x's dtype, some rows at a time
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from llmpq.kernels.cpu.dense import dense_in_pieces
from llmpq.kernels.formats.table_weight import E4M3, E8M0, TableWeight, Values
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.native.library import NUMBERS, address, call, library

FEW_ROWS = 16
KINDS = NUMBERS | {E8M0: 3, E4M3: 4}
"""What table.h calls the scales."""


def table_linear_cpu(x_MK: Tensor, weight: TableWeight, bias: Tensor | None) -> Tensor:
    """Multiply x [M, K] by a weight whose codes are on the CPU."""
    native = library() is not None and x_MK.dtype in NUMBERS and weight.layout is Layout.ROWS
    if native and 0 < x_MK.shape[0] <= FEW_ROWS:
        return few_rows(x_MK, weight, bias)
    made = dequantize_rows if native else TableWeight.dequantize
    shape = weight.out_features, weight.in_features
    return dense_in_pieces(x_MK, shape, lambda *rows: made(weight, x_MK.dtype, *rows), bias)


def few_rows(x_MK: Tensor, weight: TableWeight, bias: Tensor | None) -> Tensor:
    """Multiply codes as they are."""
    x_MK, m, n = x_MK.contiguous(), x_MK.shape[0], weight.out_features
    y = x_MK.new_empty(m, n)
    bias = bias if bias is None else bias.to(x_MK.dtype)
    call(
        "llmpq_table_rows",
        *(address(x_MK), *_addresses(weight), address(bias), address(y), m, *_sizes(weight)),
        *(NUMBERS[x_MK.dtype], torch.get_num_threads()),
    )
    return y


def dequantize_rows(weight: TableWeight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Return rows start..stop of w [N, K], computed in float32."""
    w = torch.empty(stop - start, weight.in_features, dtype=dtype)
    call(
        "llmpq_table_dequantize",
        *(*_addresses(weight), address(w), start, stop, *_sizes(weight)),
        *(NUMBERS[dtype], torch.get_num_threads()),
    )
    return w


@functools.cache
def _numbers(values: Values) -> Tensor:
    return torch.tensor(values.table, dtype=torch.float32)


def _addresses(weight: TableWeight) -> tuple[int, ...]:
    numbers = _numbers(weight.values)
    return tuple(map(address, (weight.plane, weight.scale, weight.factor, numbers)))


def _sizes(weight: TableWeight) -> tuple[int, ...]:
    kind = KINDS[weight.scale.dtype]
    return weight.out_features, weight.in_features, weight.group_size, kind
