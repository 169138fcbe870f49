"""A pool of KV blocks on a GPU with a 4-bit copy that drafts read (drafted_kv.py).

Captured steps are those of the 16-bit pool; the copy is brought the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from llmpq.kernels.kv.paged.paged_rows import TokenPlaces
from llmpq.runtime.cache.drafted_kv import DraftedKV
from llmpq.runtime.cache.gpu_packed_kv import new_places, turned
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase
from llmpq.runtime.paged_step import PagedStep
from llmpq.runtime.step import Step


class GpuDraftedKV(DraftedKV, GpuPagedKVBase):
    """The model's side: attends to `inner`, keeps `copy` up to date."""

    def __init__(self, inner: GpuPagedKVBase, copy: GpuPagedKVBase) -> None:
        super().__init__(inner, copy)
        self._inner = inner
        self.columns, self.num_work_split = inner.columns, inner.num_work_split
        self.num_fields = inner.num_fields

    def table(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        num_rows: int,
        num_places: int,
    ) -> list[list[int]]:
        """Return a step's rows as the inner pool's kernels read them; appends read as much."""
        return self._inner.table(slots, starts, counts, num_rows=num_rows, num_places=num_places)

    def work_split(self, table: Sequence[Sequence[int]]) -> list[int]:
        """As of the inner pool."""
        return self._inner.work_split(table)

    def places(
        self, rows_FR: Tensor, num_places: int, *, padding_slot: int
    ) -> tuple[TokenPlaces, TokenPlaces | None]:
        """As of the inner pool."""
        return self._inner.places(rows_FR, num_places, padding_slot=padding_slot)

    def attend(
        self,
        layer: int,
        q_BQHD: Tensor,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        step: Step,
        *,
        inv_freq: Tensor | None = None,
        factor: float = 1.0,
        **options: Any,
    ) -> Tensor:
        """Append the step's keys and values to both, then return attention over the inner one.

        With `inv_freq` queries and keys get their positions first, which both pools need.
        """
        assert isinstance(step, PagedStep)
        if inv_freq is not None:
            places_T = step.once("new places", lambda: new_places(step.where))
            at = (places_T, step.where.positions_T, inv_freq, factor)
            q_THD, k_TGD, v_TGD = turned(q_BQHD[0], k_BQGD[0], v_BQGD[0], *at)
            q_BQHD, k_BQGD, v_BQGD = q_THD[None], k_TGD[None], v_TGD[None]
        return super().attend(layer, q_BQHD, k_BQGD, v_BQGD, step, **options)
