"""Calls of the C++ that multiplies and dequantises codes of float forms (fp8.h, codebook.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.kernels.native.library import DTYPE_CODES, address, call


def multiply_codes(
    function: str,
    x_MK: Tensor,
    bias: Tensor | None,
    *,
    weight: Sequence[int],
    sizes: Sequence[int],
) -> Tensor:
    """Return y [M, N]; `weight`: addresses of its tensors, `sizes`: N, K and what its form has."""
    x_MK, m = x_MK.contiguous(), x_MK.shape[0]
    y = x_MK.new_empty(m, sizes[0])
    bias = bias if bias is None else bias.to(x_MK.dtype)
    ends = (DTYPE_CODES[x_MK.dtype], torch.get_num_threads())
    call(function, address(x_MK), *weight, address(bias), address(y), m, *sizes, *ends)
    return y


def dequantize_codes(
    function: str,
    dtype: torch.dtype,
    start: int,
    stop: int,
    *,
    weight: Sequence[int],
    sizes: Sequence[int],
) -> Tensor:
    """Return rows start..stop of w [N, K], computed in float32."""
    w = torch.empty(stop - start, sizes[1], dtype=dtype)
    ends = (DTYPE_CODES[dtype], torch.get_num_threads())
    call(function, *weight, address(w), start, stop, *sizes, *ends)
    return w
