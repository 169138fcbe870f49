"""Tiles of keys and values that programs of attention take: how many at once, and asked for early.

D head_dim.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv.low_bit.register_operands import prefetch

PROGRAMS_PER_SM = 2
MAX_SPLITS = 64
MAX_STAGES = 6
BESIDE = 8192
"""Bytes of shared memory that a program takes beside its tiles, at most."""
AHEAD = 2
"""Tiles a program asks the L2 for while the kernel in front ends."""
LOG2_E = 1.4426950408889634


@triton.jit
def ask_tiles(k_at, v_at, first, end, D: tl.constexpr, TOKENS: tl.constexpr):
    """Ask the L2 for keys and values of TOKENS tokens from `first` on, 64 threads for either."""
    item: tl.constexpr = k_at.dtype.element_ty.primitive_bitwidth // 8
    PIECE: tl.constexpr = TOKENS * D * item // 64
    thread = tl.arange(0, 128)
    at = thread % 64 * PIECE
    size = tl.minimum(tl.maximum((end - first) * (D * item) - at, 0), PIECE)
    base = tl.where(thread < 64, k_at.to(tl.int64), v_at.to(tl.int64))
    prefetch(base + first.to(tl.int64) * (D * item) + at, size)


def choose_splits(programs: int, tokens: int, tile: int, sms: int) -> int:
    """Return the parts a request is split into: as many programs as run at once, no empty parts."""
    return max(1, min(sms // programs, -(-tokens // tile), MAX_SPLITS))


def choose_stages(tile_bytes: int, block: int, everywhere: int) -> int:
    """Return the stages with which `PROGRAMS_PER_SM` programs fill a multiprocessor, no more.

    A loop of s stages holds s - 1 tiles of `tile_bytes`. Where a third program fits, some
    multiprocessors get three and others one, and all wait for those (H200, 32 requests of 562
    tokens: 26.5 us with 3 stages, 21.7 with 4).
    """
    most = min(block, everywhere // PROGRAMS_PER_SM - 1024) - BESIDE
    return max(2, min(MAX_STAGES, 1 + most // tile_bytes))


def tiles_ahead(strides: tuple[int, ...], tile: int, dim: int, item: int) -> int:
    """Return the tiles that are asked of the L2 early: none where tokens do not lie in a row."""
    whole = strides[2] == dim and dim * item % 16 == 0 and AHEAD * tile * dim * item % 1024 == 0
    return AHEAD if whole else 0
