"""Which cache a KV precision means: one place for the runtime, the profiler and perplexity."""

from __future__ import annotations

import torch

from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.cache.plain_kv import PlainKVCache


def make_kv_cache(
    spec: ModelSpec,
    kv: KVPrecision,
    *,
    num_layers: int,
    slots: int,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    exact_prompt: bool = True,
) -> KVCache:
    """Allocate a stage's cache at the given precision.

    `exact_prompt`: a whole prompt attends to itself in 16 bits, whatever the cache keeps of it.
    """
    if kv is KVPrecision.KV16:
        return PlainKVCache(
            spec, num_layers=num_layers, slots=slots, max_len=max_len, dtype=dtype, device=device
        )
    return LowBitKV(
        spec,
        kv,
        num_layers=num_layers,
        slots=slots,
        max_len=max_len,
        dtype=dtype,
        device=device,
        exact_prompt=exact_prompt,
    )
