"""The pool of a stage on a GPU, unquantised, its block tables on the device.

    pool [layers, blocks, G, 128, D]     a head's tokens of a block lie one behind the other

Which block a request has is the scheduler's to say; a step's new ones are written to the tables
before it runs, in the order of the device's stream, so that steps issued ahead find what they need.

Legend: T tokens of a step, H query heads, G key/value heads, D head_dim, S slots, M blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.kernels.fused.rope_append import rope_append_pages
from llmpq.kernels.kv.paged_attend import paged_attend
from llmpq.kernels.kv.paged_plan import PagedPlan
from llmpq.kv_format import BLOCK_TOKENS, pool_blocks
from llmpq.model_spec import ModelSpec
from llmpq.pool_size import PoolSize
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.paged_step import PagedStep
from llmpq.runtime.request import PagedRow
from llmpq.runtime.step import Step
from llmpq.runtime.upload import upload


class PagedDeviceKV(PagedKV):
    """16-bit (or float32) keys and values of one stage in blocks."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_layers: int,
        size: PoolSize,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        assert not size.window and spec.kv_vectors == 2, "llmpq/capabilities.py refuses before"
        device = torch.device(device)
        shape = (num_layers, size.num_blocks, spec.kv_heads, BLOCK_TOKENS, spec.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.columns = pool_blocks(KVPrecision.KV16, size.max_len)
        self.table_SM = torch.zeros((size.slots, self.columns), dtype=torch.int32, device=device)
        self.launches = PagedPlan.of(spec.heads, spec.kv_heads, spec.head_dim, dtype, device)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        return self.k.nbytes + self.v.nbytes

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Write the blocks that a step's rows got to the tables."""
        places: list[int] = []
        blocks: list[int] = []
        for row in rows:
            first = row.slot * self.columns + row.first_block
            places += range(first, first + len(row.new_blocks))
            blocks += row.new_blocks
        if blocks:
            told = upload([places, blocks], torch.long, self.table_SM.device)
            self.table_SM.view(-1).index_copy_(0, told[0], told[1].int())

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
        factor: float = 1.0,
    ) -> Tensor:
        """Append the step's keys and values, then return its causal attention [1, T, H, D].

        With `inv_freq` queries and keys come without their positions; `factor` is on their cosines.
        """
        assert isinstance(step, PagedStep)
        where, pools = step.where, (self.k[layer], self.v[layer])
        q_THD = rope_append_pages(
            *(q_BQHD[0], k_BQGD[0], v_BQGD[0]),
            *pools,
            where.places_T,
            where.positions_T,
            inv_freq,
            factor,
        )
        out_THD = paged_attend(
            *(q_THD, *pools, step.rows_FR, self.table_SM, self.launches),
            scale=scale,
            alibi_slopes_H=alibi_slopes_H,
            chunks=step.chunks,
        )
        return out_THD[None]

    @property
    def pages(self) -> PagedDeviceKV:
        """The cache itself."""
        return self
