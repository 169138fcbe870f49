"""Unquantised matrix products on the CPU: oneDNN with weights in its own blocked layout.

torch hands float32 products to MKL, which on other makers' CPUs leaves their widest vectors unused.
Measured on one core of an AMD EPYC with AVX-512, torch 2.13, microseconds, `functional.linear` /
oneDNN with a plain weight / with a blocked one:

    float32   N, K         M = 1                8                    64
              1536, 256    22 / 30 / 29         83 / 64 / 41         869 / 227 / 205
              4096, 4096   2707 / 2134 / 1443   6649 / 3745 / 2730   30935 / 21282 / 19618
    bfloat16  1536, 256    30 / 29 / 20         37 / 36 / 25         119 / 117 / 106
              4096, 4096   3983 / 4195 / 1616   4718 / 4685 / 2619   13810 / 13790 / 11009

A plain weight (a tied head, float16, shapes that would be padded) is multiplied by few rows in our
own code (kernels/native/dense.h), which reads it once. Two busy cores of an Intel Xeon with AMX,
N x K = 64128 x 2048 (bfloat16: 128256 x 2048), ms, `functional.linear` / ours:

    rows    float32        bfloat16       float16
    1       47.0 / 42.5    64.3 / 56.7    43.4 / 26.6
    4       99.3 / 56.7    65.1 / 63.7    52.2 / 33.5
    8       149.0 / 81.5   75.8 / 97.3    57.3 / 66.8     (oneDNN's float32, plain: 69)

With AMX bfloat16 weights stay plain, in large pages: our own code multiplies one row at memory
speed and more of them in tiles (kernels/native/dense_tiles.h); a prompt's are
`functional.linear`'s, which takes as long as oneDNN with a blocked weight.

A blocked weight is an opaque `torch.Tensor` (`is_mkldnn`); shapes it would pad stay plain, so that
bytes are those the planner counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.native import huge_pages
from llmpq.kernels.native.library import DTYPE_CODES, address, call, library

_NATIVE_ROWS = 4
"""Rows up to which our own code takes a plain weight."""

_TILED_ROWS = 64
"""Rows up to which our own code takes a bfloat16 weight where there is AMX."""

_SMALL_BYTES = 2 << 20
"""Weights up to here stay plain: in a core's L2, so that reading them costs little, and a step's
calls much (kernels/cpu/native_layer.py)."""

_SMALL_ROWS = 16
"""Rows up to which our own code takes a small one."""

CHUNK_WEIGHTS = 1 << 20
"""Weights made values at a time, 4 MB of float32 at most: larger temporaries are mapped and
page-faulted anew each call (4096 x 4096, M = 1, float32: 35 ms in one piece, 5.4 in sixteen)."""
_PLAIN_ROWS = 8
"""Rows from which oneDNN wins on a plain float32 weight."""


def pack_dense(weight_NK: Tensor) -> Tensor:
    """Return the weight in the layout of oneDNN, or as it is where that is not free.

    Where our own tiles multiply by it: in large pages.
    """
    if has_tiles(weight_NK):
        return huge_pages.moved(weight_NK)
    if weight_NK.nbytes <= _SMALL_BYTES or not _usable(weight_NK):
        return weight_NK
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), None)
    return packed if torch.ops.mkldnn._nbytes(packed) == weight_NK.nbytes else weight_NK


def plain_dense(weight_NK: Tensor) -> Tensor:
    """Return a dense weight as an ordinary tensor, a copy if it was packed."""
    return weight_NK.to_dense() if weight_NK.is_mkldnn else weight_NK


def dense_linear(x: Tensor, weight_NK: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b [..., N] for a weight that is packed or not, on any device."""
    if not weight_NK.is_mkldnn:
        if native_takes(x, weight_NK):
            return native_dense(x, weight_NK, bias)
        rows = x.numel() // x.shape[-1]
        plain_wins = rows >= _PLAIN_ROWS and weight_NK.dtype == torch.float32
        # Rows with gaps send oneDNN to its reference loops, a hundred times slower.
        if not (plain_wins and weight_NK.is_contiguous() and _usable(weight_NK)):
            return functional.linear(x, weight_NK, bias)
    x_MK = x.reshape(-1, x.shape[-1]).contiguous()
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias, "none", [], "")
    return y_MN.view(*x.shape[:-1], y_MN.shape[-1])


def dense_in_pieces(
    x_MK: Tensor,
    shape: tuple[int, int],
    rows_of: Callable[[int, int], Tensor],
    bias: Tensor | None,
) -> Tensor:
    """Return x w^T + b [M, N] for w [N, K] of a shape, of which `rows_of` makes rows start..stop.

    So many at a time as have `CHUNK_WEIGHTS`; `start` is a multiple of 64.
    """
    n, k = shape
    step = max(64, CHUNK_WEIGHTS // k // 64 * 64)
    if step >= n:
        return dense_linear(x_MK, rows_of(0, n), bias)
    y = x_MK.new_empty(x_MK.shape[0], n)
    for start in range(0, n, step):
        stop = min(n, start + step)
        w = rows_of(start, stop)
        y[:, start:stop] = dense_linear(x_MK, w, None if bias is None else bias[start:stop])
        del w  # or two pieces are alive at once
    return y


def native_takes(x: Tensor, weight_NK: Tensor) -> bool:
    """Whether our own code computes this product, and faster than torch."""
    return x.dtype == weight_NK.dtype and x.numel() <= native_rows(weight_NK) * x.shape[-1]


def native_rows(weight_NK: Tensor) -> int:
    """Return the rows up to which our own code takes a weight; 0 if it is packed or a device's."""
    ours = (
        weight_NK.device.type == "cpu"
        and not weight_NK.is_mkldnn
        and weight_NK.dtype in DTYPE_CODES
        and weight_NK.is_contiguous()
        and library() is not None
    )
    if not ours:
        return 0
    if has_tiles(weight_NK):
        return _TILED_ROWS
    return _SMALL_ROWS if weight_NK.nbytes <= _SMALL_BYTES else _NATIVE_ROWS


def has_tiles(weight_NK: Tensor) -> bool:
    """Whether our own code multiplies by this weight in tiles here."""
    return (
        weight_NK.dtype == torch.bfloat16
        and weight_NK.device.type == "cpu"
        and not weight_NK.is_mkldnn
        and weight_NK.is_contiguous()
        and (found := library()) is not None
        and bool(found.llmpq_tiles())
    )


def native_dense(x: Tensor, weight_NK: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b [..., N] of a plain weight, sums in float32 (kernels/native/dense.h)."""
    n, k = weight_NK.shape
    x_MK = x.reshape(-1, k).contiguous()
    y_MN = x_MK.new_empty(x_MK.shape[0], n)
    bias = bias if bias is None else bias.to(x.dtype).contiguous()
    call(
        "llmpq_dense",
        address(x_MK),
        address(weight_NK),
        address(bias),
        address(y_MN),
        x_MK.shape[0],
        n,
        k,
        DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    return y_MN.view(*x.shape[:-1], n)


def _usable(weight_NK: Tensor) -> bool:
    """Whether oneDNN computes with weights of this dtype and device here."""
    if weight_NK.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight_NK.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_NK.dtype == torch.float32
