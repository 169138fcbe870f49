"""Append a step's tokens to the low-bit copy of a 16-bit cache: all layers in one launch.

    16-bit cache [L, S, G, T, D] --start .. start + count--> ring [S, G, RING, D] of each layer
                                                             and the block it completes, packed

A program: one layer, head and request. It does what kv_append.append_step does with a layer's new
tokens, but reads them where the step has left them. Drafts alone read the copy, so it need not be
up to date before the step's last layer: launched in every layer it held up the product behind the
attention. Bytes: 4 * D read and written per token, head and layer. Its twin is the append of each
layer on its own (kv_reference.append).

L layers, S slots, B requests, G key/value heads, T slot length, D head_dim.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.pack import pack_keys, pack_values
from llmpq.kernels.kv.storage import DeviceRows, KVLayer
from llmpq.kernels.overlap import overlaps
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS

BLOCK = tl.constexpr(BLOCK_TOKENS)
HOLDBACK = tl.constexpr(HOLDBACK_TOKENS)
RING = tl.constexpr(RING_TOKENS)
PARTS = tl.constexpr(6)
"""Tensors of a layer's copy: rings, words and parameters, of keys and of values."""


@triton.jit
def _part(addresses, layer, part: tl.constexpr, KIND: tl.constexpr):
    """The start of one tensor of a layer's copy."""
    start = tl.load(addresses + layer * PARTS + part).to(tl.pointer_type(KIND))
    return tl.multiple_of(start, 16)


@triton.jit(do_not_specialize=["table_width"])
def catch_up_kernel(
    k_cache, v_cache, addresses, table, slots, starts, counts, table_width,
    layer_stride, slot_stride, head_stride,
    Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Append up to HOLDBACK tokens of one request, head and layer."""
    head, b = tl.program_id(0), tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    if PDL:  # in this order: who comes next may read what is older than this kernel
        gdc_wait()
        gdc_launch_dependents()
    start = tl.load(starts + b)
    count = tl.load(counts + b)
    slot = tl.load(slots + b).to(tl.int64)
    ring_at = (slot * G + head) * (RING * D)
    k_ring = _part(addresses, layer, 0, k_cache.dtype.element_ty) + ring_at
    v_ring = _part(addresses, layer, 1, k_cache.dtype.element_ty) + ring_at
    new = layer * layer_stride + slot * slot_stride + head * head_stride
    d = tl.arange(0, D)
    for i in range(Q):
        live = d * 0 + i < count
        at = new + (start + i).to(tl.int64) * D + d
        to = (start + i) % RING * D + d
        tl.store(k_ring + to, tl.load(k_cache + at, mask=live), mask=live)
        tl.store(v_ring + to, tl.load(v_cache + at, mask=live), mask=live)
    # the block n whose last token lies HOLDBACK behind one of the new tokens; all in the ring
    done = (start + count - 1 - HOLDBACK) // BLOCK
    if (count > 0) & (done > 0) & (done * BLOCK + HOLDBACK >= start):
        page = tl.load(table + slot * table_width + done - 1).to(tl.int64) * G + head
        pack_keys(
            k_cache, k_ring, _part(addresses, layer, 2, tl.int32),
            _part(addresses, layer, 3, tl.float16), page, done - 1, start, D, D, BITS, KEY_GROUP,
            False,
        )  # fmt: skip
        pack_values(
            v_cache, v_ring, _part(addresses, layer, 4, tl.int32),
            _part(addresses, layer, 5, tl.float16), page, done - 1, start, D, D, BITS, False,
        )  # fmt: skip


def addresses(layers: Sequence[KVLayer], device: torch.device) -> Tensor:
    """Return where the tensors of each layer's copy start, int64 [L, PARTS]."""
    rows = [
        (c.k_ring_SGRD, c.v_ring_SGRD, c.k_words_PGW, c.k_params_PG, c.v_words_PGW, c.v_params_PG)
        for c in layers
    ]
    return torch.tensor([[part.data_ptr() for part in row] for row in rows], device=device)


def catch_up(
    fmt: KVFormat,
    k_LSGTD: Tensor,
    v_LSGTD: Tensor,
    addresses_LP: Tensor,
    table_SN: Tensor,
    rows: DeviceRows,
    *,
    q_len: int,
) -> None:
    """Append the tokens that a step of up to HOLDBACK tokens has left in the 16-bit cache."""
    layers, _, groups, _, dim = k_LSGTD.shape
    if k_LSGTD.stride() != v_LSGTD.stride() or k_LSGTD.stride()[3:] != (dim, 1):
        raise ValueError(f"caches must be equal and dense, got strides {k_LSGTD.stride()}")
    if q_len > HOLDBACK_TOKENS:
        raise ValueError(f"at most {HOLDBACK_TOKENS} tokens at once, got {q_len}")
    pdl = overlaps(k_LSGTD.device)
    catch_up_kernel[(groups, len(rows.slots), layers)](
        k_LSGTD, v_LSGTD, addresses_LP, table_SN, rows.slots, rows.starts, rows.counts,
        table_SN.shape[1], *k_LSGTD.stride()[:3],
        Q=q_len, G=groups, D=dim, BITS=fmt.bits, KEY_GROUP=fmt.key_group or 0, PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
