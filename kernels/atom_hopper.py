"""W4A4 on Hopper: `plan` decides, `norm_input` and `activation_input` round, `product` multiplies.

    M tokens     inputs                            product
    to FEW       16-bit values that rounding       the weight-only kernels (gemm.py), which are
                 leaves, in the fragment order     limited by the same bytes
    more         codes as e4m3, int8 outliers      atom_wgmma.py

Activations of 16 bits (the target of a W4A4 draft) take the first way at any M, unrounded.
Launches only: bodies in atom_round.py and atom_wgmma.py, their twin is atom_reference.py.

M tokens, K = in_features, N = out_features, G groups.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from llmpq.kernels.atom_norm import norm_codes_kernel
from llmpq.kernels.atom_quantize import hadamard
from llmpq.kernels.atom_round import act_round_kernel, norm_round_kernel
from llmpq.kernels.atom_scheme import AtomScheme
from llmpq.kernels.atom_tiles import AtomTiles, from_words
from llmpq.kernels.atom_wgmma import wgmma_kernel
from llmpq.kernels.formats import GROUP
from llmpq.kernels.gemm import linear_gpu
from llmpq.kernels.overlap import overlaps

Activation = Literal["silu", "relu", "gelu", "none"]
NormKind = Literal["none", "rms", "layer"]

FEW = 64
"""Tokens up to which the weight-only kernels multiply."""

TOKENS_A_RUN = 128
"""Scales of so many tokens lie together; the last run is padded."""

ROWS = 128
"""Rows of w of a tile of the product for many tokens."""

TERMS = 16
"""Rows of a box of scales: the least K of a bfloat16 product; three are a group's."""

_TILE_COST = {128: 1.0, 64: 0.62}
"""What a tile of so many tokens takes, beside one of 128 (H200)."""

_NO_GLUON = bool(triton.knobs.runtime.interpret)

_NORMS: dict[str, int] = {"none": 0, "rms": 1, "layer": 2}


@dataclass(frozen=True, kw_only=True)
class RoundedTokens:
    """What a product eats: restored values [M, (G + 3) * 128], or codes with their scales."""

    values: Tensor
    scales: Tensor | None = None
    """bfloat16 [3 G, M padded to 128]: three terms of each; None: `values` are restored."""
    outlier_scale: Tensor | None = None
    """float32 [M padded to 128]."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a product runs; `bm` None is the weight-only kernels."""

    bm: int | None
    stages: int = 6
    group_m: int = 8


