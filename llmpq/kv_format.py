"""Bytes of a KV cache, per layer, for each KV precision.

Standard library only, so that kernels can import it on any machine.
"""

from __future__ import annotations

from llmpq.precision import KVPrecision

GROUP_TOKENS = 128
"""Tokens that share one key scale and zero, and the size of the 16-bit residual block."""


def kv_cache_bytes(
    kv: KVPrecision, *, slots: int, max_len: int, kv_heads: int, head_dim: int, dtype_bytes: int
) -> int:
    """Return the bytes of one layer's keys and values for `slots` requests of `max_len` tokens."""
    elements = 2 * kv_heads * head_dim
    if kv is KVPrecision.KV16:
        return slots * max_len * elements * dtype_bytes
    pages = -(-max_len // GROUP_TOKENS)
    packed = pages * GROUP_TOKENS * elements * kv.bits // 8
    key_params = pages * kv_heads * head_dim * 4
    value_params = pages * GROUP_TOKENS * kv_heads * 4
    residual = GROUP_TOKENS * elements * dtype_bytes
    return slots * (packed + key_params + value_params + residual)
