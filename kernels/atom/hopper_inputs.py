"""W4A4's inputs on Hopper: rounded in the pass that makes them, in the form the product asks for.

    norm_input          RMSNorm, LayerNorm or nothing, channel order, rounding
    activation_input    SiLU-mul, ReLU, GELU or nothing, rotation if asked, rounding
    any_input           inputs that come from no fused operation

Launches only: bodies in round_kernels.py, round_norm.py and round_activation.py; their twin is
reference.py.

M tokens, K = in_features, G groups.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import triton
from torch import Tensor

from llmpq.kernels.atom.round_activation import act_codes_kernel
from llmpq.kernels.atom.round_kernels import act_round_kernel, norm_round_kernel, steps_kernel
from llmpq.kernels.atom.round_norm import norm_codes_kernel
from llmpq.kernels.formats.atom_rounding import STEPS, hadamard
from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.kernel_table import ATOM_FEW, Kernel, KernelForm, eligible, gpu
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.overlap import overlaps

if TYPE_CHECKING:
    from llmpq.kernels.weights.atom_weight import AtomTiles

Activation = Literal["silu", "relu", "gelu", "none"]
NormKind = Literal["none", "rms", "layer"]

GROUPS_A_PROGRAM = 4
"""Groups of a token that a program norms and rounds where there are few tokens."""

NORM_PROGRAMS = 2
"""Programs a multiprocessor that norm many tokens (H200, M = 4096: 26.9 us; 3: 36.8, 4: 30.2)."""

ACT_GROUPS = 4
"""Groups that a program of activations takes one after the other, one where tokens are few (H200,
M = 100: 5.6 us; 4: 14.3; M = 4096: 127.9; 4: 121.5)."""

TOKENS_A_RUN = 128
"""Scales of so many tokens lie together; the last run is padded."""

HOPPER = (9, 0)
_NO_GLUON = bool(triton.knobs.runtime.interpret)

_NORMS: dict[str, int] = {"none": 0, "rms": 1, "layer": 2}


@dataclass(frozen=True, kw_only=True)
class RoundedTokens:
    """What a product eats: restored values [M, (G + 3) * 128], or codes with their scales."""

    values: Tensor
    scales: Tensor | None = None
    """float32 [G + 1, M padded to 128], the outliers' last; None: `values` are restored."""
    outlier_scale: Tensor | None = None
    """float32 [M padded to 128]: the last of `scales`."""
    unit: Tensor | None = None
    """float32 [M padded to 128]: `values` are codes times integers of these, in int8."""


def is_few(rows: int, activation_bits: int) -> bool:
    """Whether the weight-only kernels multiply."""
    form = KernelForm.ATOM_TILES_A16 if activation_bits == 16 else KernelForm.ATOM_TILES
    return Kernel.AS_WORDS in eligible(form, gpu(HOPPER), rows)


def norm_input(
    x_MK: Tensor,
    weight: AtomTiles,
    *,
    norm: NormKind = "none",
    weight_K: Tensor | None = None,
    bias_K: Tensor | None = None,
    eps: float = 0.0,
) -> RoundedTokens:
    """Norm tokens, put their channels in the weight's order and round them, in one pass."""
    if weight.scheme.rotation:
        raise ValueError("norm_input does not rotate; only the input of `down` is rotated")
    m, k = x_MK.shape
    scheme, groups = weight.scheme, weight.groups
    out = _empty(x_MK, weight)
    kind = _NORMS[norm]
    block = triton.next_power_of_2(k)
    if (
        not _NO_GLUON
        and out.scales is not None
        and 512 <= block <= 8192
        and out.values.shape[1] <= block
    ):
        _norm_many(x_MK, weight, out, kind, weight_K, bias_K, eps, block)
        return in_units(out, weight)
    slots = groups + (1 if scheme.outliers else 0)
    whole = m > ATOM_FEW
    together = triton.next_power_of_2(slots) if whole else GROUPS_A_PROGRAM
    pdl = overlaps(x_MK.device)
    norm_round_kernel[(m, triton.cdiv(slots, together))](
        x_MK,
        x_MK if weight_K is None else weight_K,
        x_MK if bias_K is None else bias_K,
        x_MK if weight.index_K is None else weight.index_K,
        out.values,
        out.values if out.scales is None else out.scales,
        out.values if out.outlier_scale is None else out.outlier_scale,
        m,
        k,
        scheme.normal_features(k),
        x_MK.stride(0),
        0 if out.scales is None else out.scales.shape[1],
        eps,
        G=groups,
        OUTLIERS=scheme.outliers,
        BLOCK_G=together,
        BLOCK_K=block,
        WHOLE=whole,
        BITS=scheme.activation_bits,
        SIGNED=scheme.signed_scale,
        CLIP=scheme.activation_clip,
        NORM=kind,
        HAS_BIAS=bias_K is not None,
        HAS_INDEX=weight.index_K is not None,
        FORM=1 if out.scales is None else 0,
        PDL=pdl,
        num_warps=8 if whole else 4,
        launch_pdl=pdl,
    )
    return in_units(out, weight)


