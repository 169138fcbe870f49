"""The pool of packed latents (MLA) of a stage on a GPU: 8, 4 or 2 bits (gpu_packed_kv.py).

A latent is key and value at once; both are kept, each rounded on a grid of its own.

Legend: T tokens of a step, H query heads, D channels of a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.paged.packed_latent_pages import append_packed_latents, attend_packed_latents
from llmpq.kernels.kv.paged.packed_pages import PackedRows
from llmpq.kernels.kv.paged.paged_latents import LatentPlan
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.gpu_packed_kv import GpuPackedKV
from llmpq.runtime.cache.kv_cache import AttentionInputs
from llmpq.runtime.steps.paged_step import PagedStep


class GpuPackedLatents(GpuPackedKV):
    """Packed latents of one stage in blocks."""

    def _format(self, spec: ModelSpec, kv: KVPrecision) -> KVFormat:
        return KVFormat(precision=kv, head_dim=spec.head_dim)

    def _planned(self, spec: ModelSpec, fmt: KVFormat, dtype: torch.dtype) -> LatentPlan:
        assert spec.latent is not None
        self._fmt = fmt
        rank = spec.latent.kv_rank
        return LatentPlan.of(spec.heads, spec.head_dim, rank, dtype, self._device)

    def _append(self, layer: int, k_TGD: Tensor, v_TGD: Tensor, rows: PackedRows) -> None:
        append_packed_latents(k_TGD[:, 0], self._layers[layer], rows, self._fmt)

    def attend(self, layer: int, inputs: AttentionInputs, step: PagedStep) -> Tensor:
        """Append the step's latents (their positions are in them), return sums [1, T, H, rank]."""
        assert inputs.rotation is None and inputs.index is None and inputs.scoring.rule.is_plain
        out_THV = attend_packed_latents(
            *(inputs.q_BQHD[0], inputs.k_BQGD[0, :, 0], self._layers[layer]),
            *(self._rows(step), self.launches, self._fmt),
            scale=inputs.scoring.scale,
        )
        return out_THV[None]
