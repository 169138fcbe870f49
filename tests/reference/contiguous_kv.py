"""KV caches whose requests' tokens lie in one piece: what pools of blocks are tested against.

Rows of their steps are right padded. No kernels, no blocks, one layer after the other.

Legend: S requests, T max_len, B rows, Q new tokens, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.attention import attend_padded
from llmpq.runtime.cache.kv_cache import AttentionInputs, KVCache
from llmpq.runtime.steps.step import Step
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
    first_layer: int = 0,
) -> KVCache:
    """Return the cache of a stage's layers that keep keys and values."""
    own = layers_with_kv(spec, range(first_layer, first_layer + num_layers))
    shapes = [spec.kv_shape(layer) for layer in own]
    if kv is KVPrecision.KV16:
        return ContiguousKV(shapes, spec.kv_vectors, slots, max_len, dtype, device)
    return PackedContiguousKV(shapes, kv, slots, max_len, dtype, device)


class ContiguousKV(KVCache):
    """Unquantised keys and values, [S, G, T, D] a layer."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        vectors: int,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """`shapes`: heads and channels of each layer; `vectors`: 1 where keys are values (MLA)."""
        sizes = [(slots, heads, max_len, dim) for heads, dim in shapes]
        self.k = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
        self.v = self.k if vectors == 1 else [torch.zeros_like(k) for k in self.k]
        self.max_len = max_len

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.k if self.v is self.k else [*self.k, *self.v]))

    def attend(self, layer: int, inputs: AttentionInputs, step: Step) -> Tensor:
        assert step.max_end <= self.max_len, "a request outgrows the cache"
        rows = zip(
            step.slots_B.tolist(), step.start_B.tolist(), step.num_new_B.tolist(), strict=True
        )
        for row, (slot, start, count) in enumerate(rows):
            end = start + count
            self.k[layer][slot, :, start:end] = inputs.k_BQGD[row, :count].transpose(0, 1)
            if self.v is not self.k:
                self.v[layer][slot, :, start:end] = inputs.v_BQGD[row, :count].transpose(0, 1)
        k, v = (x[layer][step.slots_B, :, : step.max_end].transpose(1, 2) for x in (self.k, self.v))
        return attend_padded(inputs.q_BQHD, k, v, step, inputs.scoring)


class PackedContiguousKV(KVCache):
    """8, 4 or 2-bit keys and values, the newest tokens in 16 bits."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        kv: KVPrecision,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = [
            QuantizedKVCache(
                KVFormat(precision=kv, head_dim=dim),
                num_layers=1,
                kv_heads=heads,
                slots=slots,
                max_len=max_len,
                dtype=dtype,
                device=device,
            )
            for heads, dim in shapes
        ]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def attend(self, layer: int, inputs: AttentionInputs, step: Step) -> Tensor:
        cache = self.layers[layer]
        plan = cache.plan(
            *(step.slots_B, step.start_B, step.num_new_B), q_len=step.q_len, max_end=step.max_end
        )
        heads = (inputs.q_BQHD, inputs.k_BQGD, inputs.v_BQGD)
        return cache.run(plan, 0, *heads, inputs.scoring)

    def keep_for_readers(self, layer: int, step: Step) -> None:
        rings = self.layers[layer].layers[0]
        kept = rings.k_ring_SGRD[step.slots_B], rings.v_ring_SGRD[step.slots_B]
        step.memo[f"rings {layer}"] = kept

    def attend_again(self, layer: int, inputs: AttentionInputs, step: Step) -> Tensor:
        rings, kept = self.layers[layer].layers[0], step.memo[f"rings {layer}"]
        rings.k_ring_SGRD[step.slots_B], rings.v_ring_SGRD[step.slots_B] = kept
        return self.attend(layer, inputs, step)
