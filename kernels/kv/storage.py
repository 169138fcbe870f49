"""The tensors of one layer's low-bit KV cache, and which bytes a request owns.

Packed blocks live in a pool of pages, one block of all key-value heads each; `table_SN[s, n]` names
the page of slot s's n-th block. The contiguous layout is the table 0, 1, 2, ...; a paged cache may
point anywhere. The newest tokens of a slot live in its 16-bit ring: position p at index p % RING.

S: slots.  N: blocks of a slot.  P: pages.  G: key-value heads.  R: RING_TOKENS.  D: head_dim.
W: 32-bit words of a block of keys, or of values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.native import huge_pages
from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS


@dataclass(frozen=True, kw_only=True)
class KVLayer:
    """One layer's cache."""

    k_words_PGW: Tensor
    """int32, or keys as they are (`KVFormat.plain_keys`)."""
    k_params_PG: Tensor
    """fp16 [P, G, *format.key_param_shape]."""
    v_words_PGW: Tensor
    v_params_PG: Tensor
    """fp16 [P, G, 2, BLOCK_TOKENS]."""
    k_ring_SGRD: Tensor
    v_ring_SGRD: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))


def allocate_layer(
    fmt: KVFormat,
    *,
    pages: int,
    slots: int,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KVLayer:
    """Allocate one layer's cache, zeroed."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return huge_pages.zeros(shape, dtype, device)

    head = (pages, kv_heads)
    ring = (slots, kv_heads, RING_TOKENS, fmt.head_dim)
    return KVLayer(
        k_words_PGW=zeros(*head, fmt.key_words, dtype=dtype if fmt.plain_keys else torch.int32),
        k_params_PG=zeros(*head, *fmt.key_param_shape, dtype=torch.float16),
        v_words_PGW=zeros(*head, fmt.value_words, dtype=torch.int32),
        v_params_PG=zeros(*head, 2, BLOCK_TOKENS, dtype=torch.float16),
        k_ring_SGRD=zeros(*ring, dtype=dtype),
        v_ring_SGRD=zeros(*ring, dtype=dtype),
    )


def contiguous_table(slots: int, blocks: int, device: torch.device | str) -> Tensor:
    """Return the table in which slot s owns pages s*blocks .. (s+1)*blocks - 1."""
    pages = torch.arange(slots * blocks, dtype=torch.int32, device=device)
    return pages.reshape(slots, blocks)
