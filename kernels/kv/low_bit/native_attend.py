"""Attention of decoding rows over the blocks of a low-bit KV cache on the CPU, read in place.

Our own code (kernels/native/packed_attend.h) where it was compiled and takes the head; its twin is
kernels/kv/reference.py, which serves elsewhere. Legend: B rows, H query heads, D head_dim, S slots.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.reference import Scoring
from llmpq.kernels.kv.storage import KVLayer
from llmpq.kernels.native.library import DTYPE_CODES, address, call, library
from llmpq.sizes.kv_format import HOLDBACK_TOKENS, RING_TOKENS

_MOST_CHANNELS = 256
"""What a task has room for."""


def native_takes(fmt: KVFormat, layer: KVLayer, q: Tensor) -> bool:
    """Whether our own code computes this: a row of codes of keys is two words, or runs of four."""
    words = 4 if fmt.plain_keys else fmt.channels * fmt.key_bits // 64
    return (
        q.device.type == "cpu"
        and q.dtype == layer.k_ring_SGRD.dtype
        and q.dtype in DTYPE_CODES
        and (words == 2 or (words > 0 and words % 4 == 0))
        and fmt.channels <= _MOST_CHANNELS
        and library() is not None
    )


def attend_packed(
    fmt: KVFormat,
    layer: KVLayer,
    table_SN: Tensor,
    q_BHD: Tensor,
    *,
    slots_B: Tensor,
    last_B: Tensor,
    scoring: Scoring,
) -> Tensor:
    """Return [B, H, D]: each row's query over its tokens up to position `last_B` (-1: zeros).

    The query's own key and value are in the ring, and completed blocks packed.
    """
    rule = scoring.rule
    q_BHD = q_BHD.contiguous()
    out_BHD = torch.empty_like(q_BHD)
    (batch, heads, dim), ring = q_BHD.shape, layer.k_ring_SGRD
    pools = [layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG]
    pools += [ring, layer.v_ring_SGRD]
    addresses = (ctypes.c_void_p * len(pools))(*map(address, pools))
    sizes = [batch, heads, ring.shape[1], dim, fmt.channels, RING_TOKENS]
    sizes += [table_SN.shape[1], HOLDBACK_TOKENS, rule.window]
    packed_sizes = (ctypes.c_int64 * len(sizes))(*sizes)
    factors = (ctypes.c_float * 2)(scoring.scale, rule.cap)
    table_SN, slots_B = table_SN.contiguous(), slots_B.long().contiguous()
    last_B = last_B.long().contiguous()
    slopes, sinks = (
        None if per_head is None else per_head.float().contiguous()
        for per_head in (scoring.alibi_slopes_H, rule.sinks_H)
    )
    call(
        "llmpq_attend_packed",
        *(address(q_BHD), address(out_BHD), ctypes.addressof(addresses), address(table_SN)),
        *(address(slots_B), address(last_B), ctypes.addressof(packed_sizes)),
        *(ctypes.addressof(factors), address(slopes), address(sinks)),
        *(fmt.key_bits, fmt.value_bits, DTYPE_CODES[q_BHD.dtype], torch.get_num_threads()),
    )
    return out_BHD
