"""Which paged cache a KV precision means, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmpq.kv_format import kv_pool_bytes
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.cache.paged_kv import PagedPlainKV
from llmpq.runtime.cache.paged_low_bit_kv import PagedLowBitKV


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """The pool of every stage: as many blocks on each."""

    num_blocks: int
    slots: int
    """Requests at once."""
    max_len: int
    """Tokens of the longest request."""
    prefix_cache: bool = True

    def nbytes(self, spec: ModelSpec, kv: KVPrecision, *, num_layers: int, dtype_bytes: int) -> int:
        """Return the bytes of a stage's pool; `make_paged_kv` allocates exactly those."""
        return num_layers * kv_pool_bytes(
            kv,
            num_blocks=self.num_blocks,
            slots=self.slots,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            dtype_bytes=dtype_bytes,
            prefix_cache=self.prefix_cache,
        )


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