def plan(
    rows: int, out_features: int, *, activation_bits: int = 4, multiprocessors: int = 132
) -> Plan:
    """Decide from shapes alone: the tiles whose waves of programs take least."""
    if is_few(rows, activation_bits):
        return Plan(bm=None)

    def took(bm: int) -> float:
        tiles = -(-rows // bm) * -(-out_features // ROWS)
        return -(-tiles // multiprocessors) * _TILE_COST[bm]

    return Plan(bm=min(_TILE_COST, key=took))


def is_few(rows: int, activation_bits: int) -> bool:
    """Whether the weight-only kernels multiply."""
    return rows <= FEW or activation_bits == 16


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
        return out
    rows = 1 if m <= 1024 else 4
    pdl = overlaps(x_MK.device)
    norm_round_kernel[(triton.cdiv(m, rows),)](
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
        BLOCK_G=triton.next_power_of_2(groups + (1 if scheme.outliers else 0)),
        BLOCK_K=triton.next_power_of_2(k),
        ROWS=rows,
        BITS=scheme.activation_bits,
        SIGNED=scheme.signed_scale,
        CLIP=scheme.activation_clip,
        NORM=kind,
        HAS_BIAS=bias_K is not None,
        HAS_INDEX=weight.index_K is not None,
        FORM=1 if out.scales is None else 0,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return out


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
    """As `norm_input`, for codes: the Gluon kernel, one wave of programs of up to 8 tokens each."""
    (m, k), scheme = x_MK.shape, weight.scheme
    assert out.scales is not None
    wave = 3 * _multiprocessors(x_MK.device)
    rows = min(8, triton.next_power_of_2(triton.cdiv(m, wave)))
    norm_codes_kernel[(triton.cdiv(m, rows),)](
        x_MK,
        x_MK if weight_K is None else weight_K,
        x_MK if bias_K is None else bias_K,
        x_MK if weight.index_K is None else weight.index_K,
        out.values,
        out.scales,
        out.outlier_scale,
        m,
        k,
        scheme.normal_features(k),
        x_MK.stride(0),
        out.scales.shape[1],
        eps,
        G=weight.groups,
        OUTLIERS=scheme.outliers,
        BLOCK=block,
        ROWS=rows,
        BITS=scheme.activation_bits,
        SIGNED=scheme.signed_scale,
        CLIP=scheme.activation_clip,
        NORM=norm,
        HAS_BIAS=bias_K is not None,
        HAS_INDEX=weight.index_K is not None,
        num_warps=block // 512,
    )


def activation_input(x: Tensor, weight: AtomTiles, activation: Activation) -> RoundedTokens:
    """Apply an MLP's activation, rotate if asked and round; x is [M, 2F] for "silu"."""
    if weight.index_K is not None:
        raise ValueError("the channel order of `down` is folded into the rows before it; got one")
    m, width = x.shape
    scheme, groups = weight.scheme, weight.groups
    out = _empty(x, weight)
    block_m, steps = (16, 1) if m <= 256 else (32, 8)
    pdl = overlaps(x.device)
    blocks = groups + (1 if scheme.outliers else 0)
    act_round_kernel[(triton.cdiv(m, block_m), triton.cdiv(blocks, steps))](
        x,
        hadamard_signs(x.device, x.dtype),
        out.values,
        out.values if out.scales is None else out.scales,
        out.values if out.outlier_scale is None else out.outlier_scale,
        m,
        width // 2 if activation == "silu" else width,
        scheme.normal_features(weight.in_features),
        x.stride(0),
        0 if out.scales is None else out.scales.shape[1],
        G=groups,
        OUTLIERS=scheme.outliers,
        BLOCK_M=block_m,
        STEPS=steps,
        BITS=scheme.activation_bits,
        SIGNED=scheme.signed_scale,
        CLIP=scheme.activation_clip,
        ACT=activation,
        ROTATE=scheme.rotation,
        FORM=1 if out.scales is None else 0,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def product(
    tokens: RoundedTokens,
    weight: AtomTiles,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual_MN: Tensor | None = None,
    into_residual: bool = False,
    chosen: Plan | None = None,
) -> Tensor:
    """Return y [M, N] = x w^T (+ bias) (+ residual); `into_residual`: in the residual's place."""
    if tokens.scales is None:
        return linear_gpu(
            tokens.values, weight.words, bias, residual_MN, into_residual=into_residual
        )
    m, n = tokens.values.shape[0], weight.out_features
    here = tokens.values.device
    chosen = chosen or plan(m, n, multiprocessors=_multiprocessors(here))
    assert chosen.bm is not None
    y = residual_MN if into_residual else None
    if y is None:
        y = torch.empty(m, n, dtype=dtype, device=here)
    box = ([chosen.bm, 64], _layout(2, 64))
    planes, _, _ = weight.words.block_words()
    tiles = triton.cdiv(m, chosen.bm) * triton.cdiv(n, ROWS)
    wgmma_kernel[(min(tiles, _multiprocessors(here)),)](
        TensorDescriptor.from_tensor(tokens.values.view(torch.float8_e4m3fn), *box),
        TensorDescriptor.from_tensor(tokens.values, *box),
        TensorDescriptor.from_tensor(
            planes[0].view(torch.uint8).view(n // 16, -1, 128), [8, 8, 128], _layout(3, 128)
        ),
        TensorDescriptor.from_tensor(
            tokens.scales, [TERMS, chosen.bm], _layout(2, 128, element_bitwidth=16)
        ),
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
        BM=chosen.bm,
        STAGES=chosen.stages,
        GROUP_M=chosen.group_m,
        num_warps=4,
    )
    return y


def tiles_linear(
    x_MK: Tensor, weight: AtomTiles, bias: Tensor | None = None, residual_MN: Tensor | None = None
) -> Tensor:
    """Return y [M, N] of inputs that nothing has rounded; one opaque operator to torch.compile."""
    if torch.compiler.is_compiling():
        scheme = weight.scheme
        return rounded_linear(
            x_MK,
            weight.codes,
            weight.scale,
            weight.index_K,
            bias,
            residual_MN,
            weight.out_features,
            scheme.outliers,
            scheme.activation_bits,
            scheme.activation_clip,
            scheme.signed_scale,
            scheme.rotation,
        )
    tokens = any_input(x_MK.contiguous(), weight)
    return product(tokens, weight, dtype=x_MK.dtype, bias=bias, residual_MN=residual_MN)


@torch.library.custom_op("llmpq::rounded_linear", mutates_args=())
def rounded_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    index: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out_features: int,
    outliers: int,
    activation_bits: int,
    activation_clip: float,
    signed_scale: bool,
    rotation: bool,
) -> Tensor:
    """The rounding of inputs and the product with words of the Hopper form."""
    scheme = AtomScheme(
        outliers=outliers,
        activation_bits=activation_bits,
        activation_clip=activation_clip,
        signed_scale=signed_scale,
        rotation=rotation,
    )
    weight = from_words(codes, scale, scheme, out_features, x.shape[1], index)
    tokens = any_input(x.contiguous(), weight)
    return product(tokens, weight, dtype=x.dtype, bias=bias, residual_MN=residual)


@rounded_linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    index: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out_features: int,
    outliers: int,
    activation_bits: int,
    activation_clip: float,
    signed_scale: bool,
    rotation: bool,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def any_input(x_MK: Tensor, weight: AtomTiles) -> RoundedTokens:
    """Round inputs that come from no fused operation."""
    if weight.scheme.rotation:
        return activation_input(x_MK, weight, "none")
    return norm_input(x_MK, weight)


@functools.cache
def hadamard_signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the signs of the Hadamard matrix [128, 128]."""
    return hadamard(device).sign().to(dtype)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _layout(rank: int, swizzle: int, *, element_bitwidth: int = 8) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=element_bitwidth, rank=rank
    )


def _empty(x_MK: Tensor, weight: AtomTiles) -> RoundedTokens:
    """Return room for rounded inputs, in the form that their number asks for."""
    m, scheme = x_MK.shape[0], weight.scheme
    if is_few(m, scheme.activation_bits):
        return RoundedTokens(values=x_MK.new_empty(m, weight.words.in_features))
    columns = (weight.groups + (1 if scheme.outliers else 0)) * GROUP
    padded = -(-m // TOKENS_A_RUN) * TOKENS_A_RUN

    def room(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_MK.device)

    return RoundedTokens(
        values=room(m, columns, dtype=torch.int8),
        scales=room(3 * weight.groups, padded, dtype=torch.bfloat16),
        outlier_scale=room(padded, dtype=torch.float32),
    )
