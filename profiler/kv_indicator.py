"""Omega of a low-bit KV cache: the variance that rounding keys and values adds to them.

Same unit as the weights' omega (extra variance of operator outputs, per token): a cached key or
value is an output of the qkv operator, and rounding it with step S adds S^2 / 4 (deterministic) or
S^2 / 6 (stochastic). Keys have a step per channel and block of tokens, values one per token.

T tokens, G key/value heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kv_format import BLOCK_TOKENS
from llmpq.precision import KVPrecision
from llmpq.profiler.indicator import Rounding, share

KEY_BLOCK = BLOCK_TOKENS
"""Tokens that share a key channel's step."""


def kv_omega(k_TGD: Tensor, v_TGD: Tensor, kv: KVPrecision, rounding: Rounding) -> float:
    """Return the extra variance of one token's keys and values, all heads summed."""
    if kv is KVPrecision.KV16:
        return 0.0
    return share(rounding) * (key_step_square(k_TGD, kv.bits) + value_step_square(v_TGD, kv.bits))


def key_step_square(k_TGD: Tensor, bits: int) -> float:
    """Return the sum over heads and channels of the squared step, averaged over tokens."""
    total = 0.0
    for block in k_TGD.split(KEY_BLOCK):
        low, high = block.aminmax(dim=0)
        step_GD = (high - low).double() / (2**bits - 1)
        total += float(step_GD.square().sum()) * block.shape[0]
    return total / k_TGD.shape[0]


def value_step_square(v_TGD: Tensor, bits: int) -> float:
    """Return the sum over heads and channels of the squared step, averaged over tokens."""
    low, high = torch.aminmax(v_TGD, dim=2)
    step_TG = (high - low).double() / (2**bits - 1)
    return float(step_TG.square().sum(1).mean()) * v_TGD.shape[2]
