"""Omega of a low-bit KV cache: the variance that rounding keys and values adds to them.

Same unit as the weights' omega (extra variance of operator outputs, per token): a cached key or
value is an output of the qkv operator, and rounding it with step S adds S^2 / 4 (deterministic) or
S^2 / 6 (stochastic). Keys have a step per channel and block of tokens, values one per token.

T tokens, G key/value heads, D head_dim.
"""

from __future__ import annotations

from torch import Tensor

from llmpq.precision import KVPrecision
from llmpq.profiler.quality.variance import Rounding, share
from llmpq.sizes.kv_format import BLOCK_TOKENS

KEY_BLOCK = BLOCK_TOKENS
"""Tokens that share a key channel's step."""


def kv_omega(range_square: float, kv: KVPrecision, rounding: Rounding) -> float:
    """Return the extra variance of one token's keys and values, all heads summed."""
    if kv is KVPrecision.KV16:
        return 0.0
    return share(rounding) * range_square / (2**kv.bits - 1) ** 2


def range_square(k_TGD: Tensor, v_TGD: Tensor) -> float:
    """Return the squared ranges (max - min) that share a step, summed over a token's elements."""
    return _key_range_square(k_TGD) + _value_range_square(v_TGD)


def _key_range_square(k_TGD: Tensor) -> float:
    total = 0.0
    for block in k_TGD.split(KEY_BLOCK):
        low, high = block.amin(dim=0), block.amax(dim=0)
        total += float((high - low).double().square().sum()) * block.shape[0]
    return total / k_TGD.shape[0]


def _value_range_square(v_TGD: Tensor) -> float:
    low, high = v_TGD.amin(dim=2), v_TGD.amax(dim=2)
    return float((high - low).double().square().sum(1).mean()) * v_TGD.shape[2]
