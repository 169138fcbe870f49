"""W4A4 on Hopper: `plan` decides, the inputs are rounded (hopper_inputs.py), `product` multiplies.

    M tokens     inputs                            product
    to FEW       16-bit values that rounding       weight-only kernels (linear_gpu.py), which are
                 leaves, in the fragment order     limited by the same bytes
    more         codes as e4m3, int8 outliers      wgmma_codes.cu
    above MANY   codes times integer scales        int8_kernel.py, where the scheme has them

Activations of 16 bits (the target of a W4A4 draft) take the first way at any M, unrounded.

M tokens, K = in_features, N = out_features, G groups.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.atom.codes_text import CodesTile, text
from llmpq.kernels.atom.hopper_inputs import (
    Activation,
    RoundedTokens,
    activation_input,
    any_input,
    is_few,
    norm_input,
)
from llmpq.kernels.atom.int8_kernel import integer_kernel
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.cuda.rows_launch import LaunchShape
from llmpq.kernels.gemm.linear_gpu import linear_gpu
from llmpq.kernels.gemm.ranking.wgmma_plan import tiles_together
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.nvrtc import CudaFunction, tensor_map
from llmpq.kernels.overlap import overlaps

if TYPE_CHECKING:
    from llmpq.kernels.weights.atom_weight import AtomTiles

__all__ = [
    "Activation",
    "HopperPlan",
    "RoundedTokens",
    "activation_input",
    "any_input",
    "norm_input",
    "plan",
    "product",
    "tiles_linear",
]

ROWS = 128
"""Rows of w of a tile of the product of integer scales."""

_TILE_COST = {(64, 3): 0.79, (96, 3): 1.0, (128, 2): 1.0, (160, 2): 1.09}
"""What a tile of so many tokens and warpgroups takes, beside one of 128 and 2 (H200)."""

_TOGETHER_BYTES = 1 << 24
"""Rows of x that take turns under a tile of w, with integer scales (H200, M = 4096: gate_up 817 us,
848 at a quarter; down 400, 432 at thrice)."""

_SHARES_COST = 0.42
"""What adding up shares takes, beside a tile of 128 tokens and 32 k-groups (H200)."""


@dataclass(frozen=True, kw_only=True)
class HopperPlan:
    """How a product runs; `bm` None is the weight-only kernels."""

    bm: int | None
    warpgroups: int = 2
    shares: bool = False
    """Whether tiles that fill no wave of programs have their K shared out."""


def plan(
    rows: int,
    out_features: int,
    groups: int,
    *,
    activation_bits: int = 4,
    multiprocessors: int = 132,
) -> HopperPlan:
    """Decide from shapes alone: the tiles whose waves of programs take least."""
    if is_few(rows, activation_bits):
        return HopperPlan(bm=None)

    def took(chosen: HopperPlan) -> float:
        assert chosen.bm is not None
        tiles = -(-rows // chosen.bm) * -(-out_features // (64 * chosen.warpgroups))
        waves = tiles / multiprocessors
        whole = math.ceil(waves) if not chosen.shares else waves + _SHARES_COST * 32 / groups
        return whole * _TILE_COST[chosen.bm, chosen.warpgroups]

    plans = (
        HopperPlan(bm=bm, warpgroups=warpgroups, shares=shares)
        for bm, warpgroups in _TILE_COST
        for shares in (False, True)
    )
    return min(plans, key=took)


def product(
    tokens: RoundedTokens,
    weight: AtomTiles,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual_MN: Tensor | None = None,
    into_residual: bool = False,
    chosen: HopperPlan | None = None,
) -> Tensor:
    """Return y [M, N] = x w^T (+ bias) (+ residual); `into_residual`: in the residual's place."""
    if tokens.unit is not None:
        y = residual_MN if into_residual else None
        return _in_units(tokens, weight, dtype, bias, residual_MN, y)
    if tokens.scales is None:
        return linear_gpu(
            tokens.values, weight.words, bias, residual_MN, into_residual=into_residual
        )
    m, n, here = tokens.values.shape[0], weight.out_features, tokens.values.device
    chosen = chosen or plan(m, n, weight.groups, multiprocessors=multiprocessors(here))
    assert chosen.bm is not None
    y = residual_MN if into_residual else torch.empty(m, n, dtype=dtype, device=here)
    assert y is not None, "into_residual needs a residual"
    blocks, total = n // BLOCK_ROWS, weight.words.groups
    m_tiles, n_tiles = triton.cdiv(m, chosen.bm), triton.cdiv(n, 64 * chosen.warpgroups)
    programs, whole = _schedule(
        m_tiles * n_tiles, weight.groups, chosen.shares, multiprocessors(here)
    )
    shared, high = m_tiles * n_tiles - whole, 4 * chosen.warpgroups
    sums = 2 * programs * 16 * high * chosen.bm if shared else 1
    partial = torch.empty(sums, dtype=torch.float32, device=here)
    arrived = arrivals(here, chosen.warpgroups * shared) if shared else partial
    planes, scale, _ = weight.words.block_words()
    # Bytes in pairs: TMA swizzles rows of 128 bytes alike.
    codes, slots = tokens.values.view(torch.float16), tokens.scales.shape
    _function(
        chosen.bm, chosen.warpgroups, dtype, weight.words.scale.dtype, weight.scheme.outliers > 0
    ).launch(
        here,
        programs,
        128 * (chosen.warpgroups + 1),
        (
            tensor_map(
                codes.data_ptr(), codes.dtype, (m, codes.shape[1]), codes.shape[1], (chosen.bm, 64)
            ),
            tensor_map(y.data_ptr(), dtype, (m, n), n, (chosen.bm, 64)),
            tensor_map(
                planes[0].data_ptr(), torch.int32, (blocks, 256 * total), 256 * total, (high, 256)
            ),
            tensor_map(scale.data_ptr(), torch.int32, (blocks, 8 * total), 8 * total, (high, 8)),
            tensor_map(
                tokens.scales.data_ptr(),
                torch.int32,
                (slots[0], slots[1]),
                slots[1],
                (1, chosen.bm),
            ),
            0 if bias is None else bias.data_ptr(),
            0 if residual_MN is None else residual_MN.data_ptr(),
            partial.data_ptr(),
            arrived.data_ptr(),
            LaunchShape(
                m,
                n,
                m_tiles,
                n_tiles,
                blocks,
                weight.groups,
                whole,
                tiles_together(codes.shape[1], chosen.bm),
            ),
        ),
        overlapping=overlaps(here),
    )
    return y


