"""What a GPU holds of programs that attend to packed blocks: stages, shared memory, residents."""

from __future__ import annotations

from functools import lru_cache

import torch

from llmpq.precision import KVPrecision

REGISTER_LIMIT = 12
"""One-warp programs an SM has registers for: 65536 / (156 * 32), rounded down to what fits."""

SHARED_PER_SM = 228 * 1024
"""Shared memory of a Hopper multiprocessor, of which every program takes 1 KiB more: for plans that
are made where there is no GPU to ask."""

LEAST_SHARED = 101_376
"""Of a program at most, on the smallest listed GPU: where the driver does not say."""

AHEAD = 2
"""Tiles a program asks the L2 for while the kernel in front ends, if all programs start at once:
those of a later wave would ask for what they load in the next instant (H200: 5 to 10 % slower)."""


@lru_cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of shared memory of a program at most, and of a multiprocessor."""
    if device.type != "cuda":
        return SHARED_PER_SM - 1024, SHARED_PER_SM
    p = torch.cuda.get_device_properties(device)
    block = int(getattr(p, "shared_memory_per_block_optin", LEAST_SHARED))
    return block, int(getattr(p, "shared_memory_per_multiprocessor", block + 1024))


LOOP_SHAPE = {16: (1, 2), 8: (1, 3), 4: (1, 3), 2: (2, 3)}
"""Tiles a step and stages, by bits of keys."""


def programs_per_sm(
    kv: KVPrecision,
    head_dim: int,
    item: int,
    columns: int,
    tiles: int,
    stages: int,
    *,
    shared: int = SHARED_PER_SM,
) -> int:
    """Return the one-warp programs that are resident on an SM with `shared` bytes of memory.

    `item`: bytes of an element of keys that stand as they are.
    """
    keys = 64 * head_dim * (item if kv.key_bits == 16 else kv.key_bits / 8)
    buffer = tiles * int(keys + 64 * head_dim * kv.value_bits / 8 + 256) + 4 * head_dim
    by_shared = shared // (max(1, stages - 1) * buffer + 1024)
    return max(1, min(REGISTER_LIMIT if columns == 8 else 8, by_shared))
