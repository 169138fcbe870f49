"""The pool of a stage on a GPU, unquantised, its block tables on the device.

    pool [layers, blocks, G, 128, D]     a head's tokens of a block lie one behind the other

Layers with a window have a pool and a table of their own where that takes less (pool_size.py): what
a table says of blocks that have left the window is out of date, and never read.

Which block a request has is the scheduler's to say; a step's new ones are written to the tables
before it runs, in the order of the device's stream, so that steps issued ahead find what they need.

Legend: T tokens of a step, H query heads, G key/value heads, D head_dim, S slots, M blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.fused.rope_append import rope_append_pages
from llmpq.kernels.kv.paged.paged_attend import paged_attend
from llmpq.kernels.kv.paged.paged_plan import PagedPlan
from llmpq.kernels.kv.paged.paged_rows import (
    WORK_SPLIT,
    Ints,
    Rows,
    TokenPlaces,
    row_table,
    split_work,
    spread,
)
from llmpq.kernels.kv.prompt_attend import WIDEST, prompt_attend
from llmpq.kernels.kv.reference import Scoring
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase, Numbers, tokens_of, write_blocks
from llmpq.runtime.cache.host_blocks import HostBlocks
from llmpq.runtime.cache.kv_cache import AttentionInputs
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.paged_step import PagedStep
from llmpq.sizes.kv_format import BLOCK_TOKENS, pool_blocks
from llmpq.sizes.pool_size import PoolSize


@dataclass(frozen=True, kw_only=True)
class DevicePool:
    """Keys and values of the layers of one kind, and who has what."""

    k: Tensor
    v: Tensor
    table_SM: Tensor

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        *,
        num_layers: int,
        num_blocks: int,
        slots: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DevicePool:
        """Return a pool of zeros."""
        shape = (num_layers, num_blocks, spec.kv_heads, BLOCK_TOKENS, spec.head_dim)
        return cls(
            k=torch.zeros(shape, dtype=dtype, device=device),
            v=torch.zeros(shape, dtype=dtype, device=device),
            table_SM=torch.zeros((slots, columns), dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        return self.k.nbytes + self.v.nbytes

    def take(self, brought: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Write blocks to the table; of each row its slot, where they begin, and they."""
        write_blocks(self.table_SM, brought)


