"""W4A4 on Hopper: `plan` decides, the inputs are rounded (hopper_inputs.py), `product` multiplies.

    M tokens     inputs                            product
    to FEW       16-bit values that rounding       weight-only kernels (linear_gpu.py), which are
                 leaves, in the fragment order     limited by the same bytes
    more         codes as e4m3, int8 outliers      fp8_kernel.py
    above MANY   codes times integer scales        int8_kernel.py, where the scheme has them

Activations of 16 bits (the target of a W4A4 draft) take the first way at any M, unrounded.

M tokens, K = in_features, N = out_features, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.atom.fp8_kernel import wgmma_kernel
from llmpq.kernels.atom.hopper_inputs import (
    Activation,
    RoundedTokens,
    activation_input,
    any_input,
    is_few,
    norm_input,
)
from llmpq.kernels.atom.int8_kernel import integer_kernel
from llmpq.kernels.gemm.linear_gpu import linear_gpu
from llmpq.kernels.multiprocessors import multiprocessors

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
"""Rows of w of a tile of the product for many tokens."""

TERMS = 16
"""Rows of a box of scales: the least K of a bfloat16 product; three exist, the rest are zeros."""

_TILE_COST = {128: 1.0, 64: 0.62}
"""What a tile of so many tokens takes, beside one of 128 (H200)."""

_TOGETHER_BYTES = 1 << 24
"""Rows of x that take turns under a tile of w, with integer scales (H200, M = 4096: gate_up 817 us,
848 at a quarter; down 400, 432 at thrice)."""

_SHARES_COST = 0.45
"""What adding up shares takes, beside a tile of 128 tokens and 32 k-groups (H200)."""


@dataclass(frozen=True, kw_only=True)
class HopperPlan:
    """How a product runs; `bm` None is the weight-only kernels."""

    bm: int | None
    stages: int = 6
    group_m: int = 8
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
        waves = -(-rows // chosen.bm) * -(-out_features // ROWS) / multiprocessors
        whole = math.ceil(waves) if not chosen.shares else waves + _SHARES_COST * 32 / groups
        return whole * _TILE_COST[chosen.bm]

    return min((HopperPlan(bm=bm, shares=s) for bm in _TILE_COST for s in (False, True)), key=took)


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
    box = ([chosen.bm, 64], _layout(2, 64))
    tiles = triton.cdiv(m, chosen.bm) * triton.cdiv(n, ROWS)
    programs, whole = _schedule(tiles, weight.groups, chosen.shares, multiprocessors(here))
    shared = tiles - whole
    sums = 2 * programs * ROWS * chosen.bm if shared else 1
    wgmma_kernel[(programs,)](
        TensorDescriptor.from_tensor(tokens.values.view(torch.float8_e4m3fn), *box),
        TensorDescriptor.from_tensor(tokens.values, *box),
        _codes(weight),
        TensorDescriptor.from_tensor(
            tokens.scales.view(weight.groups, 3, -1),
            [1, TERMS, chosen.bm],
            _layout(3, 128, element_bitwidth=16),
        ),
        tokens.outlier_scale,
        weight.words.scale,
        y if bias is None else bias,
        y if residual_MN is None else residual_MN,
        y,
        torch.empty(sums, dtype=torch.float32, device=here),
        arrivals(here, 2 * shared) if shared else tokens.outlier_scale,
        m,
        n,
        whole,
        G=weight.groups,
        SCALES=weight.words.groups,
        OUTLIERS=weight.scheme.outliers > 0,
        SPLIT=shared > 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual_MN is not None,
        BM=chosen.bm,
        STAGES=chosen.stages,
        GROUP_M=chosen.group_m,
        num_warps=4,
    )
    return y


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
