"""A pool of KV blocks with a 4-bit copy under the same block tables: drafts read the copy.

Every step of the model appends to both; a draft step appends to the copy only, and the verify that
follows overwrites what it left. The copy packs accepted tokens only: it holds back more of the
newest tokens than a draft is long.

A request that starts from blocks of the prefix cache finds its tokens in the pool; the copy is made
of them anew, since another request may have ended before its last block was packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from llmpq.plan import MAX_GAMMA
from llmpq.runtime.cache.kv_cache import ForwardingKV, PagedKV
from llmpq.runtime.request import PagedRow
from llmpq.runtime.step import Step
from llmpq.sizes.kv_format import HOLDBACK_TOKENS

assert MAX_GAMMA < HOLDBACK_TOKENS, "drafts must never be packed"


class DraftedKV(ForwardingKV):
    """The model's side: attends to `inner`, keeps `copy` up to date."""

    def __init__(self, inner: PagedKV, copy: PagedKV) -> None:
        self.inner, self.copy, self.states = inner, copy, inner.states

    def part(self, layer: int) -> tuple[PagedKV, int]:
        """Return the inner one."""
        return self.inner, layer

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.inner.nbytes + self.copy.nbytes

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Take note of the blocks that a step's rows got, in both."""
        self.inner.take_rows(rows, starts)
        self.copy.take_rows([replace(row, resumes=False) for row in rows], starts)
        for row, start in zip(rows, starts, strict=True):
            if row.resumes:
                self.copy.take_tokens_of(self.inner, row.slot, start)

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
        return super().attend(
            *(layer, q_BQHD, k_BQGD, v_BQGD, step),
            scale=scale,
            alibi_slopes_H=alibi_slopes_H,
            **options,
        )
