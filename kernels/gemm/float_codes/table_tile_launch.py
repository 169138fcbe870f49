"""Host side of table_tile.py: tiles, shares of K, the launch; dequantising for many rows of x."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import knobs

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.formats.table_weight import TableWeight, Values
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.float_codes.table_tile import (
    lookup_assembly,
    table_tile_kernel,
    table_words_kernel,
)
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.overlap import overlaps

MOST_ROWS = 256
"""Rows of x that words are multiplied with; more meet dequantised weights."""
WARPS, BLOCKS = 4, 1
PROGRAMS_PER_SM = 4
MMA_SYNC = ((8, 0), (12, 0))
"""Where operands that come from a join hold four neighbours of k a thread: not on Hopper and
data-centre Blackwell."""


@dataclass(frozen=True)
class WordsTile:
    """Rows of x and k-groups in flight of a program."""

    bm: int
    stages: int

    def split(self, rows: int, blocks: int, groups: int, sms: int) -> int:
        """Return the shares of K that give every multiprocessor its programs."""
        tiles = triton.cdiv(rows, self.bm) * triton.cdiv(blocks, BLOCKS * WARPS)
        return max(1, min(groups // self.stages, PROGRAMS_PER_SM * sms // tiles))


def tile_of(rows: int) -> WordsTile:
    """Return the tile for so many rows of x."""
    bm = next((size for size in (16, 32, 64) if rows <= size), 128)
    return WordsTile(bm, 4 if bm <= 32 else 3)


def multiply(
    x_MK: Tensor, q: TableWeight, bias: Tensor | None, residual_MN: Tensor | None
) -> Tensor:
    """Return y [M, N] = x w^T (+ bias) (+ residual) of a weight in FRAGMENT."""
    x_MK, interpret = x_MK.contiguous(), bool(knobs.runtime.interpret)
    rows, n, k = x_MK.shape[0], q.out_features, q.in_features
    tile, blocks, groups = tile_of(rows), n // BLOCK_ROWS, triton.cdiv(k, GROUP)
    split = tile.split(rows, blocks, groups, multiprocessors(x_MK.device))
    m_tiles, tiles = triton.cdiv(rows, tile.bm), triton.cdiv(blocks, BLOCKS * WARPS)
    y_MN = x_MK.new_empty(rows, n)
    sums = m_tiles * tiles * split * BLOCK_ROWS * BLOCKS * WARPS * tile.bm if split > 1 else 1
    capability = (9, 0) if interpret else torch.cuda.get_device_capability(x_MK.device)
    pdl = overlaps(x_MK.device)
    table_tile_kernel[(m_tiles, tiles, split)](
        *(x_MK, *_operands(q), x_MK if bias is None else bias),
        *(x_MK if residual_MN is None else residual_MN, y_MN),
        *(x_MK.new_empty(sums, dtype=torch.float32), arrivals(x_MK.device, m_tiles * tiles)),
        *(rows, n, k, blocks, groups, split),
        **constants(q, x_MK.dtype),
        EVEN_K=k % GROUP == 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual_MN is not None,
        SPLIT=split > 1,
        BH=BLOCKS,
        WM=WARPS,
        BM=tile.bm,
        STAGES=tile.stages,
        PDL=pdl,
        KWIDTH4=has_mma_sync(capability),
        INTERPRET=interpret,
        num_warps=WARPS,
        num_stages=tile.stages,
        launch_pdl=pdl,
    )
    return y_MN


def has_mma_sync(capability: tuple[int, int]) -> bool:
    """Whether products run by mma.sync there."""
    return not (9, 0) <= capability < (12, 0)


def dequantized(q: TableWeight, dtype: torch.dtype) -> Tensor:
    """Return w [N, K] of a weight in FRAGMENT."""
    n, k = q.out_features, q.in_features
    out = torch.empty(n, k, dtype=dtype, device=q.device)
    blocks, groups = n // BLOCK_ROWS, triton.cdiv(k, GROUP)
    table_words_kernel[(triton.cdiv(blocks, 2), groups)](
        *(*_operands(q), out, k, blocks, groups),
        **constants(q, dtype),
        EVEN_K=k % GROUP == 0,
        BH=1,
        WM=2,
        INTERPRET=bool(knobs.runtime.interpret),
        num_warps=2,
    )
    return out


def constants(q: TableWeight, dtype: torch.dtype) -> dict[str, object]:
    """Return what tells the kernels the form of a weight."""
    if q.values is Values.E2M1:
        return {"PARTS": 0 if q.is_mxfp4 else 8, "ASM0": "", "ASM1": ""}
    kind = "f16" if dtype == torch.float16 else "bf16"
    texts = {f"ASM{half}": _text(q.values, kind, half) for half in range(2)}
    return {"PARTS": GROUP // q.group_size, **texts}


@functools.cache
def _text(values: Values, kind: str, half: int) -> str:
    return lookup_assembly(values.table, kind, half)


@functools.cache
def _table(values: Values, device: torch.device) -> Tensor:
    return torch.tensor(values.table, dtype=torch.float32, device=device)


def _operands(q: TableWeight) -> tuple[Tensor, ...]:
    """Return words, scales, the table, which the interpreter reads, and factors of rows."""
    table = _table(q.values, q.device)
    words = q.plane.view(torch.int32), q.scale.view(torch.int32)
    return *words, table, table if q.factor is None else q.factor
