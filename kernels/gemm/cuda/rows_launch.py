"""Host side of `wgmma_rows.cu` (Hopper, many rows of x): its tile, workspace and launch.

No interpreter runs it; where there is no NVRTC, or memory is not `aligned`, another kernel serves.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.operands.linear_operands import LinearOperands
from llmpq.kernels.gemm.ranking.config import Config, ProductPlan
from llmpq.kernels.gemm.ranking.wgmma_plan import schedule, tile_rows, tiles_together
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.nvrtc import CudaFunction, Described, tensor_map


class LaunchShape(ctypes.Structure):
    """What a launch multiplies, as wgmma_parts.cu reads it."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("M", "N", "m_tiles", "n_tiles", "blocks", "groups", "whole", "together")
    )


def launch(plan: ProductPlan, operands: LinearOperands) -> None:
    """Launch the kernel; y may be the residual's memory."""
    config, q, x_MK, y_MN = plan.config, operands.q, operands.x_MK, operands.y_MN
    bias_N, residual_MN = operands.bias_N, operands.residual_MN
    blocks, groups = operands.blocks, operands.groups
    (m, k), n, device = x_MK.shape, q.out_features, x_MK.device
    _, scale, zero = q.block_words()
    m_tiles, n_tiles = -(-m // config.bm), -(-blocks * BLOCK_ROWS // tile_rows(config))
    tiles = m_tiles * n_tiles
    programs, whole = schedule(config, tiles, groups, multiprocessors(device))
    shared = 2 * programs * tile_rows(config) * config.bm if whole < tiles else 1
    partial = x_MK.new_empty(shared, dtype=torch.float32)
    parts = (tiles - whole) * tile_rows(config) // 64
    arrived = arrivals(device, parts) if parts else scale
    together = tiles_together(k, config.bm)
    kind = "f16" if x_MK.dtype == torch.float16 else "bf16"
    grouped = q.group_size is not None
    _function(
        config.bm,
        config.warpgroups,
        config.split,
        q.bits,
        kind,
        q.symmetric,
        grouped,
    ).launch(
        device,
        programs * config.split,
        128 * (config.warpgroups + 1),
        (
            tensor_map(x_MK.data_ptr(), x_MK.dtype, (m, k), k, (config.bm, 64)),
            tensor_map(
                y_MN.data_ptr(),
                y_MN.dtype,
                (m, blocks * BLOCK_ROWS),
                n,
                (config.bm // config.split, 64),
            ),
            *_weight_maps(config, operands),
            scale.data_ptr(),
            zero.data_ptr(),
            0 if bias_N is None else bias_N.data_ptr(),
            0 if residual_MN is None else residual_MN.data_ptr(),
            partial.data_ptr(),
            arrived.data_ptr(),
            LaunchShape(m, n, m_tiles, n_tiles, blocks, groups, whole, together),
        ),
        overlapping=plan.pdl,
    )


@functools.cache
def _function(
    rows: int,
    warpgroups: int,
    split: int,
    bits: int,
    kind: str,
    symmetric: bool,
    grouped: bool,
) -> CudaFunction:
    """Return a tile's kernel; a graph may hold it, so it is kept."""
    from llmpq.kernels.gemm.cuda.rows_text import RowsTile, text

    tile = RowsTile(
        bits=bits,
        kind=kind,
        zeros=not symmetric,
        grouped=grouped,
        rows=rows,
        warpgroups=warpgroups,
        split=split,
    )
    return CudaFunction("wgmma_rows", text(tile), tile.shared_bytes)


def _weight_maps(config: Config, operands: LinearOperands) -> tuple[Described, ...]:
    """Return how words and scales of a tile's blocks are moved, a k-group at a time."""
    q, groups = operands.q, operands.groups
    planes, scale, zero = q.block_words()
    words = 192 if q.bits == 3 else 256
    found = []
    for tensor, own in ((planes[0], words), (planes[-1], words), (scale, 8), (zero, 8)):
        width = own if q.group_size is None and own == 8 else own * groups
        shape = (operands.blocks, width)
        rows = tile_rows(config) // BLOCK_ROWS
        found.append(tensor_map(tensor.data_ptr(), torch.int32, shape, width, (rows, own)))
    return tuple(found)
