"""Which paged cache a KV precision means."""

from __future__ import annotations

import torch

from llmpq.model_spec import ModelSpec
from llmpq.pool_size import PoolSize
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.cache.paged_kv import PagedPlainKV
from llmpq.runtime.cache.paged_low_bit_kv import PagedLowBitKV


def make_paged_kv(
    spec: ModelSpec,
    kv: KVPrecision,
    size: PoolSize,
    *,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> PagedKV:
    """Allocate a stage's pool."""
    if kv is KVPrecision.KV16:
        return PagedPlainKV(
            spec,
            num_layers=num_layers,
            slots=size.slots,
            num_blocks=size.num_blocks,
            dtype=dtype,
            device=device,
        )
    return PagedLowBitKV(
        spec,
        kv,
        num_layers=num_layers,
        slots=size.slots,
        num_blocks=size.num_blocks,
        max_len=size.max_len,
        prefix_cache=size.prefix_cache,
        dtype=dtype,
        device=device,
    )
