"""A KV cache with a 4-bit copy beside it: the model reads the one, drafts read the other.

Every step of the model appends to both: layer by layer, or on a GPU steps of a few tokens to the
copy in one launch behind the last layer (`catches_up`). A draft appends to the copy only, and the
verify that follows overwrites what it left. The copy packs verified tokens only: it holds back more
of the newest tokens than a draft is long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.cache.plain_kv import PlainKVCache
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.step import Step
from llmpq.sizes.kv_format import HOLDBACK_TOKENS
from llmpq.speculation import MAX_GAMMA
from llmpq.workload import Workload

assert MAX_GAMMA < HOLDBACK_TOKENS, "drafts must never be packed"


class DualKV(KVCache):
    """The model's side: attends to `inner`, keeps `copy` up to date."""

    def __init__(self, inner: KVCache, copy: LowBitKV) -> None:
        self.inner, self.copy = inner, copy

    @property
    def plain(self) -> PlainKVCache | None:
        """The inner one, where kernels read it."""
        return self.inner.plain

    @property
    def dual(self) -> DualKV:
        """Itself."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.inner.nbytes + self.copy.nbytes

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
        **options: Any,
    ) -> Tensor:
        """Append the step's keys and values to both, then return attention over the inner one."""
        self.copy.append(layer, k_BQGD, v_BQGD, step)
        return self.inner.attend(
            layer,
            q_BQHD,
            k_BQGD,
            v_BQGD,
            step,
            scale=scale,
            alibi_slopes_H=alibi_slopes_H,
            **options,
        )

    def catches_up(self, step: Step) -> bool:
        """Whether `catch_up` appends the step's tokens to the copy; else each layer does."""
        short = not step.fresh and step.q_len <= HOLDBACK_TOKENS
        return short and self.inner.plain is not None and self.copy.cache.uses_kernels

    def keep(self, layer: int, step: Step, append: Callable[[LowBitKV], None]) -> None:
        """Give the copy what a layer has appended to the 16-bit cache: `append`, or all at last."""
        if not self.catches_up(step):
            append(self.copy)
        elif self.inner.plain is not None and layer + 1 == len(self.inner.plain.k):
            self.catch_up(step)

    def catch_up(self, step: Step) -> None:
        """Append to the copy what a step has left in all layers of the 16-bit cache."""
        # Imported here: Triton is not needed where there is no GPU.
        from llmpq.kernels.kv.low_bit.catch_up import catch_up

        inner, cache = self.inner.plain, self.copy.cache
        assert inner is not None
        catch_up(
            cache.fmt,
            inner.k,
            inner.v,
            self._addresses,
            cache.table_SN,
            self.copy.planned(step).device_rows,
            q_len=step.q_len,
        )

    @cached_property
    def _addresses(self) -> Tensor:
        """Where the copy's tensors are, layer by layer."""
        from llmpq.kernels.kv.low_bit.catch_up import addresses

        return addresses(self.copy.cache.layers, self.copy.cache.device)

    def truncate(self, slots_B: Tensor, length_B: Tensor) -> None:
        """Forget the tokens of these slots from `length` on."""
        self.inner.truncate(slots_B, length_B)
        self.copy.truncate(slots_B, length_B)


def make_copy(
    model: StageModel, workload: Workload, dtype: torch.dtype, device: torch.device
) -> LowBitKV:
    """Allocate the 4-bit copy of a stage's cache."""
    return LowBitKV(
        model.spec,
        KVPrecision.KV4,
        num_layers=len(model.layers),
        slots=workload.batch,
        max_len=workload.max_len,
        dtype=dtype,
        device=device,
    )
