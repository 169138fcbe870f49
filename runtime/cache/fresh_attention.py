"""Attention within calibration windows: a KV cache that stores nothing."""

from __future__ import annotations

from torch import Tensor

from llmpq.runtime.cache.attention import attend_padded
from llmpq.runtime.cache.kv_cache import AttentionInputs, KVCache
from llmpq.runtime.steps.step import Step


class FreshAttention(KVCache[Step]):
    """A KV cache that stores nothing: every window is a prompt of its own."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0

    def attend(self, layer: int, inputs: AttentionInputs, step: Step) -> Tensor:
        """Return plain causal attention [B, Q, H, D]."""
        keys_values = (inputs.k_BQGD, inputs.v_BQGD)
        return attend_padded(inputs.q_BQHD, *keys_values, step, inputs.scoring)
