"""CUDA GPUs: fused layers, captured steps, tokens that stay on the device."""

from __future__ import annotations

import torch

from llmpq.runtime.backends.gpu.cuda_layers import CudaLayers
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.models.stage_model import StageModel
from llmpq.sizes.pool_size import PoolSize


class CudaBackend:
    """A stage on a GPU."""

    def layers(self) -> CudaLayers:
        """Return the fused kernels."""
        return CudaLayers()

    def stage_runner(
        self,
        model: StageModel,
        kv: PagedKV,
        device: torch.device,
        dtype: torch.dtype,
        *,
        size: PoolSize,
        step_tokens: int,
        graphs: bool,
    ) -> CudaStageRunner:
        """Return the arithmetic with captured steps, unless `graphs` says no."""
        assert isinstance(kv, GpuPagedKVBase), "a pool on a GPU is made by make_paged_kv"
        return CudaStageRunner(
            model, kv, device, dtype, size=size, step_tokens=step_tokens, graphs=graphs
        )
