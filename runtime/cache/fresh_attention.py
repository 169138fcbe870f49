"""Attention within calibration windows: a KV cache that stores nothing."""

from __future__ import annotations

from torch import Tensor

from llmpq.kernels.kv.reference import Scoring
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.attention import attend_padded
from llmpq.runtime.step import Step


class FreshAttention(KVCache):
    """A KV cache that stores nothing: every window is a prompt of its own."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0

    def attend(
        self,
        layer: int,
        q_BQHD: Tensor,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        step: Step,
        scoring: Scoring,
    ) -> Tensor:
        """Return plain causal attention [B, Q, H, D]."""
        return attend_padded(q_BQHD, k_BQGD, v_BQGD, step, scoring)