def _norm_many(
    x_MK: Tensor,
    weight: AtomTiles,
    out: RoundedTokens,
    norm: int,
    weight_K: Tensor | None,
    bias_K: Tensor | None,
    eps: float,
    block: int,
) -> None:
    """As `norm_input`, for codes: the Gluon kernel, one wave of programs."""
    (m, k), scheme = x_MK.shape, weight.scheme
    assert out.scales is not None
    normal, pdl = scheme.normal_features(k), overlaps(x_MK.device)
    norm_codes_kernel[(min(m, NORM_PROGRAMS * multiprocessors(x_MK.device)),)](
        x_MK,
        x_MK if weight_K is None else weight_K,
        x_MK if bias_K is None else bias_K,
        x_MK if weight.index_K is None else weight.index_K,
        out.values,
        out.scales,
        out.outlier_scale,
        m,
        k,
        normal,
        x_MK.stride(0),
        out.scales.shape[1],
        eps,
        G=weight.groups,
        OUTLIERS=scheme.outliers,
        BLOCK=block,
        FULL=k == block and normal == weight.groups * GROUP and scheme.outliers in (0, GROUP),
        SIGNED=scheme.signed_scale,
        CLIP=scheme.activation_clip,
        NORM=norm,
        HAS_BIAS=bias_K is not None,
        HAS_INDEX=weight.index_K is not None,
        PDL=pdl,
        num_warps=block // 512,
        launch_pdl=pdl,
    )


