"""Pools on a GPU that forward to others (forwarding_kv.py), captured as one.

Kernels of each pool cut a step's rows in a way of their own, so a step brings a table of rows for
each, one behind the other. Which blocks a request has is the same in all. A copy for drafts is
brought the rows of its pool: appends read as much.

Legend: F numbers of a row, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from torch import Tensor

from llmpq.kernels.kv.paged.paged_rows import Ints, Rows, TokenPlaces
from llmpq.runtime.cache.forwarding_kv import DraftedKV, ForwardingKV, KVByShape
from llmpq.runtime.cache.gpu_packed_kv import rotated
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase, Numbers
from llmpq.runtime.cache.kv_cache import AttentionInputs, PagedKV
from llmpq.runtime.steps.paged_step import PagedStep


class GpuForwardingKV(ForwardingKV[PagedStep], GpuPagedKVBase):
    """Pools whose tables of rows come one behind the other."""

    def _forward_to(self, pools: Sequence[GpuPagedKVBase]) -> None:
        """Take the pools that a step brings a table for."""
        self._pools, self.columns = list(pools), pools[0].columns
        self._fields = [0, *accumulate(pool.num_fields for pool in pools)]
        self._split_ends = [0, *accumulate(pool.num_work_split for pool in pools)]
        self.num_fields, self.num_work_split = self._fields[-1], self._split_ends[-1]

    def table(
        self,
        slots: Rows,
        starts: Rows,
        counts: Rows,
        *,
        num_rows: int,
        num_places: int,
    ) -> Ints:
        """Return a step's rows as the kernels of each pool read them, one behind the other."""
        given = (slots, starts, counts)
        tables = [p.table(*given, num_rows=num_rows, num_places=num_places) for p in self._pools]
        return np.concatenate(tables)

    def work_split(self, table: Ints) -> Numbers:
        """Return what each program of attention takes, of all pools."""
        ends = zip(self._pools, self._fields, self._fields[1:], strict=False)
        each = (pool.work_split(table[a:b]) for pool, a, b in ends)
        return np.concatenate([np.asarray(values, dtype=np.int64) for values in each])

    def places(
        self, rows_FR: Tensor, num_places: int, *, padding_slot: int
    ) -> tuple[TokenPlaces, TokenPlaces | None]:
        """Return where a step's tokens stand: all tables say the same of blocks."""
        given = {"num_places": num_places, "padding_slot": padding_slot}
        where, windowed = self._pools[0].places(rows_FR, **given)
        for pool, first in zip(self._pools, self._fields, strict=False):
            if windowed is None and pool.has_windows:
                _, windowed = pool.places(rows_FR[first:], **given)
        return where, windowed


class GpuKVByShape(KVByShape[PagedStep], GpuForwardingKV):
    """Pools of layers of unlike heads as one."""

    def __init__(self, layers: Sequence[tuple[PagedKV, int]]) -> None:
        super().__init__(layers)
        pools = [part for part in self._parts if isinstance(part, GpuPagedKVBase)]
        assert len(pools) == len(self._parts), "pools of GPUs and of hosts are never mixed"
        self._forward_to(pools)

    def step_of(self, layer: int, step: PagedStep) -> PagedStep:
        """Return a step with the rows of the kernels of a layer's shape."""
        at = next(i for i, pool in enumerate(self._pools) if pool is self._layers[layer][0])
        first, last = self._split_ends[at : at + 2]
        rows_FR = step.rows_FR[self._fields[at] : self._fields[at + 1]]
        return step.once(
            f"step of shape {at} of {id(self)}",
            lambda: replace(step, rows_FR=rows_FR, work_split=step.work_split[first:last]),
        )


class GpuDraftedKV(DraftedKV[PagedStep], GpuForwardingKV):
    """The model's side: attends to `inner`, keeps `copy` up to date."""

    def __init__(self, inner: GpuPagedKVBase, copy: GpuPagedKVBase) -> None:
        super().__init__(inner, copy)
        self._forward_to([inner])

    def attend(self, layer: int, inputs: AttentionInputs, step: PagedStep) -> Tensor:
        """Append the step's keys and values to both, then return attention over the inner one.

        Queries and keys get their positions first, which both pools need.
        """
        return super().attend(layer, rotated(inputs, step), step)
