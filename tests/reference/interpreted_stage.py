"""A GPU's stage on a CPU, for Triton's interpreter: the arithmetic and the pools of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from llmpq.kernels.kv.paged import packed_pages_plan
from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
from llmpq.kernels.weights import dense_weight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.gpu import cuda_experts, cuda_layers
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.cache import gpu_packed_kv, gpu_paged_kv, gpu_paged_latents
from llmpq.runtime.cache.gpu_packed_kv import GpuPackedKV
from llmpq.runtime.cache.gpu_packed_latents import GpuPackedLatents
from llmpq.runtime.cache.gpu_paged_kv import GpuPagedKV
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase
from llmpq.runtime.cache.gpu_paged_latents import GpuPagedLatents
from llmpq.runtime.models.layers import DecoderLayer, PlainLayers
from llmpq.sizes.pool_size import PoolSize
from reference.fused_twins import rope_append_pages_reference

CPU = torch.device("cpu")


def take_gpu_path(patch: pytest.MonkeyPatch, *, append: bool = True, experts: bool = True) -> None:
    """Send decoder layers through the GPU's code, their weights plain as on a GPU.

    `append`: by the twin, as the interpreter takes a second for 30 tokens; `experts`: together.
    """
    torch.set_num_threads(1)
    if append:
        for module in (gpu_paged_kv, gpu_paged_latents, gpu_packed_kv):
            patch.setattr(module, "rope_append_pages", rope_append_pages_reference)
    patch.setattr(dense_weight, "pack_dense", lambda weight_NK: weight_NK)
    if experts:
        patch.setattr(PlainLayers, "sparse_mlp", lambda _, *given: cuda_experts.sparse_mlp(*given))
    patch.setattr(
        DecoderLayer,
        "forward",
        lambda layer, *given, **options: cuda_layers.decoder_layer(layer, *given, **options),
    )


def pack_quickly(patch: pytest.MonkeyPatch) -> None:
    """Attend to packed blocks by few programs of many rows: the interpreter is slow."""
    patch.setattr(PackedPlan, "chunk_rows", 128)
    patch.setattr(packed_pages_plan, "programs_per_sm", lambda *_, **__: 1)
    PackedPlan.of.__func__.cache_clear()  # type: ignore[attr-defined]


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
