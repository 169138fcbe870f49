"""A GPU's stage on a CPU, for Triton's interpreter: the arithmetic and the pools of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.cache.gpu_packed_kv import GpuPackedKV
from llmpq.runtime.cache.gpu_packed_latents import GpuPackedLatents
from llmpq.runtime.cache.gpu_paged_kv import GpuPagedKV
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase
from llmpq.runtime.cache.gpu_paged_latents import GpuPagedLatents
from llmpq.sizes.pool_size import PoolSize

CPU = torch.device("cpu")


def gpu_pool(
    spec: ModelSpec,
    kv: KVPrecision,
    size: PoolSize,
    *,
    layers: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = CPU,
) -> GpuPagedKVBase:
    """Return the pool that a GPU has, on a CPU."""
    given = {"layers": layers, "size": size, "dtype": dtype, "device": device}
    if kv is KVPrecision.KV16:
        return (GpuPagedKV if spec.latent is None else GpuPagedLatents)(spec, **given)
    return (GpuPackedKV if spec.latent is None else GpuPackedLatents)(spec, kv, **given)


def gpu_stage(
    base: StageRunner,
    size: PoolSize,
    *,
    step_tokens: int = 64,
    first: int = 0,
    kv: KVPrecision = KVPrecision.KV16,
    make: type[CudaStageRunner] = CudaStageRunner,
) -> CudaStageRunner:
    """Return a stage's arithmetic as on a GPU, of a stage that was built for the CPU."""
    model = base.model
    layers = range(first, first + len(model.layers))
    pool = gpu_pool(model.spec, kv, size, layers=layers)
    return make(model, pool, CPU, torch.float32, size=size, step_tokens=step_tokens)
