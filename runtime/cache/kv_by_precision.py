"""Which cache a KV precision means: one place for the runtime, the profiler and perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_by_shape import KVByShape, by_shape
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.cache.plain_kv import PlainKVCache
from llmpq.sizes.state_size import layers_with_kv


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
    first_layer: int = 0,
) -> KVCache:
    """Allocate the cache of a stage of `num_layers` layers at the given precision.

    `exact_prompt`: a whole prompt attends to itself in 16 bits, whatever the cache keeps of it.
    `first_layer`: the number of the stage's first layer in the model.
    """
    layers: Sequence[int] = range(first_layer, first_layer + num_layers)
    if spec.differs_in_attention and spec.recurrent is None:
        layers = layers_with_kv(spec, layers)
    make = partial(
        _make, kv=kv, slots=slots, max_len=max_len, dtype=dtype, device=device, exact=exact_prompt
    )
    found = by_shape(spec, layers, make)
    alone = len({id(part) for part, _ in found}) == 1
    return found[0][0] if alone else KVByShape(found) if found else make(spec, layers)


def _make(
    spec: ModelSpec,
    layers: Sequence[int],
    *,
    kv: KVPrecision,
    slots: int,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device | str,
    exact: bool,
) -> KVCache:
    """Allocate a cache of layers whose heads are alike."""
    num_layers = len(layers)
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
        exact_prompt=exact,
    )
