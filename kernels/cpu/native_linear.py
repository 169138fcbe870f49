"""y = x w^T on the CPU with a packed weight: by our own code (kernels/native/) where there is a
compiler, else dequantised by torch and multiplied.

Shapes: x [M, K], w [N, K].
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.cpu.dense import dense_in_pieces
from llmpq.kernels.formats.weight_layout import GROUP, NATIVE, Layout
from llmpq.kernels.kernel_table import CPU_ROWS, CPU_ROWS_FLOAT32
from llmpq.kernels.native.library import DTYPE_CODES, address, call, library
from llmpq.precision import padded_k

if TYPE_CHECKING:
    from llmpq.kernels.weights.quantized_weight import QuantizedWeight

_ROWS = {
    torch.float32: CPU_ROWS_FLOAT32,
    torch.bfloat16: CPU_ROWS,
    torch.float16: CPU_ROWS,
}

_LAYER_ROWS = 128
"""Rows of x up to which a layer is one call where our own code multiplies any number of them."""


def linear_cpu(x_MK: Tensor, qweight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Multiply x [M, K] by a weight whose planes are on the CPU."""
    if multiplies(qweight):
        return native_linear(x_MK, qweight, bias)
    return dequantize_product(x_MK, qweight, bias)


def dequantize_product(x_MK: Tensor, qweight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Dequantise by torch and multiply, a few rows of the weight at a time (`CHUNK_WEIGHTS`).

    A machine without a compiler has no other way.
    """

    def rows_of(start: int, stop: int) -> Tensor:
        return qweight.dequantize_in(x_MK.dtype, start, stop)

    return dense_in_pieces(x_MK, (qweight.out_features, qweight.in_features), rows_of, bias)


def native_linear(x_MK: Tensor, qweight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Multiply x [M, K] by a weight in a layout of `NATIVE`."""
    if x_MK.shape[0] <= _ROWS[x_MK.dtype] or _takes_any_rows(qweight, x_MK.dtype):
        return multiply_packed(x_MK, qweight, bias)
    if qweight.activation_bits == 8:
        x_MK, qweight = in_eight_bits(x_MK), replace(qweight, activation_bits=16)
        if _takes_any_rows(qweight, x_MK.dtype):
            return multiply_packed(x_MK, qweight, bias)
    held: list[Tensor] = []

    def rows_of(start: int, stop: int) -> Tensor:
        # Pieces follow one another in the same memory: fresh pages would cost more than values.
        if not held:
            held.append(torch.empty(stop - start, qweight.in_features, dtype=x_MK.dtype))
        return dequantize_rows(qweight, x_MK.dtype, start, stop, out=held[0][: stop - start])

    return dense_in_pieces(x_MK, (qweight.out_features, qweight.in_features), rows_of, bias)


def multiply_packed(x_MK: Tensor, qweight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Multiply by our own code alone.

    Codes and x, rounded to 16 or 8 bits a k-group, are multiplied as integers (panel_rows.h,
    gemv_int16.h, tiles.h, gemm_vnni.h). With AMX, more rows of bfloat16 are multiplied by the
    weight in bfloat16, dequantised block by block in a core's cache (gemm_amx_bf16.h).
    """
    x_MK = x_MK.contiguous()
    m, n = x_MK.shape[0], qweight.out_features
    y = x_MK.new_empty(m, n)
    bias = bias if bias is None else bias.to(x_MK.dtype)
    call(
        "llmpq_multiply",
        address(x_MK),
        *_addresses(qweight),
        address(bias),
        address(y),
        m,
        *_sizes(qweight),
        DTYPE_CODES[x_MK.dtype],
        DTYPE_CODES[qweight.scale.dtype],
        qweight.activation_bits,
        torch.get_num_threads(),
    )
    return y


def multiplies(qweight: QuantizedWeight) -> bool:
    """Whether this machine's library knows the weight's layout."""
    found = library()
    if found is None or qweight.layout not in NATIVE:
        return False
    return qweight.layout is Layout.CPU or bool(found.llmpq_panels())


def rows_at_once(qweight: QuantizedWeight, dtype: torch.dtype) -> int:
    """Return the rows of x [M, K] up to which one call of `multiply_packed` is quickest."""
    return _LAYER_ROWS if _takes_any_rows(qweight, dtype) else _ROWS[dtype]


def _takes_any_rows(qweight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether our own code multiplies any number of rows here.

    In tiles: codes that lie in panels, any weight made bfloat16 (of rows in 8 bits `native_linear`
    makes bfloat16 first). In sheets: rows that are rounded to one row of integers, which
    float32's are to 8 bits.
    """
    found = library()
    if found is None:
        return False
    exact = qweight.activation_bits == 16
    in_panels = qweight.layout is Layout.CPU_PANELS
    if found.llmpq_tiles() and (in_panels or dtype == torch.bfloat16):
        return in_panels or exact
    return bool(found.llmpq_panels()) and not (dtype == torch.float32 and exact)


def in_eight_bits(x_MK: Tensor) -> Tensor:
    """Return x in its dtype, each group of 128 rounded to 127ths of its largest."""
    k = x_MK.shape[1]
    groups = functional.pad(x_MK.float(), (0, -k % GROUP)).unflatten(1, (-1, GROUP))
    step = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-30) / 127
    return groups.div_(step).round_().mul_(step).flatten(1)[:, :k].to(x_MK.dtype)


def dequantize_rows(
    qweight: QuantizedWeight,
    dtype: torch.dtype,
    start: int,
    stop: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return rows start..stop of w [N, K], computed in float32, in `out` if there is one."""
    w = torch.empty(stop - start, qweight.in_features, dtype=dtype) if out is None else out
    call(
        "llmpq_dequantize",
        *_addresses(qweight),
        address(w),
        start,
        stop,
        *_sizes(qweight),
        DTYPE_CODES[dtype],
        DTYPE_CODES[qweight.scale.dtype],
        torch.get_num_threads(),
    )
    return w


def _addresses(qweight: QuantizedWeight) -> tuple[int, int, int]:
    return address(qweight.planes[0]), address(qweight.scale), address(qweight.zero)


def _sizes(qweight: QuantizedWeight) -> tuple[int, ...]:
    k = qweight.in_features
    panels = int(qweight.layout is Layout.CPU_PANELS)
    return qweight.out_features, k, padded_k(k) // GROUP, qweight.groups, qweight.bits, panels
