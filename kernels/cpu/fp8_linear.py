"""y = x w^T on the CPU with a weight kept in E4M3: numbers of a few rows of w at a time.

w = code * scale is computed in float32 and rounded once to x's dtype.
"""

from __future__ import annotations

from torch import Tensor

from llmpq.kernels.cpu.dense import dense_linear
from llmpq.kernels.formats.fp8_weight import Fp8Weight

_CHUNK_WEIGHTS = 1 << 20
"""Weights made numbers at a time, as packed_linear.py."""


def fp8_linear_cpu(x_MK: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Multiply x [M, K] by a weight whose codes are on the CPU."""
    n = weight.out_features
    step = max(64, _CHUNK_WEIGHTS // weight.in_features // 64 * 64)
    y = x_MK.new_empty(x_MK.shape[0], n)
    for start in range(0, n, step):
        stop = min(n, start + step)
        w = weight.dequantize(x_MK.dtype, start, stop)
        y[:, start:stop] = dense_linear(x_MK, w, None if bias is None else bias[start:stop])
        del w  # or two pieces are alive at once
    return y
