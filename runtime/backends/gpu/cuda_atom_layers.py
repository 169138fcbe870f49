"""Decoder layers of W4A4 and W8A8: every rounding rides on the operation before it.

    norm + channel order + rounding      feeds qkv, gate_up (or up)      one pass
    attention                            is the caller's
    channel order + rounding             feeds o                         one pass
    activation (+ rotation) + rounding   feeds down                      one pass
    o, down                              add the residual stream themselves

Each weight's `kernels` make the form of inputs that they multiply: kernels/atom/hopper.py, or
portable.py where a weight is not in Hopper's form. o's inputs have a pass of their own, since a
token's scale, or a group of sorted channels, is of all heads, and attention's programs have one.

Legend: B rows, Q new tokens, M = B Q, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from llmpq.kernels.weights.atom_weight import AtomWeight
from llmpq.runtime.backends.gpu.cuda_norms import is_whole
from llmpq.runtime.models.layers import Attention, DecoderLayer
from llmpq.runtime.models.linear import Linear, RowParallelLinear
from llmpq.runtime.models.mlps import MLP, GatedMLP
from llmpq.runtime.models.norms import Norm

Attend = Callable[[Tensor], Tensor]
"""qkv [B, Q, heads * D] to the attention's output [B, Q, H * D], before the output product."""


UNGATED = ("relu", "gelu")
"""Activations without a gate that kernels apply as they round; with one it is "silu"."""


def rounds_inputs(layer: DecoderLayer) -> bool:
    """Whether a layer is of this file's parts, its linears all take rounded inputs, and none is
    observed; any other layer's linears round their inputs themselves."""
    linears = all(
        isinstance(part, Linear)
        and part.weight.takes_rounded_tokens
        and not part._forward_pre_hooks
        for part in _linears(layer)
    )
    return linears and _is_plain(layer)


def _is_plain(layer: DecoderLayer) -> bool:
    """Whether norms, the MLP's activation and the order of parts are those of `decoder_layer`."""
    mlp, norms = layer.mlp, (layer.attn_norm, layer.mlp_norm)
    assert isinstance(mlp, (MLP, GatedMLP))  # `_linears` found its parts
    known = all(part.centred == (part.bias is not None) and is_whole(part) for part in norms)
    if mlp.gate is None:
        activated = mlp.activation in UNGATED and mlp.xielu is None
    else:
        activated = mlp.gate.is_plain and mlp.gate.activation == "silu"
    return known and activated and layer.adds_plainly and not layer.parallel_norms


def decoder_layer(
    layer: DecoderLayer,
    x_BQh: Tensor,
    attend: Attend,
    *,
    last: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the layer's new residual stream; `layers.DecoderLayer.forward` is its twin.

    `last`: of [B, Q, h], the tokens [B, 1, h] to go on with after attention.
    """
    part = layer.attention
    assert isinstance(part, Attention)  # cuda_layers.known_attention
    x_MK = x_BQh.reshape(-1, x_BQh.shape[-1])
    qkv = _normed(layer.attn_norm, x_MK, part.qkv)
    attended = attend(qkv.view(*x_BQh.shape[:-1], -1))
    del qkv
    if last is not None:
        attended, x_BQh = last(attended), last(x_BQh)
        x_MK = x_BQh.reshape(-1, x_BQh.shape[-1])
    y = _ordered(attended.reshape(x_MK.shape[0], -1), part.o, x_MK)
    del attended
    mlp = layer.mlp
    assert isinstance(mlp, (MLP, GatedMLP))
    wide = _normed(layer.mlp_norm, y, mlp.wide)
    activation = mlp.activation if mlp.gate is None else "silu"
    return _activated(wide, activation, mlp.down, y).view(x_BQh.shape)


def _normed(norm: Norm, x_MK: Tensor, part: Linear) -> Tensor:
    """Return part(norm(x))."""
    weight = _weight(part)
    tokens = weight.kernels.norm_input(
        x_MK,
        weight,
        norm="rms" if norm.bias is None else "layer",
        weight_K=norm.weight,
        bias_K=norm.bias,
        eps=norm.eps,
    )
    y_MN: Tensor = weight.kernels.product(tokens, weight, dtype=x_MK.dtype, bias=part.bias)
    return y_MN


def _ordered(x_MK: Tensor, part: Linear, residual_MN: Tensor) -> Tensor:
    """Return part(x) + residual."""
    weight = _weight(part)
    tokens = weight.kernels.any_input(x_MK, weight)
    return _added(tokens, part, residual_MN, into_residual=False)


def _activated(wide: Tensor, activation: str, part: Linear, residual_MN: Tensor) -> Tensor:
    """Return part(activation(wide)) + residual, in the residual's place."""
    weight = _weight(part)
    tokens = weight.kernels.activation_input(wide, weight, activation)
    return _added(tokens, part, residual_MN, into_residual=True)


def _added(tokens: Any, part: Linear, residual_MN: Tensor, *, into_residual: bool) -> Tensor:
    """Return the product with rounded tokens plus the residual, maybe in its place."""
    weight, dtype = _weight(part), residual_MN.dtype
    if isinstance(part, RowParallelLinear):
        own_MN: Tensor = weight.kernels.product(tokens, weight, dtype=dtype, bias=part.bias)
        return part.reduce(own_MN, residual_MN)
    y_MN: Tensor = weight.kernels.product(
        tokens,
        weight,
        dtype=dtype,
        bias=part.bias,
        residual_MN=residual_MN,
        into_residual=into_residual,
    )
    return y_MN


def _linears(layer: DecoderLayer) -> tuple[object, ...]:
    mlp = layer.mlp
    part = layer.attention
    qkv = part.qkv if isinstance(part, Attention) else None
    return qkv, getattr(part, "o", None), getattr(mlp, "wide", None), getattr(mlp, "down", None)


def _weight(part: Linear) -> AtomWeight:
    weight: Any = part.weight  # `rounds_inputs` asked
    rounded: AtomWeight = weight
    return rounded
