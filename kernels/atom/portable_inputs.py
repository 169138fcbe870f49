"""Inputs of the portable products, rounded in the pass that makes them.

    norm_input          RMSNorm, LayerNorm or nothing, channel order, rounding
    activation_input    SiLU-mul, ReLU, GELU or nothing, rotation if asked, rounding
    any_input           inputs that come from no fused operation

The interface of hopper_inputs.py. LayerNorm, GELU and what is rotated are made by passes of their
own. Launches only: the body is in input_kernels.py, its twin in reference.py.

M tokens, K = in_features, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import triton
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.atom.input_kernels import round_input_kernel
from llmpq.kernels.formats.atom_rounding import integer_scales, normal_channels
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.fused.gated_mlp import gate_mul
from llmpq.kernels.fused.layer_norm import layer_norm
from llmpq.kernels.fused.rms_norm import MAX_COLUMNS, rms_norm
from llmpq.precision import padded_k

if TYPE_CHECKING:
    from llmpq.kernels.weights.atom_weight import AtomWeight

Making = Literal["none", "rms", "silu", "relu"]
"""What the pass that rounds a row makes of it first."""
MAX_CHANNELS = 32768
"""Channels of a row that a program gates as it rounds it."""
ALIGNED = 16
"""Channels of which a row has a multiple, for a sum in the order of fused/rms_norm.py: of others
Triton deals channels to threads otherwise here and there."""


@dataclass(frozen=True, kw_only=True)
class RoundedInput:
    """Codes int8 [M, Kp + Op] (Op = 128 with outliers, else 0), scales float32 [M, G + 1]."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How K of a scheme falls into groups."""

    normal: int
    padded: int
    groups: int
    group: int

    @classmethod
    def of(cls, scheme: AtomScheme, in_features: int) -> Shape:
        """Return the shape, or say why no kernel fits."""
        if scheme.number != "int" or scheme.outlier_bits != 8 or scheme.outliers > GROUP:
            raise ValueError(
                f"no Atom kernel for {scheme}; expected integers and at most {GROUP} outliers in "
                "8 bits. Use atom_linear_reference"
            )
        normal = scheme.normal_features(in_features)
        padded = padded_k(normal)
        if scheme.group_size not in (None, 64, 128):
            raise ValueError(
                f"no Atom kernel for groups of {scheme.group_size}; expected 64, 128 or per channel"
            )
        group = scheme.group_size or padded
        return cls(normal=normal, padded=padded, groups=padded // group, group=group)


def norm_input(
    x_MK: Tensor,
    weight: AtomWeight,
    *,
    norm: Literal["none", "rms", "layer"] = "none",
    weight_K: Tensor | None = None,
    bias_K: Tensor | None = None,
    eps: float = 0.0,
) -> RoundedInput:
    """Norm tokens, put their channels in the weight's order and round them."""
    if norm == "none":
        return any_input(x_MK, weight)
    assert weight_K is not None
    k = x_MK.shape[1]
    if norm == "layer":
        bias = torch.zeros_like(weight_K) if bias_K is None else bias_K
        return any_input(layer_norm(x_MK, weight_K, bias, eps), weight)
    if k % ALIGNED or k > MAX_COLUMNS or _is_remade(weight):
        return any_input(rms_norm(x_MK, weight_K, eps), weight)
    rounded = _rounded(x_MK, weight.scheme, "rms", weight.index_K, weight_K=weight_K, eps=eps)
    return _in_units(rounded, weight.scheme)


def activation_input(
    x: Tensor, weight: AtomWeight, activation: Literal["silu", "relu", "gelu", "none"]
) -> RoundedInput:
    """Apply an MLP's activation, rotate if asked and round; x is [M, 2F] for "silu"."""
    if activation == "none":
        return any_input(x, weight)
    if activation == "gelu":
        return any_input(functional.gelu(x, approximate="tanh"), weight)
    if _is_remade(weight) or weight.in_features > MAX_CHANNELS:
        return any_input(gate_mul(x) if activation == "silu" else functional.relu(x), weight)
    return _in_units(_rounded(x, weight.scheme, activation, weight.index_K), weight.scheme)


def _is_remade(weight: AtomWeight) -> bool:
    """Whether inputs are rotated, or gathered for a device that has some of them, before."""
    return weight.scheme.rotation or weight.places > weight.in_features


def any_input(x_MK: Tensor, weight: AtomWeight) -> RoundedInput:
    """Round inputs that come from no fused operation."""
    scheme = weight.scheme
    if _is_remade(weight):
        x_MK, weight = weight.in_order(x_MK)
    if scheme.rotation:
        x_MK = rotated_channels(x_MK, scheme)
    rounded = round_input(x_MK, replace(scheme, rotation=False), index_K=weight.index_K)
    return _in_units(rounded, scheme)


def round_input(x_MK: Tensor, scheme: AtomScheme, *, index_K: Tensor | None = None) -> RoundedInput:
    """Put a token's channels in order and round them, in one pass."""
    if scheme.rotation:
        raise ValueError("round_input does not rotate; only the input of `down` is rotated")
    return _rounded(x_MK, scheme, "none", index_K)


def rotated_channels(x_MK: Tensor, scheme: AtomScheme) -> Tensor:
    """Return ordered channels, the normal ones padded and rotated, the outliers behind them."""
    outliers_MO = x_MK[:, scheme.normal_features(x_MK.shape[1]) :]
    return torch.cat((normal_channels(x_MK, scheme).to(x_MK.dtype), outliers_MO), dim=1)


def _rounded(
    x: Tensor,
    scheme: AtomScheme,
    making: Making,
    index_K: Tensor | None,
    *,
    weight_K: Tensor | None = None,
    eps: float = 0.0,
) -> RoundedInput:
    """Make rows of x and round them; x is [M, 2 K] for "silu"."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    m, k = x.shape[0], x.shape[1] // 2 if making == "silu" else x.shape[1]
    shape = Shape.of(scheme, k)
    width = shape.padded + (GROUP if scheme.outliers else 0)
    codes = torch.empty(m, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(m, shape.groups + 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    round_input_kernel[(m,)](
        x,
        x if weight_K is None else weight_K,
        x if index_K is None else index_K,
        codes,
        scales,
        k,
        shape.normal,
        scheme.outliers,
        x.stride(0),
        eps,
        GROUPS=shape.groups,
        BLOCK_G=triton.next_power_of_2(shape.groups),
        GROUP=shape.group,
        BLOCK_GROUP=triton.next_power_of_2(shape.group),
        BLOCK=block,
        BITS=scheme.activation_bits,
        SIGNED=scheme.signed_scale,
        CLIP=scheme.activation_clip,
        MAKING=making,
        HAS_INDEX=index_K is not None,
        COMPRESSED=scheme.activation_rule == "compressed",
        num_warps=_warps(making, block),
    )
    return RoundedInput(codes=codes, scales=scales)


def _warps(making: Making, block: int) -> int:
    """Return how many warps share a row; a norm's sum is that of fused/rms_norm.py.

    H200, 4096 rows of 14336: SiLU and rounding 120 us by 8 warps, 148 by 16; rounding 65, 64.
    """
    return max(1, min(16 if making == "rms" else 8, block // 512))


def _in_units(rounded: RoundedInput, scheme: AtomScheme) -> RoundedInput:
    """Return scales as integers times a token's unit, where a product of so many takes them."""
    if not scheme.takes_integers(rounded.codes.shape[0]):
        return rounded
    steps, unit = integer_scales(rounded.scales[:, :-1])
    return replace(rounded, scales=torch.cat((steps * unit, rounded.scales[:, -1:]), dim=1))
