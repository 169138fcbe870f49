"""Launches of products with a weight kept in E4M3 on a GPU (e4m3_kernel.py), and the choice.

rows of x           way
up to MOST_ROWS     codes, exact in registers
more                w made once in x's dtype, then cuBLAS
float32, older GPUs w made by torch, then cuBLAS
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton import knobs

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.formats.fp8_weight import Fp8Weight
from llmpq.kernels.gemm.e4m3_kernel import e4m3_dequantize_kernel, e4m3_kernel
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.overlap import overlaps

MOST_ROWS = 256
OLDEST, OLDEST_TRITON = (8, 0), (7, 5)
"""Compute capability from which products and dequantising run in Triton."""
MOST_SPLITS = 16


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows of w and x, columns, stages and warps of a program; programs a multiprocessor gets."""

    bn: int
    bm: int
    bk: int
    stages: int
    warps: int
    per_sm: int = 2

    def splits(self, m: int, n: int, k: int, sms: int) -> int:
        """Return the shares of K that give every multiprocessor its programs."""
        tiles = triton.cdiv(m, self.bm) * triton.cdiv(n, self.bn)
        most = min(MOST_SPLITS, max(1, triton.cdiv(k, self.bk) // self.stages))
        return max(1, min(most, self.per_sm * sms // tiles))


def tile_of(m: int, step: int) -> Tile:
    """Return the tile for m rows of x; `step`: columns that surely share a scale."""
    bk = min(128, step)
    if m <= 16:
        return Tile(bn=64, bm=16, bk=bk, stages=4, warps=4)
    if m <= 32:
        return Tile(bn=64, bm=32, bk=bk, stages=4, warps=4)
    if m <= 64:
        return Tile(bn=64, bm=64, bk=bk, stages=3, warps=4)
    return Tile(bn=128, bm=128, bk=64, stages=3, warps=8, per_sm=1)


def step_of(weight: Fp8Weight) -> int:
    """Return how many columns a product may take with one scale a row."""
    return 128 if weight.columns >= weight.in_features or weight.columns % 128 == 0 else 64


def fp8_linear_gpu(
    x_MK: Tensor, weight: Fp8Weight, bias: Tensor | None, residual_MN: Tensor | None
) -> Tensor:
    """Return y [M, N] = x w^T (+ bias) (+ residual), in x's dtype."""
    m = x_MK.shape[0]
    sixteen = x_MK.dtype in (torch.float16, torch.bfloat16)
    if sixteen and 0 < m <= MOST_ROWS and not _older_than(x_MK.device, OLDEST):
        return multiply(x_MK, weight, bias, residual_MN, tile_of(m, step_of(weight)))
    y_MN = functional.linear(x_MK, dequantized(weight, x_MK.dtype), bias)
    return y_MN if residual_MN is None else y_MN + residual_MN


def multiply(
    x_MK: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    residual_MN: Tensor | None,
    tile: Tile,
    splits: int | None = None,
) -> Tensor:
    """Multiply codes as they are."""
    x_MK, interpret = x_MK.contiguous(), bool(knobs.runtime.interpret)
    (m, k), n, sms = x_MK.shape, weight.out_features, multiprocessors(x_MK.device)
    split = splits or tile.splits(m, n, k, sms)
    m_tiles, n_tiles = triton.cdiv(m, tile.bm), triton.cdiv(n, tile.bn)
    y_MN = x_MK.new_empty(m, n)
    sums = m_tiles * n_tiles * split * tile.bn * tile.bm if split > 1 else 1
    pdl = overlaps(x_MK.device)
    e4m3_kernel[(m_tiles, n_tiles, split)](
        *(x_MK, weight.codes_NK, weight.scale),
        x_MK if bias is None else bias,
        x_MK if residual_MN is None else residual_MN,
        *(y_MN, x_MK.new_empty(sums, dtype=torch.float32)),
        arrivals(x_MK.device, m_tiles * n_tiles),
        *(m, n, k, weight.rows, weight.columns, weight.scale.shape[1], split),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual_MN is not None,
        SPLIT=split > 1,
        SHARED=weight.scale.shape[1] == 1,
        EVEN_K=k % tile.bk == 0,
        BN=tile.bn,
        BM=tile.bm,
        BK=tile.bk,
        STAGES=tile.stages,
        PDL=pdl,
        INTERPRET=interpret,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl,
    )
    return y_MN


def dequantized(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return w [N, K]; where Triton may not run, by torch."""
    if _older_than(weight.device, OLDEST_TRITON):
        return weight.dequantize(dtype)
    n, k = weight.out_features, weight.in_features
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    e4m3_dequantize_kernel[(triton.cdiv(n, 16), triton.cdiv(k, 256))](
        *(weight.codes_NK, weight.scale, out, n, k),
        *(weight.rows, weight.columns, weight.scale.shape[1]),
        BN=16,
        BK=256,
        INTERPRET=bool(knobs.runtime.interpret),
        num_warps=4,
    )
    return out


def _older_than(device: torch.device, wanted: tuple[int, int]) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < wanted