class GpuPagedKV(GpuPagedKVBase):
    """16-bit (or float32) keys and values of one stage in blocks."""

    starts_on_device = True

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: Sequence[int],
        size: PoolSize,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`layers`: their numbers in the model."""
        assert spec.kv_vectors == 2, "llmpq/plans/capabilities.py refuses before"
        device = torch.device(device)
        self.columns = pool_blocks(KVPrecision.KV16, size.max_len)
        kinds = [bool(size.window) and spec.is_windowed(layer) for layer in layers]
        self.whole, self.windowed = (
            DevicePool.allocate(
                spec,
                num_layers=kinds.count(kind),
                num_blocks=num_blocks,
                slots=size.slots,
                columns=self.columns,
                dtype=dtype,
                device=device,
            )
            for kind, num_blocks in ((False, size.num_blocks), (True, size.window_blocks))
        )
        self.has_windows = any(kinds)
        """Whether layers with a window have a pool of their own."""
        self._layers = [(kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds)]
        """Of each layer whether it is in the pool of windows, and its number in its pool."""
        window = max((own for own in spec.windows if own < size.max_len), default=0)
        self.launches = PagedPlan.of(
            spec.heads, spec.kv_heads, spec.head_dim, dtype, device, window
        )
        self._on_host = HostBlocks((self.whole.k, self.whole.v))
        self.num_work_split = WORK_SPLIT * self.launches.programs * (2 if window else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        return self.whole.nbytes + self.windowed.nbytes

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Write the blocks that a step's rows got to the tables; copy what hosts keep."""
        self._on_host.take_rows(rows)
        self.whole.take([(row.slot, row.first_block, row.new_blocks) for row in rows])
        if self.has_windows:
            self.windowed.take(
                [(row.slot, row.first_window_block, row.new_window_blocks) for row in rows]
            )

    def stored_tokens(self, layer: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, N, G, D]; of blocks that left a window whatever is there."""
        windowed, place = self._layers[layer]
        pool = self.windowed if windowed else self.whole
        blocks_M = pool.table_SM[slot]
        k_NGD, v_NGD = (tokens_of(part[place], blocks_M, count) for part in (pool.k, pool.v))
        return k_NGD[None], v_NGD[None]

    def table(
        self,
        slots: Rows,
        starts: Rows,
        counts: Rows,
        *,
        num_rows: int,
        num_places: int,
    ) -> Ints:
        """Return a step's rows as paged_attend.py reads them."""
        return row_table(
            *(slots, starts, counts),
            num_rows=num_rows,
            num_places=num_places,
            tile_queries=self.launches.tile_queries,
            tile_keys=self.launches.tile_keys,
            window=self.launches.window,
        )

    def work_split(self, table: Ints) -> Numbers:
        """Return what attention's programs take of a rows' table."""
        plan = self.launches
        return split_work(table, plan.programs, windowed=plan.window > 0)

    def places(
        self, rows_FR: Tensor, num_places: int, *, padding_slot: int
    ) -> tuple[TokenPlaces, TokenPlaces | None]:
        """Return where a step's tokens go in either pool."""
        where = spread(rows_FR, self.whole.table_SM, num_places, padding_slot=padding_slot)
        if not self.has_windows:
            return where, None
        return where, spread(rows_FR, self.windowed.table_SM, num_places, padding_slot=padding_slot)

    def attend(self, layer: int, inputs: AttentionInputs, step: PagedStep) -> Tensor:
        """Append the step's keys and values, then return its causal attention [1, T, H, D].

        Keys of whole prompts are rotated where they are, too: they attend to them there.
        """
        pool, place, where = self._pool_of(layer, step)
        rotation, scoring = inputs.rotation, inputs.scoring
        k_TGD, v_TGD = inputs.k_BQGD[0], inputs.v_BQGD[0]
        q_THD = rope_append_pages(
            inputs.q_BQHD[0],
            k_TGD,
            v_TGD,
            pool.k[place],
            pool.v[place],
            where.places_T,
            where.positions_T,
            *(None, 1.0) if rotation is None else (rotation.inv_freq, rotation.factor),
            keep=self._is_whole(step, scoring),
        )
        return self._attended(layer, q_THD, k_TGD, v_TGD, step, scoring)

    def attend_again(self, layer: int, inputs: AttentionInputs, step: PagedStep) -> Tensor:
        """Return the attention of other queries, which have their positions, over a layer."""
        assert inputs.rotation is None
        heads = (inputs.q_BQHD[0], inputs.k_BQGD[0], inputs.v_BQGD[0])
        return self._attended(layer, *heads, step, inputs.scoring)

    def _pool_of(self, layer: int, step: PagedStep) -> tuple[DevicePool, int, TokenPlaces]:
        """Return a layer's pool, its number there, and where the step's tokens go."""
        windowed, place = self._layers[layer]
        if not windowed:
            return self.whole, place, step.where
        assert step.where_windowed is not None
        return self.windowed, place, step.where_windowed

    def _is_whole(self, step: PagedStep, scoring: Scoring) -> bool:
        """Whether a step has prompts alone, which attend to their own keys where those are."""
        plain = scoring.rule.is_plain and scoring.alibi_slopes_H is None
        return plain and bool(step.prompts) and self.launches.head_dim <= WIDEST

    def _attended(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        step: PagedStep,
        scoring: Scoring,
    ) -> Tensor:
        """Return causal attention [1, T, H, D] to keys and values that are in the pool."""
        if self._is_whole(step, scoring):
            return prompt_attend(q_THD, k_TGD, v_TGD, step.prompts, scale=scoring.scale)[None]
        pool, place, _ = self._pool_of(layer, step)
        rows = (step.rows_FR, step.work_split, pool.table_SM, self.launches)
        out_THD = paged_attend(
            *(q_THD, pool.k[place], pool.v[place], *rows),
            scale=scoring.scale,
            alibi_slopes_H=scoring.alibi_slopes_H,
            rule=scoring.rule,
            chunks=step.chunks,
        )
        return out_THD[None]
