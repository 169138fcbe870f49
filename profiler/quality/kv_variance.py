"""Omega of a low-bit KV cache: the variance that rounding keys and values adds to them.

Same unit as the weights' omega (extra variance of operator outputs, per token): a cached key or
value is an output of the qkv operator, and rounding it with step S adds S^2 / 4 (deterministic) or
S^2 / 6 (stochastic). Keys have a step per channel and block of tokens, values one per token; each
its own bits.

T tokens, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from llmpq.precision import KVPrecision
from llmpq.profiler.quality.variance import Rounding, share
from llmpq.sizes.kv_format import BLOCK_TOKENS

KEY_BLOCK = BLOCK_TOKENS
"""Tokens that share a key channel's step."""


@dataclass(frozen=True)
class KVRanges:
    """Squared ranges (max - min) that share a step, summed over a token's elements, all heads."""

    keys: float
    values: float


def kv_omega(ranges: KVRanges, kv: KVPrecision, rounding: Rounding) -> float:
    """Return the extra variance of one token's keys and values, each at its own bits."""
    squares = _step_square(ranges.keys, kv.key_bits) + _step_square(ranges.values, kv.value_bits)
    return share(rounding) * squares


def _step_square(range_square: float, bits: int) -> float:
    return 0.0 if bits == 16 else range_square / (2**bits - 1) ** 2


def mean_ranges(ranges: Sequence[KVRanges]) -> KVRanges:
    """Return the mean over windows of text."""
    count = len(ranges)
    return KVRanges(sum(r.keys for r in ranges) / count, sum(r.values for r in ranges) / count)


def kv_ranges(k_TGD: Tensor, v_TGD: Tensor) -> KVRanges:
    """Return the squared ranges of a layer's keys and values."""
    return KVRanges(_key_range_square(k_TGD), _value_range_square(v_TGD))


def _key_range_square(k_TGD: Tensor) -> float:
    total = 0.0
    for block in k_TGD.split(KEY_BLOCK):
        low, high = block.amin(dim=0), block.amax(dim=0)
        total += float((high - low).double().square().sum()) * block.shape[0]
    return total / k_TGD.shape[0]


def _value_range_square(v_TGD: Tensor) -> float:
    low, high = v_TGD.amin(dim=2), v_TGD.amax(dim=2)
    return float((high - low).double().square().sum(1).mean()) * v_TGD.shape[2]
