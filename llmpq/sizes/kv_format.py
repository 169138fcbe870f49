"""Bytes of a KV cache, per layer, and where the line between packed and 16-bit keys lies.

A request's tokens are packed in blocks of `BLOCK_TOKENS`; the newest stay in 16 bits in a ring.
The query at position p sees the keys below `packed_end(p)` packed and the others in 16 bits: a
function of p alone, so a step of several tokens sees what as many steps of one token would.

    0 ........... packed_end(p) ........................... p
    |   packed    |   16 bits: HOLDBACK .. BLOCK + HOLDBACK - 1 older tokens, and p itself

The last `HOLDBACK_TOKENS` tokens are never packed: drafted tokens can be overwritten, a block is
packed from verified tokens only, as long as a step has at most `HOLDBACK_TOKENS` tokens.

Standard library only, so that kernels can import it on any machine.
"""

from __future__ import annotations

from llmpq.precision import KVPrecision

BLOCK_TOKENS = 128
"""Tokens packed at once; key scales cover a block or an even part of it."""

HOLDBACK_TOKENS = 16
"""The newest tokens that are never packed: the longest draft plus one that a step may verify."""

TAIL_TOKENS = HOLDBACK_TOKENS + 1
"""Newest tokens that stay in 16 bits when a block is packed. A request that finds the block in the
prefix cache starts with them: its next query is the first after the one that packed the block."""

RING_TOKENS = BLOCK_TOKENS + 2 * HOLDBACK_TOKENS
"""16-bit tokens kept per request: what any query of a step still sees, and room for that step."""

HEAD_DIM_PADDING = 32
"""Packed heads are padded with zero channels up to a multiple of this (kv_block.py)."""

PARAM_BYTES = 4
"""One 16-bit scale and one 16-bit zero."""


def packed_end(position: int) -> int:
    """Return how many of the first tokens the query at `position` sees packed."""
    return max(0, (position - HOLDBACK_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS


def packed_blocks(max_len: int) -> int:
    """Return how many blocks of a request of `max_len` tokens are ever packed."""
    return packed_end(max_len - 1) // BLOCK_TOKENS


def pool_blocks(kv: KVPrecision, tokens: int) -> int:
    """Return how many blocks of a pool a request of so many cached tokens holds.

    kv16: every token is in a block. Else the newest tokens are in the request's ring.
    """
    if kv is KVPrecision.KV16:
        return -(-tokens // BLOCK_TOKENS)
    return packed_blocks(tokens)


def first_seen_block(position: int, window: int) -> int:
    """Return the first block with a key that the query at a position sees through a window."""
    return max(0, position - window + 1) // BLOCK_TOKENS


def spanned_blocks(window: int, num_new: int) -> int:
    """Return over how many blocks at most a window and the tokens it moves on by reach."""
    return (window - 1 + num_new + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1


def padded_head_dim(head_dim: int) -> int:
    """Round a head's channels up to `HEAD_DIM_PADDING`."""
    return -(-head_dim // HEAD_DIM_PADDING) * HEAD_DIM_PADDING


def block_bytes(kv: KVPrecision, *, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Return the bytes of one packed block of one layer: keys with a scale for every channel, or
    in 16 bits as they are, values with a scale for every token."""
    channels = padded_head_dim(head_dim)
    keys = channels * (BLOCK_TOKENS * kv.key_bits // 8 + PARAM_BYTES)
    if kv.key_bits == 16:
        keys = channels * BLOCK_TOKENS * dtype_bytes
    values = BLOCK_TOKENS * (channels * kv.value_bits // 8 + PARAM_BYTES)
    return kv_heads * (keys + values)


def kv_cache_bytes(
    kv: KVPrecision,
    *,
    slots: int,
    max_len: int,
    kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
    vectors: int = 2,
) -> int:
    """Return the bytes of one layer's keys and values for `slots` requests of `max_len` tokens.

    kv16:  slots * max_len * vectors * kv_heads * head_dim * dtype_bytes
    else:  slots * (packed_blocks(max_len) * block_bytes + the same with RING_TOKENS for max_len)

    `vectors`: 2, keys and values; 1 where they are one (`ModelSpec.kv_vectors`), in 16 bits only.
    """
    token = 2 * kv_heads * head_dim * dtype_bytes
    if kv is KVPrecision.KV16:
        return slots * max_len * token // 2 * vectors
    block = block_bytes(kv, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    return slots * (packed_blocks(max_len) * block + RING_TOKENS * token)


def kv_pool_bytes(
    kv: KVPrecision,
    *,
    num_blocks: int,
    slots: int,
    kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
    prefix_cache: bool,
    vectors: int = 2,
) -> int:
    """Return the bytes of one layer's pool of blocks, for `slots` requests at once.

    kv16:  num_blocks * BLOCK_TOKENS * token / 2 * vectors
    else:  num_blocks * (block_bytes + TAIL_TOKENS * token, the latter for found prefixes only)
           + slots * RING_TOKENS * token
    where  token = 2 * kv_heads * head_dim * dtype_bytes
    """
    token = 2 * kv_heads * head_dim * dtype_bytes
    if kv is KVPrecision.KV16:
        return num_blocks * BLOCK_TOKENS * token // 2 * vectors
    block = block_bytes(kv, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    behind = TAIL_TOKENS * token if prefix_cache else 0
    return num_blocks * (block + behind) + slots * RING_TOKENS * token
