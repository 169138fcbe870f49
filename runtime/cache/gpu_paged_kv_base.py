"""What a captured step needs of a pool of KV blocks on a GPU, whatever it keeps keys and values as.

Legend: T places of a step, R rows, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.kv.paged.paged_rows import FIELDS, Ints, Rows, TokenPlaces, spread
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.steps.device_copies import upload
from llmpq.runtime.steps.paged_step import PagedStep

Numbers = Sequence[int] | Ints
"""Some of what is sent of a step; of thousands an array, for lists of them take milliseconds."""


class GpuPagedKVBase(PagedKV[PagedStep]):
    """A stage's pool on a GPU, its block tables on the device."""

    columns: int
    """Blocks of the longest request."""
    launches: Any
    """How this pool's kernels are launched."""
    _table_SM: Tensor
    """Every slot's blocks, where there is one table of them."""

    def table(
        self,
        slots: Rows,
        starts: Rows,
        counts: Rows,
        *,
        num_rows: int,
        num_places: int,
    ) -> Ints:
        """Return a step's rows [fields, rows] as this pool's kernels read them (paged_rows.py)."""
        given = (slots, starts, counts)
        table: Ints = self.launches.table(*given, num_rows=num_rows, num_places=num_places)
        return table

    has_windows = False
    """Whether layers with a window have a pool of their own."""
    num_fields = FIELDS
    """Rows of the table."""
    starts_on_device = False
    """Whether attention reads where rows of several tokens start from the table alone."""
    num_work_split = 0
    """Numbers that `work_split` returns."""

    def work_split(self, table: Ints) -> Numbers:
        """Return what each program of attention takes of a rows' table, if it reads that."""
        return []

    def places(
        self, rows_FR: Tensor, num_places: int, *, padding_slot: int
    ) -> tuple[TokenPlaces, TokenPlaces | None]:
        """Return where a step's tokens stand; also in the pool of windows, if there is one."""
        return spread(rows_FR, self._table_SM, num_places, padding_slot=padding_slot), None

    @property
    def pages(self) -> GpuPagedKVBase:
        """The cache itself."""
        return self


def tokens_of(pool_PGTD: Tensor, blocks_M: Tensor, count: int) -> Tensor:
    """Return the first tokens [N, G, D] that a request has in its blocks of a layer's pool."""
    own = pool_PGTD[blocks_M[: -(-count // pool_PGTD.shape[2])].long()]
    return own.transpose(1, 2).flatten(0, 1)[:count]


def write_blocks(table_SM: Tensor, brought: Sequence[tuple[int, int, Sequence[int]]]) -> None:
    """Write blocks to a table; of each row its slot, where they begin, and they."""
    columns = table_SM.shape[1]
    places: list[int] = []
    numbers: list[int] = []
    for slot, first, blocks in brought:
        at = slot * columns + first
        places += range(at, at + len(blocks))
        numbers += blocks
    if numbers:
        pairs = upload([places, numbers], torch.long, table_SM.device)
        table_SM.view(-1).index_copy_(0, pairs[0], pairs[1].int())