def activation_input(x: Tensor, weight: AtomTiles, activation: Activation) -> RoundedTokens:
    """Apply an MLP's activation, rotate if asked and round; x is [M, 2F] for "silu"."""
    if weight.index_K is not None:
        raise ValueError("the channel order of `down` is folded into the rows before it; got one")
    m, width = x.shape
    scheme, groups = weight.scheme, weight.groups
    out = _empty(x, weight)
    normal = scheme.normal_features(weight.in_features)
    if not _NO_GLUON and out.scales is not None and normal % 8 == 0:
        _act_many(x, weight, out, activation)
        return in_units(out, weight)
    block_m = 1 if m <= ATOM_FEW else 4
    pdl = overlaps(x.device)
    act_round_kernel[(triton.cdiv(m, block_m), groups + (1 if scheme.outliers else 0))](
        x,
        out.values,
        out.values if out.scales is None else out.scales,
        out.values if out.outlier_scale is None else out.outlier_scale,
        m,
        width // 2 if activation == "silu" else width,
        normal,
        x.stride(0),
        0 if out.scales is None else out.scales.shape[1],
        G=groups,
        OUTLIERS=scheme.outliers,
        BLOCK_M=block_m,
        BITS=scheme.activation_bits,
        SIGNED=scheme.signed_scale,
        CLIP=scheme.activation_clip,
        ACT=activation,
        ROTATE=scheme.rotation,
        FORM=1 if out.scales is None else 0,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return in_units(out, weight)


def _act_many(x: Tensor, weight: AtomTiles, out: RoundedTokens, activation: Activation) -> None:
    """As `activation_input`, for codes: the Gluon kernel."""
    (m, width), scheme, groups = x.shape, weight.scheme, weight.groups
    assert out.scales is not None
    steps, pdl = 1 if m <= 512 else ACT_GROUPS, overlaps(x.device)
    act_codes_kernel[
        (triton.cdiv(m, 64), triton.cdiv(groups, steps) + (1 if scheme.outliers else 0))
    ](
        x,
        matrices(x.device, x.dtype, scheme.rotation),
        out.values,
        out.scales,
        out.outlier_scale,
        m,
        width // 2 if activation == "silu" else width,
        scheme.normal_features(weight.in_features) // 8,
        x.stride(0),
        out.scales.shape[1],
        G=groups,
        OUTLIERS=scheme.outliers,
        STEPS=steps,
        SIGNED=scheme.signed_scale,
        CLIP=scheme.activation_clip,
        ACT=activation,
        ROTATE=scheme.rotation,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def any_input(x_MK: Tensor, weight: AtomTiles) -> RoundedTokens:
    """Round inputs that come from no fused operation."""
    if weight.places > weight.in_features:
        x_MK, weight = weight.in_order(x_MK)
    if weight.scheme.rotation:
        return activation_input(x_MK, weight, "none")
    return norm_input(x_MK, weight)


def in_units(tokens: RoundedTokens, weight: AtomTiles) -> RoundedTokens:
    """Return codes times integers, in their place, where a product of so many takes them.

    A pass of its own: not yet part of the roundings.
    """
    m, columns = tokens.values.shape
    if not weight.scheme.takes_integers(m):
        return tokens
    assert tokens.scales is not None and tokens.outlier_scale is not None
    unit, pdl = torch.empty_like(tokens.outlier_scale), overlaps(tokens.values.device)
    steps_kernel[(triton.cdiv(m, 16), triton.cdiv(weight.groups, 8))](
        tokens.values,
        tokens.scales,
        unit,
        m,
        tokens.scales.shape[1],
        G=weight.groups,
        OUTLIERS=columns > weight.groups * GROUP,
        ALL=triton.next_power_of_2(weight.groups),
        BLOCK_M=16,
        BLOCK_G=8,
        STEPS=STEPS,
        PDL=pdl,
        INTERPRET=_NO_GLUON,
        num_warps=8,
        launch_pdl=pdl,
    )
    return RoundedTokens(values=tokens.values, outlier_scale=tokens.outlier_scale, unit=unit)


@functools.cache
def matrices(device: torch.device, dtype: torch.dtype, rotation: bool) -> Tensor:
    """Return what round_activation.py multiplies by: Hadamard signs, and the identity."""
    n = torch.arange(GROUP, device=device)
    channel = 32 * (n // 2 % 4) + 2 * (n // 8) + n % 2
    identity = torch.eye(GROUP, device=device)
    both = torch.stack((hadamard(device).sign() if rotation else identity, identity))
    return both[:, :, channel].to(dtype).contiguous()


def _empty(x_MK: Tensor, weight: AtomTiles) -> RoundedTokens:
    """Return room for rounded inputs, in the form that their number asks for."""
    m, scheme = x_MK.shape[0], weight.scheme
    if is_few(m, scheme.activation_bits):
        return RoundedTokens(values=x_MK.new_empty(m, weight.words.in_features))
    columns = (weight.groups + (1 if scheme.outliers else 0)) * GROUP
    padded = -(-m // TOKENS_A_RUN) * TOKENS_A_RUN

    scales = torch.empty(weight.groups + 1, padded, dtype=torch.float32, device=x_MK.device)
    return RoundedTokens(
        values=torch.empty(m, columns, dtype=torch.int8, device=x_MK.device),
        scales=scales,
        outlier_scale=scales[weight.groups],
    )
