"""Launches of products with a weight kept in E4M3 on a GPU (e4m3_kernel.py), and the choice.

Which one is kernel_table.py's to say: codes, exact in registers, or w made once in x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton import knobs

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.float_codes.e4m3_fragments import (
    e4m3_blocks_kernel,
    e4m3_gemv_kernel,
    e4m3_splitk_kernel,
)
from llmpq.kernels.gemm.float_codes.e4m3_kernel import e4m3_dequantize_kernel, e4m3_kernel
from llmpq.kernels.kernel_table import GEMV_ROWS, Kernel, eligible
from llmpq.kernels.multiprocessors import device_of, multiprocessors
from llmpq.kernels.overlap import overlaps

if TYPE_CHECKING:
    from llmpq.kernels.weights.fp8_weight import Fp8Weight

MOST_SPLITS = 16


@dataclass(frozen=True, kw_only=True)
class Fragments:
    """Blocks of 16 rows of w a warp takes, warps, rows of x, stages; programs a multiprocessor."""

    high: int
    warps: int
    bm: int
    stages: int
    per_sm: int = 2

    def splits(self, m: int, n: int, groups: int, sms: int) -> int:
        """Return the shares of K that give every multiprocessor its programs."""
        tiles = triton.cdiv(m, self.bm) * triton.cdiv(n, BLOCK_ROWS * self.high * self.warps)
        most = min(MOST_SPLITS, max(1, groups // self.stages))
        return max(1, min(most, self.per_sm * sms // tiles))


def fragments_of(m: int) -> Fragments:
    """Return the tile for m rows of x."""
    if m <= 32:
        return Fragments(high=1, warps=4, bm=16 if m <= 16 else 32, stages=4)
    if m <= 64:
        return Fragments(high=1, warps=4, bm=64, stages=3)
    return Fragments(high=1, warps=8, bm=128, stages=3, per_sm=1)


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
    if x_MK.dtype in (torch.float16, torch.bfloat16):
        kernel = eligible(weight.kernel_form, device_of(x_MK.device), m)[0]
        if kernel in (Kernel.GEMV, Kernel.SPLITK_GEMM):
            return multiply_fragments(x_MK, weight, bias, residual_MN)
        if kernel is Kernel.ROWS_GEMM:
            return multiply(x_MK, weight, bias, residual_MN, tile_of(m, step_of(weight)))
    y_MN = functional.linear(x_MK, dequantized(weight, x_MK.dtype), bias)
    return y_MN if residual_MN is None else y_MN + residual_MN


def multiply_fragments(
    x_MK: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    residual_MN: Tensor | None,
    tile: Fragments | None = None,
) -> Tensor:
    """Multiply codes that lie as tensor cores take them."""
    x_MK, interpret = x_MK.contiguous(), bool(knobs.runtime.interpret)
    (m, k), n, pdl = x_MK.shape, weight.out_features, overlaps(x_MK.device)
    y_MN, groups = x_MK.new_empty(m, n), k // GROUP
    w = weight.codes_NK.view(torch.int32)
    more = (x_MK if bias is None else bias, x_MK if residual_MN is None else residual_MN)
    same = {
        "SHARED": weight.scale.shape[1] == 1,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual_MN is not None,
        "PDL": pdl,
        "INTERPRET": interpret,
        "launch_pdl": pdl,
    }
    sizes = (m, n, k, weight.rows, weight.columns, weight.scale.shape[1], n * k // 8, groups)
    if m <= GEMV_ROWS and tile is None:
        warps, steps = rows_form(groups)
        e4m3_gemv_kernel[(n // BLOCK_ROWS,)](
            x_MK,
            w,
            weight.scale,
            *more,
            y_MN,
            *sizes,
            **same,
            EVEN_G=groups % warps == 0,
            BH=1,
            WM=warps,
            STEPS=steps,
            D=DEPTH,
            num_warps=warps,
            num_stages=1,
        )
        return y_MN
    tile = tile or fragments_of(m)
    bn, sms = BLOCK_ROWS * tile.high * tile.warps, multiprocessors(x_MK.device)
    split = tile.splits(m, n, groups, sms)
    m_tiles, n_tiles = triton.cdiv(m, tile.bm), triton.cdiv(n, bn)
    sums = m_tiles * n_tiles * split * bn * tile.bm if split > 1 else 1
    e4m3_splitk_kernel[(m_tiles, n_tiles, split)](
        x_MK,
        w,
        weight.scale,
        *more,
        y_MN,
        x_MK.new_empty(sums, dtype=torch.float32),
        arrivals(x_MK.device, m_tiles * n_tiles),
        *sizes,
        split,
        **same,
        SPLIT=split > 1,
        BH=tile.high,
        WM=tile.warps,
        BM=tile.bm,
        STAGES=tile.stages,
        KWIDTH4=not on_hopper(x_MK.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y_MN


DEPTH = 4
"""k-groups that a warp of few rows has in flight."""


def rows_form(groups: int) -> tuple[int, int]:
    """Return the warps of a program of all of K, and the k-groups of each."""
    warps = min(16, 1 << (groups.bit_length() - 1))
    while warps > 1 and groups // warps < DEPTH:
        warps //= 2
    return warps, triton.cdiv(groups, warps)


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
        x_MK,
        weight.codes_NK,
        weight.scale,
        x_MK if bias is None else bias,
        x_MK if residual_MN is None else residual_MN,
        y_MN,
        x_MK.new_empty(sums, dtype=torch.float32),
        arrivals(x_MK.device, m_tiles * n_tiles),
        m,
        n,
        k,
        weight.rows,
        weight.columns,
        weight.scale.shape[1],
        split,
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
    if Kernel.DEQUANTIZE not in eligible(weight.kernel_form, device_of(weight.device), 0):
        return weight.dequantize(dtype)
    n, k = weight.out_features, weight.in_features
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    interpret = bool(knobs.runtime.interpret)
    if weight.fragment:
        e4m3_blocks_kernel[(triton.cdiv(n, 64), k // GROUP)](
            weight.codes_NK.view(torch.int32),
            weight.scale,
            out,
            n,
            k,
            weight.rows,
            weight.columns,
            weight.scale.shape[1],
            n * k // 8,
            k // GROUP,
            BH=1,
            WM=4,
            INTERPRET=interpret,
            num_warps=4,
        )
        return out
    e4m3_dequantize_kernel[(triton.cdiv(n, 16), triton.cdiv(k, 256))](
        weight.codes_NK,
        weight.scale,
        out,
        n,
        k,
        weight.rows,
        weight.columns,
        weight.scale.shape[1],
        BN=16,
        BK=256,
        INTERPRET=interpret,
        num_warps=4,
    )
    return out


def on_hopper(device: torch.device) -> bool:
    """Whether Triton takes tensor cores that read x from shared memory: k lies as stored there."""
    if device.type != "cuda":
        return False
    return (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)
