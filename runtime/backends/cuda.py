"""CUDA GPUs: fused layers, captured decode steps, tokens that stay on the device."""

from __future__ import annotations

import torch

from llmpq.plan import Plan
from llmpq.runtime.backends.gpu.cuda_layers import CudaLayers
from llmpq.runtime.backends.gpu.cuda_paged import CudaPagedCompute
from llmpq.runtime.backends.gpu.cuda_stage import CudaStageCompute
from llmpq.runtime.backends.stage_compute import StageCompute
from llmpq.runtime.cache.device_pages import GpuPagedKVBase
from llmpq.runtime.cache.kv_cache import KVCache, PagedKV
from llmpq.runtime.models.stage_model import StageModel
from llmpq.sizes.pool_size import PoolSize


class CudaBackend:
    """A stage on a GPU."""

    def layers(self) -> CudaLayers:
        """Return the fused kernels."""
        return CudaLayers()

    def slot_compute(
        self,
        model: StageModel,
        kv: KVCache,
        device: torch.device,
        dtype: torch.dtype,
        *,
        plan: Plan,
        graphs: bool,
    ) -> StageCompute:
        """Return the arithmetic of a stage with KV slots; `graphs`: with captured steps."""
        return CudaStageCompute(
            model,
            kv,
            device,
            dtype,
            workload=plan.workload,
            decode_microbatch=plan.decode_microbatch,
            graphs=graphs,
        )

    def paged_compute(
        self,
        model: StageModel,
        kv: PagedKV,
        device: torch.device,
        dtype: torch.dtype,
        *,
        size: PoolSize,
        step_tokens: int,
        graphs: bool,
    ) -> CudaPagedCompute:
        """Return the arithmetic with captured steps, unless `graphs` says no."""
        assert isinstance(kv, GpuPagedKVBase), "a pool on a GPU is made by make_paged_kv"
        return CudaPagedCompute(
            model, kv, device, dtype, size=size, step_tokens=step_tokens, graphs=graphs
        )
