"""W4A4 and W8A8 on any GPU with int8 tensor cores: inputs are rounded where they are made
(portable_inputs.py), `product` multiplies.

`plan` and `channel_plan` decide tiles from shapes alone; the kernels are in portable_kernels.py,
their twins in reference.py. Weights with 8-bit outliers, INT4 groups of 64 or 128, or INT8 per
channel. None starts before the kernel ahead has ended: that made products slower (H200, a W8A8
layer of Llama-3.1-8B: 133 us of a token, 101 without; 333 tokens 298, 289).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from llmpq.kernels.atom.portable_inputs import (
    RoundedInput,
    Shape,
    activation_input,
    any_input,
    norm_input,
    round_input,
)
from llmpq.kernels.atom.portable_kernels import atom_gemm_kernel, channel_gemm_kernel
from llmpq.kernels.formats.weight_layout import GROUP

if TYPE_CHECKING:
    from llmpq.kernels.weights.atom_weight import AtomWeight

__all__ = [
    "GemmPlan",
    "RoundedInput",
    "activation_input",
    "any_input",
    "channel_plan",
    "norm_input",
    "plan",
    "product",
    "round_input",
]


@dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """Tiles of one product."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    group_n: int = 8


FEW_TILES = {
    (16, False): GemmPlan(block_m=16, block_n=64, warps=4, stages=8),
    (16, True): GemmPlan(block_m=16, block_n=128, warps=4, stages=4),
    (32, False): GemmPlan(block_m=32, block_n=16, warps=2, stages=7),
    (32, True): GemmPlan(block_m=32, block_n=128, warps=4, stages=4),
    (64, False): GemmPlan(block_m=64, block_n=32, warps=4, stages=8),
    (64, True): GemmPlan(block_m=64, block_n=128, warps=4, stages=4),
    (128, False): GemmPlan(block_m=64, block_n=64, warps=4, stages=6),
    (128, True): GemmPlan(block_m=128, block_n=128, warps=4, stages=3),
}
"""Tiles of W8A8 products by tokens, up to so many, and whether w has more than WIDE rows: the
fastest of the layers of Llama-3.1-8B on an H200. Few rows are cut into many programs, each with
enough of w on its way."""
WIDE = 8192


def plan(rows: int, out_features: int) -> GemmPlan:
    """Return tiles: w's rows fill the tensor core's long side, tokens the other."""
    if rows <= 16:
        return GemmPlan(block_m=16, block_n=64, warps=4, stages=4)
    if rows <= 64:
        return GemmPlan(block_m=64, block_n=64, warps=4, stages=3)
    return GemmPlan(block_m=128, block_n=128, warps=8, stages=3)


def channel_plan(rows: int, out_features: int) -> GemmPlan:
    """Return tiles of a W8A8 product.

    Of 128 x 128 with three stages two programs fit a multiprocessor, and one multiplies while the
    other stores; of 128 x 256, or with four stages, one (H200, M = 4096: qkv 161 us, 200 in
    128 x 256; gate_up 848, 923; M = 1024: 180, 227).
    """
    most = max(16, 1 << (rows - 1).bit_length())
    if most <= 128:
        return FEW_TILES[most, out_features > WIDE]
    return GemmPlan(block_m=128, block_n=128, warps=4, stages=3)


def product(
    rounded: RoundedInput,
    weight: AtomWeight,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual_MN: Tensor | None = None,
    into_residual: bool = False,
    tiles: GemmPlan | None = None,
) -> Tensor:
    """Return y [M, N] in `dtype`, exact integer products scaled in float32 (+ bias) (+ residual).

    `into_residual`: in the residual's place.
    """
    m = rounded.codes.shape[0]
    scheme = weight.scheme
    shape = Shape.of(scheme, weight.places)
    expected = shape.padded + (GROUP if scheme.outliers else 0)
    scales = shape.groups + 1
    if rounded.codes.shape[1] != expected or rounded.scales.shape != (m, scales):
        raise ValueError(
            f"product: got codes {tuple(rounded.codes.shape)} and scales "
            f"{tuple(rounded.scales.shape)}, expected {expected} columns and "
            f"{scales} scales. Round the input with the weight's own scheme."
        )
    here = rounded.codes.device
    y = (
        residual_MN
        if into_residual
        else torch.empty(m, weight.out_features, dtype=dtype, device=here)
    )
    assert y is not None, "into_residual needs a residual"
    whole_rows = scheme.group_size is None and not scheme.outliers
    if whole_rows and weight.codes.ndim == 2:  # bytes; 4 bits come packed in blocks
        chosen = tiles or channel_plan(m, weight.out_features)
        _launch_channels(rounded, weight, bias, residual_MN, y, chosen)
        return y
    tiles = tiles or plan(m, weight.out_features)
    n_tiles = triton.cdiv(weight.out_features, tiles.block_n)
    atom_gemm_kernel[(n_tiles * triton.cdiv(m, tiles.block_m),)](
        rounded.codes,
        rounded.scales,
        weight.codes,
        weight.scale,
        weight.outliers,
        weight.scale if weight.outlier_scale is None else weight.outlier_scale,
        weight.scale if bias is None else bias,
        y if residual_MN is None else residual_MN,
        y,
        m,
        weight.out_features,
        scheme.outliers,
        GROUPS=shape.groups,
        BLOCKS=shape.padded // GROUP,
        PARTS=0 if scheme.group_size is None else GROUP // shape.group,
        BITS=4 if weight.codes.ndim == 3 else 8,
        HAS_OUTLIERS=scheme.outliers > 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual_MN is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        GROUP_N=tiles.group_n,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return y


def _launch_channels(
    rounded: RoundedInput,
    weight: AtomWeight,
    bias: Tensor | None,
    residual_MN: Tensor | None,
    y: Tensor,
    tiles: GemmPlan,
) -> None:
    (m, n), width = y.shape, rounded.codes.shape[1]
    grid = (triton.cdiv(m, tiles.block_m) * triton.cdiv(n, tiles.block_n),)
    channel_gemm_kernel[grid](
        rounded.codes,
        rounded.scales,
        weight.codes,
        weight.scale,
        y if bias is None else bias,
        y if residual_MN is None else residual_MN,
        y,
        m,
        n,
        width,
        K=width,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual_MN is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        GROUP_M=8,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
