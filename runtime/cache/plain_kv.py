"""The KV cache of one stage: preallocated slots, one per request, all layers of the stage.

A slot holds the keys and values of one request's tokens 0..max_len-1. How many of them are valid
is the steps' to say; the cache only needs where new tokens go. Layers count from
0 within the stage.

Legend: S slots, T max_len, B rows, Q new tokens, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.model_spec import ModelSpec
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.attention import attend_cached, attend_fresh
from llmpq.runtime.step import Step


class PlainKVCache(KVCache):
    """Unquantised keys and values, [layers, S, G, T, D] each, in the model's dtype."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_layers: int,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, slots, spec.kv_heads, max_len, spec.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = self.k  # MLA's latents are keys and values at once
        if spec.kv_vectors == 2:
            self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.max_len = max_len

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        return self.k.nbytes + (0 if self.v is self.k else self.v.nbytes)

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
        rule: ScoreRule = EVERYTHING,
    ) -> Tensor:
        """Append the step's keys and values, then return its causal attention [B, Q, H, D]."""
        self.check_room(step)
        k, v = self.k[layer], self.v[layer]
        _append(k, k_BQGD, step)
        if self.v is not self.k:
            _append(v, v_BQGD, step)
        if step.fresh:
            return attend_fresh(
                q_BQHD,
                k_BQGD,
                v_BQGD,
                step,
                scale=scale,
                alibi_slopes_H=alibi_slopes_H,
                rule=rule,
            )
        return attend_cached(
            q_BQHD,
            k,
            v,
            step,
            scale=scale,
            alibi_slopes_H=alibi_slopes_H,
            rule=rule,
        )

    def check_room(self, step: Step) -> None:
        """Raise `ValueError` if a request outgrows its slot."""
        if step.max_end > self.max_len:
            raise ValueError(
                f"a request needs {step.max_end} tokens of KV cache, its slot holds "
                f"{self.max_len}; plan for a longer prompt or more generated tokens"
            )

    @property
    def plain(self) -> PlainKVCache:
        """Itself."""
        return self


def _append(cache_SGTD: Tensor, new_BQGD: Tensor, step: Step) -> None:
    """Write the rows' new tokens at their positions."""
    if step.fresh or step.uniform:
        start = step.max_end - step.q_len
        for row, slot, count in step.runs:
            place = cache_SGTD[slot : slot + count, :, start : step.max_end]
            place.copy_(new_BQGD[row : row + count].transpose(1, 2))
        return
    if step.q_len > 1:
        # Padding must not land anywhere: it repeats the row's last valid token in place.
        source_BQ = step.once("append_source", lambda: _source(step))
        new_BQGD = new_BQGD[torch.arange(step.batch, device=new_BQGD.device)[:, None], source_BQ]
    place_BQ = step.once("append_place", lambda: step.start_B[:, None] + _source(step))
    cache_SGTD[step.slots_B[:, None], :, place_BQ] = new_BQGD


def _source(step: Step) -> Tensor:
    """Return [B, Q]: the new token each place of a row takes, its last valid one for padding."""
    columns = torch.arange(step.q_len, device=step.num_new_B.device)
    return torch.minimum(columns, step.num_new_B[:, None] - 1)
