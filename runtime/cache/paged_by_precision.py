"""Which pool a KV precision means."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.cpu_packed_kv import CpuPackedKV
from llmpq.runtime.cache.cpu_paged_kv import CpuPagedKV
from llmpq.runtime.cache.forwarding_kv import KVByShape, by_shape
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.cache.recurrent_states import with_states
from llmpq.sizes.pool_size import PoolSize
from llmpq.sizes.state_size import layers_with_kv, layers_with_state


def make_paged_kv(
    spec: ModelSpec,
    kv: KVPrecision,
    size: PoolSize,
    *,
    layers: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> PagedKV:
    """Allocate a stage's pool, and states of its recurrent layers; `layers`: their numbers.

    On a GPU llmpq/plans/capabilities.py has refused what its kernels lack.
    """
    own = layers_with_kv(spec, layers)

    def make(alike: ModelSpec, layers: Sequence[int]) -> PagedKV:
        return _make_pool(alike, kv, size, layers=layers, dtype=dtype, device=device)

    found = by_shape(spec, own, make)
    alone = len({id(part) for part, _ in found}) == 1
    pool = found[0][0] if alone else _by_shape(found) if found else make(spec, own)
    if size.is_copy:
        return pool
    num_states = len(layers_with_state(spec, layers))
    return with_states(
        pool,
        spec,
        num_layers=num_states,
        slots=size.slots,
        snapshots=size.snapshots,
        dtype=dtype,
        device=device,
    )


def _is_gpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def _by_shape(found: Sequence[tuple[PagedKV, int]]) -> PagedKV:
    """Return pools of layers of unlike heads as one."""
    if found[0][0].pages is None:
        return KVByShape(found)
    # Triton is not imported where there is no GPU.
    from llmpq.runtime.cache.gpu_forwarding_kv import GpuKVByShape

    return GpuKVByShape(found)


def _make_pool(
    spec: ModelSpec,
    kv: KVPrecision,
    size: PoolSize,
    *,
    layers: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> PagedKV:
    """Allocate the blocks of the layers that keep keys and values."""
    if _is_gpu(device):
        # Triton is not imported where there is no GPU.
        from llmpq.runtime.cache.gpu_packed_kv import GpuPackedKV
        from llmpq.runtime.cache.gpu_packed_latents import GpuPackedLatents
        from llmpq.runtime.cache.gpu_paged_kv import GpuPagedKV
        from llmpq.runtime.cache.gpu_paged_latents import GpuPagedLatents

        if kv is KVPrecision.KV16 and spec.latent is not None:
            return GpuPagedLatents(spec, layers=layers, size=size, dtype=dtype, device=device)
        if kv is KVPrecision.KV16:
            return GpuPagedKV(spec, layers=layers, size=size, dtype=dtype, device=device)
        if spec.latent is not None:
            return GpuPackedLatents(spec, kv, layers=layers, size=size, dtype=dtype, device=device)
        return GpuPackedKV(spec, kv, layers=layers, size=size, dtype=dtype, device=device)
    if kv is KVPrecision.KV16:
        return CpuPagedKV(spec, layers=layers, size=size, dtype=dtype, device=device)
    return CpuPackedKV(spec, kv, layers=layers, size=size, dtype=dtype, device=device)
