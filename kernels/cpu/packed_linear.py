"""y = x w^T on the CPU: our own C++ where there is a compiler (native_linear.py), else torch.

Those are torch's packed operators where they win, else dequantise and multiply.

Measured on one core of an AMD EPYC with AVX-512 VNNI and BF16, torch 2.13, microseconds, packed
operator / dequantise and multiply:

    bfloat16  N = K    M = 1        16           32            64            128
    4 bit     1024     58 / 1044    226 / 1084   416 / 1158    810 / 1307    1870 / 1570
    4 bit     4096     710 / 16268  3442 / 23069 10555 / 35282 20725 / 31888 -
    8 bit     1024     36 / 371     219 / 428    423 / 494     838 / 643     -
    8 bit g   1024     111 / 632    521 / 672    968 / 760     1911 / 1018   -

float32, float16: both operators fall back to scalar loops (4096, M = 1: 24 ms, dense 2.7 ms) and
are never used. For 8 bits casting the codes and scaling the products saves a pass over the weight
(1024, M = 1: 118 against 204) while weight and product are small.

Shapes: x [M, K], K may be short of the padded Kp by the padding, which is zero weight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.cpu.dense import CHUNK_WEIGHTS, dense_in_pieces
from llmpq.kernels.cpu.native_linear import multiplies, native_linear
from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.formats.weight_layout import GROUP, Layout
from llmpq.precision import padded_k

_NEVER = 1 << 62
_INT4_ROWS = 64
_INT8_ROWS = 64
_INT8_GROUPED_ROWS = 16
_CAST_ROWS = 32


def linear_cpu(x_MK: Tensor, qweight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Multiply x [M, K] by a weight whose planes are on the CPU."""
    if multiplies(qweight):
        return native_linear(x_MK, qweight, bias)
    rows = x_MK.shape[0] if x_MK.dtype == torch.bfloat16 else _NEVER
    int8_rows = _INT8_ROWS if qweight.groups == 1 else _INT8_GROUPED_ROWS
    if qweight.layout is Layout.CPU_INT4 and rows <= _INT4_ROWS:
        y = _int4_product(_pad(x_MK), qweight)
    elif qweight.layout is Layout.CPU_INT8 and rows <= int8_rows:
        return _round(_int8_product(_pad(x_MK), qweight), bias, x_MK.dtype)
    elif qweight.layout is Layout.CPU_INT8 and _cast_wins(x_MK.shape[0], qweight):
        return _round(_int8_cast_product(_pad(x_MK), qweight), bias, x_MK.dtype)
    else:
        return dequantize_product(x_MK, qweight, bias)
    return y if bias is None else y + bias


def _round(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add the bias before the one rounding to `dtype`."""
    return (total if bias is None else total + bias).to(dtype)


def _cast_wins(rows: int, qweight: QuantizedWeight) -> bool:
    weights = qweight.out_features * qweight.in_features
    return rows <= _CAST_ROWS and weights <= CHUNK_WEIGHTS


def dequantize_product(x_MK: Tensor, qweight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Dequantise and multiply, a few rows of the weight at a time (`CHUNK_WEIGHTS`)."""
    shape = qweight.out_features, qweight.in_features
    return dense_in_pieces(
        x_MK, shape, lambda *rows: dequantize_rows(qweight, x_MK.dtype, *rows), bias
    )


def dequantize_rows(qweight: QuantizedWeight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Return rows start..stop (start a multiple of 64) of w [N, K], computed in `dtype`."""
    groups = qweight.groups
    codes = qweight.codes(start, stop)
    if qweight.bits == 8:
        codes = codes.bitwise_xor_(128).view(torch.int8)  # code - 128 is exact in 8 signed bits
    w = codes.to(dtype).view(stop - start, groups, -1)
    if qweight.bits < 8 or not qweight.symmetric:
        zero = qweight.zero_NG()[start:stop].to(dtype) - (128 if qweight.bits == 8 else 0)
        w -= zero[:, :, None]
    w *= qweight.scale_NG()[start:stop].to(dtype)[:, :, None]
    return w.view(stop - start, -1)[:, : qweight.in_features]


def _pad(x_MK: Tensor) -> Tensor:
    k = x_MK.shape[1]
    padding = padded_k(k) - k
    return functional.pad(x_MK, (0, padding)) if padding else x_MK.contiguous()


def _int4_product(x_MK: Tensor, qweight: QuantizedWeight) -> Tensor:
    """torch computes (code - 8) * scale + offset per (row, group): offset = (8 - zero) * scale."""
    n = qweight.out_features
    scale = qweight.scale.view(-1, n)
    if qweight.zero is None:
        offset = torch.zeros_like(scale)
    else:
        offset = (8 - qweight.zero.view(-1, n)) * scale
    pairs = torch.stack((scale, offset), dim=2)
    if qweight.group_size is None:
        pairs = pairs.expand(x_MK.shape[1] // GROUP, n, 2).contiguous()
    operator = torch.ops.aten._weight_int4pack_mm_for_cpu
    return operator(x_MK, qweight.planes[0], GROUP, pairs)


def _int8_product(x_MK: Tensor, qweight: QuantizedWeight) -> Tensor:
    """One int8pack product per group, summed in float32; zeros enter through the row sums of x.

    Returns float32 unless there is nothing to sum.
    """
    q = qweight.planes[0]
    scale = qweight.scale.view(q.shape[0], -1)
    x_gMk = x_MK.view(x_MK.shape[0], q.shape[0], -1).transpose(0, 1).contiguous()
    operator = torch.ops.aten._weight_int8pack_mm
    if q.shape[0] == 1 and qweight.zero is None:
        return operator(x_gMk[0], q[0], scale[0])
    total = torch.zeros(x_MK.shape[0], qweight.out_features)
    for g in range(q.shape[0]):
        total += operator(x_gMk[g], q[g], scale[g])
    return _subtract_zeros(total, x_gMk, scale, qweight)


def _int8_cast_product(x_MK: Tensor, qweight: QuantizedWeight) -> Tensor:
    """Cast the codes, multiply by group, scale the products (float32): no scaled weight is made."""
    q = qweight.planes[0]
    scale = qweight.scale.view(q.shape[0], -1)
    x_gMk = x_MK.view(x_MK.shape[0], q.shape[0], -1).transpose(0, 1)
    products = torch.bmm(x_gMk, q.to(x_MK.dtype).transpose(1, 2)).float()
    total = products.mul_(scale.float()[:, None]).sum(0)
    return _subtract_zeros(total, x_gMk, scale, qweight)


def _subtract_zeros(
    total: Tensor, x_gMk: Tensor, scale: Tensor, qweight: QuantizedWeight
) -> Tensor:
    """Stored codes are code - 128, so w = (stored - (zero - 128)) * scale."""
    if qweight.zero is None:
        return total
    offset = (qweight.zero.view_as(scale).float() - 128) * scale.float()
    return total - x_gMk.float().sum(2).t() @ offset
