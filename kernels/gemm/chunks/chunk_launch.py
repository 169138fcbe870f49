"""Host side of chunk_kernels.py: which weights, tiles, shares of K, launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.formats.table_weight import TableWeight, Values
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.chunks.chunk_kernels import (
    chunk_numbers_kernel,
    chunk_rows_kernel,
    chunk_tile_kernel,
)
from llmpq.kernels.gemm.chunks.chunk_operand import linear_assembly, lookup_assembly
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.overlap import overlaps

Coded = QuantizedWeight | TableWeight
ROWS = 8
"""Rows of x that a program of all of K takes."""
DEPTH = 4
"""k-groups that a warp of few rows has in flight."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Blocks of 16 rows of w a warp takes, warps, rows of x, stages; programs a multiprocessor."""

    high: int = 1
    warps: int = 4
    bm: int
    stages: int
    per_sm: int = 4

    def splits(self, m: int, blocks: int, groups: int, sms: int) -> int:
        """Return the shares of K that give every multiprocessor its programs."""
        tiles = triton.cdiv(m, self.bm) * triton.cdiv(blocks, self.high * self.warps)
        return max(1, min(groups // self.stages, self.per_sm * sms // tiles))


def tile_of(m: int) -> Tile:
    """Return the tile for m rows of x."""
    bm = next((size for size in (8, 16, 32, 64) if m <= size), 128)
    return Tile(bm=bm, stages=4 if bm <= 32 else 3)


def rows_form(groups: int) -> tuple[int, int]:
    """Return the warps of a program of all of K, and the k-groups of each."""
    warps = min(16, 1 << (groups.bit_length() - 1))
    while warps > 1 and groups // warps < DEPTH:
        warps //= 2
    return warps, triton.cdiv(groups, warps)


def multiply_rows(
    x_MK: Tensor,
    q: Coded,
    bias: Tensor | None,
    residual_MN: Tensor | None,
    high: int = 1,
) -> Tensor:
    """Return y [M, N] of at most 8 rows."""
    x_MK, pdl = x_MK.contiguous(), overlaps(x_MK.device)
    (m, k), n = x_MK.shape, q.out_features
    y_MN, blocks, groups = x_MK.new_empty(m, n), n // BLOCK_ROWS, triton.cdiv(k, GROUP)
    warps, steps = rows_form(groups)
    chunk_rows_kernel[(triton.cdiv(blocks, high),)](
        *(x_MK, *_operands(q), x_MK if bias is None else bias),
        *(x_MK if residual_MN is None else residual_MN, y_MN, m, n, k, blocks, groups),
        **constants(q, x_MK.dtype),
        EVEN_K=k % GROUP == 0,
        EVEN_G=groups % warps == 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual_MN is not None,
        BH=high,
        WM=warps,
        STEPS=steps,
        D=DEPTH,
        PDL=pdl,
        INTERPRET=bool(knobs.runtime.interpret),
        num_warps=warps,
        num_stages=1,
        launch_pdl=pdl,
    )
    return y_MN


def multiply(
    x_MK: Tensor,
    q: Coded,
    bias: Tensor | None,
    residual_MN: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """Return y [M, N] = x w^T (+ bias) (+ residual) of a weight in FRAGMENT."""
    x_MK, interpret = x_MK.contiguous(), bool(knobs.runtime.interpret)
    (m, k), n = x_MK.shape, q.out_features
    tile, blocks, groups = tile or tile_of(m), n // BLOCK_ROWS, triton.cdiv(k, GROUP)
    split = tile.splits(m, blocks, groups, multiprocessors(x_MK.device))
    m_tiles, tiles = triton.cdiv(m, tile.bm), triton.cdiv(blocks, tile.high * tile.warps)
    y_MN = x_MK.new_empty(m, n)
    bn = BLOCK_ROWS * tile.high * tile.warps
    sums = m_tiles * tiles * split * bn * tile.bm if split > 1 else 1
    pdl = overlaps(x_MK.device)
    chunk_tile_kernel[(m_tiles, tiles, split)](
        *(x_MK, *_operands(q), x_MK if bias is None else bias),
        *(x_MK if residual_MN is None else residual_MN, y_MN),
        *(x_MK.new_empty(sums, dtype=torch.float32), arrivals(x_MK.device, m_tiles * tiles)),
        *(m, n, k, blocks, groups, split),
        **constants(q, x_MK.dtype),
        EVEN_K=k % GROUP == 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual_MN is not None,
        SPLIT=split > 1,
        BH=tile.high,
        WM=tile.warps,
        BM=tile.bm,
        STAGES=tile.stages,
        PDL=pdl,
        INTERPRET=interpret,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl,
    )
    return y_MN


def dequantized(q: Coded, dtype: torch.dtype) -> Tensor:
    """Return w [N, K] of a weight in FRAGMENT."""
    n, k = q.out_features, q.in_features
    out = torch.empty(n, k, dtype=dtype, device=q.device)
    blocks, groups = n // BLOCK_ROWS, triton.cdiv(k, GROUP)
    chunk_numbers_kernel[(triton.cdiv(blocks, 4), groups)](
        *(*_operands(q), out, k, blocks, groups),
        **constants(q, dtype),
        EVEN_K=k % GROUP == 0,
        BH=1,
        WM=4,
        INTERPRET=bool(knobs.runtime.interpret),
        num_warps=4,
    )
    return out


def constants(q: Coded, dtype: torch.dtype) -> dict[str, object]:
    """Return what tells the kernels the form of a weight."""
    kind, parts = "f16" if dtype == torch.float16 else "bf16", GROUP // (q.group_size or GROUP)
    if isinstance(q, TableWeight):
        texts = [_text(q.values, kind, half) for half in range(2)]
        form = {"BITS": 0, "SYMMETRIC": True, "SDT": tl.float16}
    else:
        texts = [linear_assembly(q.bits, kind, half, q.symmetric) for half in range(2)]
        own = tl.float16 if q.scale.dtype == torch.float16 else tl.bfloat16
        form = {"BITS": q.bits, "SYMMETRIC": q.symmetric, "SDT": own}
    return form | {"PARTS": parts, "ASM0": texts[0], "ASM1": texts[1]}


@functools.cache
def _text(values: Values, kind: str, half: int) -> str:
    return lookup_assembly(values.table, kind, half)


@functools.cache
def _table(values: Values, device: torch.device) -> Tensor:
    return torch.tensor(values.table, dtype=torch.float32, device=device)


def _operands(q: Coded) -> tuple[Tensor, ...]:
    """Return planes, scales and zeros as words, and the table, which the interpreter reads."""
    if isinstance(q, TableWeight):
        words = (q.plane, q.plane, q.scale, q.scale)
        table = _table(q.values, q.device)
    else:
        words = (q.planes[0], q.planes[-1], q.scale, q.scale if q.zero is None else q.zero)
        table = _table(Values.E2M1, q.device)
    return (*(t.view(torch.int32) for t in words), table)
