"""Host side of `wgmma_gemm_kernel` (Hopper, many rows of x): what fits it, sizes, the launch.

No interpreter runs Gluon, and Triton compiles this kernel for sm_90 only: everywhere else, and
where memory is not `aligned`, another kernel serves (choice.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.formats.packed_words import INTEGERS, PackedWords
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.operands.linear_operands import LinearOperands
from llmpq.kernels.gemm.ranking.config import Config, ProductPlan
from llmpq.kernels.gemm.ranking.wgmma_plan import (
    parts_of,
    schedule,
    slot_columns,
    tile_rows,
    tiles_together,
)
from llmpq.kernels.multiprocessors import multiprocessors

_FAR = 4  # k-groups ahead of their use at which words are asked into the L2


def launch(plan: ProductPlan, operands: LinearOperands) -> None:
    """Launch the kernel; y may be the residual's memory."""
    from llmpq.kernels.gemm.gluon.wgmma_gemm import wgmma_gemm_kernel

    config, q, x_MK, y_MN = plan.config, operands.q, operands.x_MK, operands.y_MN
    m, k = x_MK.shape
    bt, extra = parts_of(config)
    planes, scale, zero = q.block_words()
    blocks, groups = operands.blocks, operands.groups
    m_tiles = -(-m // config.bm)
    n_tiles = -(-blocks * BLOCK_ROWS // tile_rows(config))
    tiles = m_tiles * n_tiles
    programs, whole = schedule(config, tiles, groups, multiprocessors(x_MK.device))
    # Float32 sums of unfinished tiles, two a program at most, and a counter for each part of such a
    # tile: 64 rows of w by one power of two of rows of x (gluon_shares.py).
    shares = 2 * programs * tile_rows(config) * config.bm if whole < tiles else 1
    parts = (tiles - whole) * tile_rows(config) // 64 * (2 if extra else 1)
    wgmma_gemm_kernel[(programs,)](
        *_described(config, x_MK, y_MN, bt),
        *(_described(config, x_MK, y_MN, extra) if extra else (None, None, None)),
        planes[0],
        planes[-1],
        scale,
        zero,
        *operands.pointers,
        x_MK.new_empty(shares, dtype=torch.float32),
        arrivals(x_MK.device, parts) if parts else scale,
        m,
        q.out_features,
        m_tiles,
        n_tiles,
        blocks,
        groups,
        whole,
        tiles_together(k, config.bm),
        HAS_BIAS=operands.bias_N is not None,
        HAS_RESIDUAL=operands.residual_MN is not None,
        SPLIT=whole < tiles,
        PDL=plan.pdl,
        **_constants(config, q),
        num_warps=4,
        maxnreg=config.registers,
        launch_pdl=plan.pdl,
    )


def _described(config: Config, x_MK: Tensor, y_MN: Tensor, box: int) -> tuple[Any, ...]:
    """Return descriptors of x, of y, and of the first tile's rows of y, in boxes of `box` rows.

    The first tile is the one with fewer rows than `bm` where bm does not divide them.
    """
    (m, k), n, columns = x_MK.shape, y_MN.shape[1], slot_columns(config)
    rows, head = n // BLOCK_ROWS * BLOCK_ROWS, m - (-(-m // config.bm) - 1) * config.bm
    dtype, x, y = x_MK.dtype, x_MK.data_ptr(), y_MN.data_ptr()
    return (
        _descriptor(x, dtype, (m, k), k, (box, columns)),
        _descriptor(y, dtype, (m, rows), n, (box, 64)),
        _descriptor(y, dtype, (head, rows), n, (box, 64)),
    )


@dataclass(frozen=True)
class _Place:
    """What a descriptor reads of its tensor: cached descriptors keep no tensor's memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address


@functools.lru_cache(maxsize=4096)
def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, int], stride: int, box: tuple[int, int]
) -> Any:
    """Return a TMA descriptor, made once an address: layers' inputs lie at a few addresses."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(128, 16, 2)
    place: Any = _Place(address, dtype)
    return TensorDescriptor(place, list(shape), [stride, 1], list(box), layout)


def _constants(config: Config, q: PackedWords) -> dict[str, int | bool | str]:
    """Return the kernel's constants that the weight's form and the tiles decide."""
    return {
        "BITS": q.bits,
        "GROUPED": 0 if q.group_size is None else 1 if q.form == "e2m1" else GROUP // q.group_size,
        "SYMMETRIC": q.symmetric if q.form in INTEGERS else q.form,
        "BH": config.blocks,
        "BT": parts_of(config)[0],
        "EXTRA": parts_of(config)[1],
        "KS": slot_columns(config),
        "STAGES": config.stages,
        "FAR": _FAR,
        "LATE": _late(config),
        "WGS": config.warpgroups,
        "ASKER": config.asker,
    }


def _late(config: Config) -> bool:
    """Whether x is asked for between products; not with two row blocks: ptxas serialises those."""
    return config.blocks == 1
