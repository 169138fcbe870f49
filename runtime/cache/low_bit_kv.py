"""The low-bit KV cache behind the runtime's cache protocol (runtime/cache/kv_cache.py).

Knows nothing of packing: low_bit_cache.py does the work, on a GPU by kernels, elsewhere in plain
torch. Legend: B rows, Q new tokens, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache, StepPlan
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.attention import attend_fresh
from llmpq.runtime.step import Step


class LowBitKV(KVCache):
    """8, 4 or 2-bit keys and values of one stage, the newest tokens in 16 bits."""

    def __init__(
        self,
        spec: ModelSpec,
        kv: KVPrecision,
        *,
        num_layers: int,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        key_group: int | None = 128,
        exact_prompt: bool = True,
    ) -> None:
        fmt = KVFormat(precision=kv, head_dim=spec.head_dim, key_group=key_group)
        self.cache = QuantizedKVCache(
            fmt,
            num_layers=num_layers,
            kv_heads=spec.kv_heads,
            slots=slots,
            max_len=max_len,
            dtype=dtype,
            device=device,
            exact_prompt=exact_prompt,
        )
        self._step: Step | None = None
        self._plan: StepPlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all layers; equal to `llmpq.sizes.kv_format.kv_cache_bytes` times layers."""
        return self.cache.nbytes

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
        inv_freq: Tensor | None = None,
        rule: ScoreRule = EVERYTHING,
    ) -> Tensor:
        """Append the step's keys and values, then return its causal attention [B, Q, H, D].

        With `inv_freq`, where the step `rotates`, queries and keys come without their positions.
        """
        if step.fresh and self.cache.exact_prompt:
            # The bias of the scores is made once per step.
            self.append(layer, k_BQGD, v_BQGD, step)
            return attend_fresh(
                q_BQHD,
                k_BQGD,
                v_BQGD,
                step,
                scale=scale,
                alibi_slopes_H=alibi_slopes_H,
                rule=rule,
            )
        return self.cache.run(
            self.planned(step),
            layer,
            q_BQHD,
            k_BQGD,
            v_BQGD,
            scale=scale,
            alibi_slopes_H=alibi_slopes_H,
            inv_freq=inv_freq,
            rule=rule,
        )

    def keep_for_readers(self, layer: int, step: Step) -> None:
        """Keep the newest tokens of a layer as they are before a step of chunks."""
        if step.q_len > 1 and not step.fresh:
            rings = self.cache.layers[layer]
            kept = rings.k_ring_SGRD[step.slots_B], rings.v_ring_SGRD[step.slots_B]
            step.memo[f"rings {id(rings)}"] = kept

    def attend_again(
        self,
        layer: int,
        q_BQHD: Tensor,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        step: Step,
        *,
        scale: float,
        alibi_slopes_H: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the attention of other queries; the step is appended again to what it found."""
        rings = self.cache.layers[layer]
        kept = step.memo.get(f"rings {id(rings)}")
        if kept is not None:
            rings.k_ring_SGRD[step.slots_B], rings.v_ring_SGRD[step.slots_B] = kept
        given = (layer, q_BQHD, k_BQGD, v_BQGD, step)
        return self.attend(*given, scale=scale, alibi_slopes_H=alibi_slopes_H, **options)

    def rotates(self, step: Step) -> bool:
        """Whether the step's append can rotate queries and keys in its own launch."""
        return self.cache.rotates(step.q_len, fresh=step.fresh)

    def rotating(self, step: Step) -> LowBitKV | None:
        """Return itself where it rotates the step's queries and keys."""
        return self if self.rotates(step) else None

    def append(
        self,
        layer: int,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        step: Step,
        inv_freq: Tensor | None = None,
    ) -> None:
        """Append the step's keys and values; nothing attends to them yet."""
        self.cache.append(self.planned(step), layer, k_BQGD, v_BQGD, inv_freq)

    def planned(self, step: Step) -> StepPlan:
        """Prepare a step once for all layers."""
        if self._plan is None or step is not self._step:
            self._step = step
            self._plan = self.cache.plan(
                step.slots_B,
                step.start_B,
                step.num_new_B,
                q_len=step.q_len,
                fresh=step.fresh,
                max_end=step.max_end,
            )
        return self._plan
