"""Norms of layers on a GPU, each with what stands beside it, one launch (kernels/fused).

of the stream       one kernel a row                                   rms_norm.py
LayerNorm           also adds biases of dense o and down               layer_norm.py
behind attention    with the sum, and with the norm that follows       norm_behind.py
of heads            queries and keys in place                          head_norm.py
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from llmpq.kernels.fused import layer_norm as fused_layer_norm
from llmpq.kernels.fused import rms_norm as fused_norm
from llmpq.kernels.fused.head_norm import head_norm
from llmpq.kernels.fused.norm_behind import norm_behind
from llmpq.runtime.models.layers import Attention, DecoderLayer
from llmpq.runtime.models.norms import NoNorm, Norm


def norm(
    part: Norm, x: Tensor, *, before: Tensor | None = None, after: Tensor | None = None
) -> Tensor:
    """Return x + before normalised; x becomes x + before + after (`_bias_for`'s)."""
    if isinstance(part, NoNorm) or x.shape[-1] > fused_norm.MAX_COLUMNS:
        normed: Tensor = part(x)
        return normed
    if not part.centred:
        return fused_norm.rms_norm(x, part.weight, part.eps)
    bias = _no_bias(x.shape[-1], x.dtype, x.device) if part.bias is None else part.bias
    return fused_layer_norm.layer_norm(x, part.weight, bias, part.eps, before=before, after=after)


@lru_cache(maxsize=64)
def _no_bias(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros for LayerNorms without a bias, once for all of a device."""
    return torch.zeros(size, dtype=dtype, device=device)


def added_behind(
    layer: DecoderLayer, a: Tensor, x_BQh: Tensor, behind: Norm | None, following: Norm | None
) -> tuple[Tensor, Tensor]:
    """Return y = x + factor * behind(a) in a's place, and y by the norm that follows."""
    known = behind is not None and is_rms(behind) and layer.residual_factor == 1.0
    if behind is None or not known or not a.is_contiguous():
        y = layer.added(a, behind).add_(x_BQh)
        return y, y if following is None else norm(following, y)
    own = (a, x_BQh, behind.weight, behind.eps)
    if following is not None and is_rms(following):
        return norm_behind(*own, (following.weight, following.eps))
    y, _ = norm_behind(*own)
    return y, y if following is None else norm(following, y)


def is_rms(part: Norm) -> bool:
    """Whether a norm is an RMSNorm of rows that a program's registers hold."""
    return is_whole(part) and not part.centred


def is_whole(part: Norm) -> bool:
    """Whether a norm is one of rows that a program's registers hold."""
    return 0 < part.weight.numel() <= fused_norm.MAX_COLUMNS and not isinstance(part, NoNorm)


def norm_heads(part: Attention, qkv_BQND: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys normed, in place of what they were where each head is."""
    q_norm, k_norm = part.q_norm, part.k_norm
    assert q_norm is not None and k_norm is not None
    if _of_heads(q_norm, k_norm, part.head_dim):
        every = qkv_BQND.view(-1, *qkv_BQND.shape[2:])
        head_norm(every, q_norm.weight, k_norm.weight, part.heads, q_norm.eps)
    q, k, _ = qkv_BQND.split([part.heads, part.kv_heads, part.kv_heads], dim=2)
    return (q, k) if _of_heads(q_norm, k_norm, part.head_dim) else part.normed(q, k)


def _of_heads(q_norm: Norm, k_norm: Norm, head_dim: int) -> bool:
    """Whether both are RMSNorms of a head, and alike: one launch does them in place."""
    plain = not q_norm.centred and not k_norm.centred and q_norm.eps == k_norm.eps
    return plain and q_norm.shape == k_norm.shape == (head_dim,)