@functools.cache
def _function(
    tokens: int, warpgroups: int, dtype: torch.dtype, scales: torch.dtype, outliers: bool
) -> CudaFunction:
    """Return a tile's kernel; a graph may hold it, so it is kept."""
    kinds = {torch.float16: "f16", torch.bfloat16: "bf16"}
    tile = CodesTile(
        kind=kinds[dtype],
        scales=kinds[scales],
        outliers=outliers,
        tokens=tokens,
        warpgroups=warpgroups,
    )
    return CudaFunction("wgmma_codes", text(tile), tile.shared_bytes)


def _codes(weight: AtomTiles) -> TensorDescriptor:
    """Return the nibbles in boxes of 128 rows and a k-group."""
    planes, _, _ = weight.words.block_words()
    nibbles = planes[0].view(torch.uint8).view(weight.out_features // 16, -1, 128)
    return TensorDescriptor.from_tensor(nibbles, [8, 8, 128], _layout(3, 128))


def _in_units(
    tokens: RoundedTokens,
    weight: AtomTiles,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual_MN: Tensor | None,
    y_MN: Tensor | None,
) -> Tensor:
    """As `product`, of codes times integers; into `y_MN` if given."""
    (m, columns), n, here = tokens.values.shape, weight.out_features, tokens.values.device
    y = torch.empty(m, n, dtype=dtype, device=here) if y_MN is None else y_MN
    tiles = triton.cdiv(m, ROWS) * triton.cdiv(n, ROWS)
    integer_kernel[(min(tiles, multiprocessors(here)),)](
        TensorDescriptor.from_tensor(tokens.values, [ROWS, 64], _layout(2, 64)),
        _codes(weight),
        weight.steps,
        weight.unit,
        tokens.unit,
        tokens.outlier_scale,
        weight.words.scale,
        y if bias is None else bias,
        y if residual_MN is None else residual_MN,
        y,
        m,
        n,
        G=weight.groups,
        SCALES=weight.words.groups,
        OUTLIERS=weight.scheme.outliers > 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual_MN is not None,
        BM=ROWS,
        STAGES=8,
        GROUP_M=max(4, min(32, _TOGETHER_BYTES // (ROWS * columns))),
        num_warps=4,
    )
    return y


def _schedule(tiles: int, groups: int, shares: bool, multiprocessors: int) -> tuple[int, int]:
    """Return programs, and the tiles they take turns at; others' K is cut into equal runs.

    Every program gets a k-group or more: one without would never arrive at a tile.
    """
    if not shares or tiles % multiprocessors == 0:
        return min(tiles, multiprocessors), tiles
    whole = tiles // multiprocessors * multiprocessors
    if whole and (tiles - whole) * groups < multiprocessors:
        whole -= multiprocessors
    return (multiprocessors if whole else min(multiprocessors, tiles * groups)), whole


def tiles_linear(x_MK: Tensor, weight: AtomTiles, bias: Tensor | None) -> Tensor:
    """Return y [M, N] of inputs that nothing has rounded."""
    tokens = any_input(x_MK.contiguous(), weight)
    return product(tokens, weight, dtype=x_MK.dtype, bias=bias)


def _layout(rank: int, swizzle: int, *, element_bitwidth: int = 8) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=element_bitwidth, rank=rank
    )
