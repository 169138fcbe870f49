"""A 4-bit look at an unquantised KV cache: what a draft would read from a low-bit copy of it.

Blocks of old tokens are rounded as the low-bit cache stores them (keys per channel, values per
token, asymmetric), newer tokens stay as they are; `packed_end` says which, by positions alone. This
is the reference: it rounds at every step and saves no bytes.

Legend: B rows, G key/value heads, T tokens, D head_dim, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kv_format import BLOCK_TOKENS, packed_end
from llmpq.runtime.kv_cache import KVCache, PlainKVCache
from llmpq.runtime.step import Step


class RoundedKV:
    """Appends to the cache below, attends to a rounded copy of it."""

    def __init__(self, inner: KVCache, *, bits: int) -> None:
        if not isinstance(inner, PlainKVCache):
            raise ValueError(
                "a draft that reads the KV cache at 4 bits needs a 16-bit cache below it; plan "
                "with kv16, or choose another --speculate mode"
            )
        self._inner, self._bits = inner, bits

    @property
    def nbytes(self) -> int:
        """Nothing of its own."""
        return 0

    def attend(
        self,
        layer: int,
        q_BQHD: Tensor,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        step: Step,
        *,
        scale: float,
        alibi_slopes_H: Tensor | None = None,
    ) -> Tensor:
        """Append the step's keys and values, then return attention over the rounded cache."""
        inner = self._inner
        k, v = inner.k[layer], inner.v[layer]
        blocks = packed_end(step.max_end - 1)
        if blocks == 0:
            return inner.attend(
                layer, q_BQHD, k_BQGD, v_BQGD, step, scale=scale, alibi_slopes_H=alibi_slopes_H
            )
        slots = step.slots_B
        saved = k[slots, :, :blocks].clone(), v[slots, :, :blocks].clone()
        ends = [packed_end(start) for start in step.start_B.tolist()]
        complete = torch.tensor(ends, device=k.device)[:, None, None, None]
        token = torch.arange(blocks, device=k.device)[None, None, :, None]
        packed = token < complete
        k[slots, :, :blocks] = torch.where(packed, _rounded(saved[0], self._bits, 3), saved[0])
        v[slots, :, :blocks] = torch.where(packed, _rounded(saved[1], self._bits, 4), saved[1])
        out = inner.attend(
            layer, q_BQHD, k_BQGD, v_BQGD, step, scale=scale, alibi_slopes_H=alibi_slopes_H
        )
        k[slots, :, :blocks] = torch.where(packed, saved[0], k[slots, :, :blocks])
        v[slots, :, :blocks] = torch.where(packed, saved[1], v[slots, :, :blocks])
        return out

    def truncate(self, slots_B: Tensor, length_B: Tensor) -> None:
        """Forget the tokens of these slots from `length` on."""
        self._inner.truncate(slots_B, length_B)


def _rounded(x_BGTD: Tensor, bits: int, dim: int) -> Tensor:
    """Round to an asymmetric grid over each block's tokens (dim 3) or each token's D (dim 4)."""
    batch, heads, tokens, width = x_BGTD.shape
    x_BGNtD = x_BGTD.float().reshape(batch, heads, -1, BLOCK_TOKENS, width)
    low, high = x_BGNtD.amin(dim, keepdim=True), x_BGNtD.amax(dim, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_(min=1e-8)
    grid = ((x_BGNtD - low) / scale).round_().mul_(scale).add_(low)
    return grid.view(batch, heads, tokens, width).to(x_BGTD.dtype)
