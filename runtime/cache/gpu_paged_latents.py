"""The pool of latents (MLA) of a stage on a GPU, unquantised, its block table on the device.

    pool [layers, blocks, 1, 128, D]     a token's one vector for all heads, its values as well;
                                         behind it an indexer's key, where one chooses

Legend: T tokens of a step, H query heads, D channels of a latent, S slots, M blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.kernels.fused.rope_append import rope_append_pages
from llmpq.kernels.kv.paged.chosen_latents import attend_chosen_latents, token_rows
from llmpq.kernels.kv.paged.paged_latents import LatentPlan, attend_latent_pages
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase, tokens_of, write_blocks
from llmpq.runtime.cache.host_blocks import HostBlocks
from llmpq.runtime.cache.kv_cache import AttentionInputs
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.paged_step import PagedStep
from llmpq.sizes.kv_format import BLOCK_TOKENS, pool_blocks
from llmpq.sizes.pool_size import PoolSize


class GpuPagedLatents(GpuPagedKVBase):
    """Latents of one stage in blocks."""

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
        assert spec.latent is not None and not size.window
        device = torch.device(device)
        self.columns = pool_blocks(KVPrecision.KV16, size.max_len)
        shape = (len(layers), size.num_blocks, 1, BLOCK_TOKENS, spec.head_dim)
        self._pool = torch.zeros(shape, dtype=dtype, device=device)
        self._on_host = HostBlocks((self._pool,))
        self._table_SM = torch.zeros((size.slots, self.columns), dtype=torch.int32, device=device)
        self.launches = LatentPlan.of(
            spec.heads,
            spec.latent.dim,
            spec.latent.kv_rank,
            dtype,
            device,
            index_dim=spec.head_dim - spec.latent.dim,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self._pool.nbytes

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Write the blocks that a step's rows got to the table; copy what hosts keep."""
        self._on_host.take_rows(rows)
        write_blocks(self._table_SM, [(row.slot, row.first_block, row.new_blocks) for row in rows])

    def stored_tokens(self, layer: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, N, G, D]; of blocks that left a window whatever is there."""
        pool = self._pool[layer]
        k_NGD = tokens_of(pool, self._table_SM[slot], count)
        return k_NGD[None], k_NGD[None]

    def attend(self, layer: int, inputs: AttentionInputs, step: PagedStep) -> Tensor:
        """Append the step's entries (their positions are in them), return sums [1, T, H, rank]."""
        assert inputs.rotation is None and inputs.scoring.rule.is_plain
        pool, new_TGD = self._pool[layer], inputs.k_BQGD[0].contiguous()
        at = (step.where.places_T, step.where.positions_T, None)
        rope_append_pages(new_TGD, new_TGD, new_TGD, pool, pool, *at)
        q_THD, scale = inputs.q_BQHD[0], inputs.scoring.scale
        if inputs.index is not None:
            rows_4T = step.once("token rows", lambda: token_rows(step.where))
            return attend_chosen_latents(
                *(q_THD, inputs.index, pool, rows_4T, self._table_SM, self.launches),
                scale=scale,
                longest=step.max_end,
            )[None]
        out_THV = attend_latent_pages(
            *(q_THD, pool, step.rows_FR, self._table_SM, self.launches),
            scale=scale,
            chunks=step.chunks,
        )
        return out_THV[None]
