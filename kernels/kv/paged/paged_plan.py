"""How attention over a pool is launched: tiles, programs and stages, by model and device.

Nothing here depends on the rows of a step, so that a captured step serves any (paged_attend.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from llmpq.kernels.kv.launch_plan import shared_memory
from llmpq.kernels.kv.paged.paged_rows import WORK_SPLIT
from llmpq.kernels.kv.paged.tiles import PROGRAMS_PER_SM, choose_stages, tiles_ahead
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.sizes.kv_format import BLOCK_TOKENS

CHUNK_ROWS = 64
"""Query rows of a chunk's program: what a warp group of tensor cores multiplies at once. Two groups
of a program wait for each other (H200, 32 prompts of 512 tokens: 303 us, with 128 rows 332)."""
LEAST_KEYS = 16
"""Keys that tensor cores take at once."""
BESIDE = 8192
"""Bytes of shared memory that a chunk's program takes beside its tiles, at most."""
MERGED_VALUES = 8192
"""Numbers of other programs' parts that a program loads at once: 64 registers of a thread."""
COMBINED_CHANNELS = 32
"""Channels of a program that merges parts: 128 bytes, of which it loads many parts' at once."""
COUNTED_ROWS = 16
"""Rows of a step from which on the last program of a row merges its parts."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What is done to scores: constants of the kernels."""

    alibi: bool = False
    capped: bool = False
    windowed: bool = False
    chunked: bool = False
    """Windows begin at multiples of their size."""
    sinks: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """Under the kernels' names."""
        return {
            "ALIBI": self.alibi,
            "CAPPED": self.capped,
            "WINDOWED": self.windowed,
            "CHUNKED": self.chunked,
            "SINKS": self.sinks,
        }


@dataclass(frozen=True, kw_only=True)
class PagedPlan:
    """How steps over a pool are launched, whatever their rows."""

    heads: int
    kv_heads: int
    head_dim: int
    item: int
    """Bytes of an element."""
    programs: int
    """Programs of a key/value head that share the key tiles of decoding rows."""
    stages: int
    chunk_rows: int
    """Query rows of a chunk's program."""
    chunk_keys: int
    """Keys that such a program takes at once."""
    chunk_stages: int
    chunk_warps: int
    window: int = 0
    """The widest window of a layer, in tokens; 0 where every layer sees all."""

    @classmethod
    @functools.cache
    def of(
        cls,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int = 0,
    ) -> PagedPlan:
        """Choose as many programs and stages as a device holds at once."""
        shared, item = shared_memory(device), dtype.itemsize
        row_bytes, keys = _padded(head_dim) * item, _tile_keys(head_dim, item)
        tile_bytes = 2 * keys * row_bytes
        rows, chunk_keys = _chunk_tiles(
            heads // kv_heads, keys, item, row_bytes=row_bytes, room_bytes=shared[0] - BESIDE
        )
        held_bytes = (rows + 4 * chunk_keys) * row_bytes + BESIDE
        return cls(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            item=item,
            programs=max(1, PROGRAMS_PER_SM * multiprocessors(device) // kv_heads),
            stages=choose_stages(tile_bytes, *shared),
            chunk_stages=3 if held_bytes <= shared[0] else 2,
            chunk_rows=rows,
            chunk_keys=chunk_keys,
            chunk_warps=8 if _padded(head_dim) > 128 or rows > CHUNK_ROWS else 4,
            window=window,
        )

    @property
    def tile_keys(self) -> int:
        """Keys of a tile; a block is a multiple of them."""
        return _tile_keys(self.head_dim, self.item)

    @property
    def tile_queries(self) -> int:
        """New tokens that a chunk's program takes."""
        return self.chunk_rows // (self.heads // self.kv_heads)

    def decode_options(self, rows: int, scores: Scores, *, pdl: bool) -> dict[str, int | bool]:
        """Return the constants of `decode_kernel` for steps of so many rows."""
        heads, dim = triton.next_power_of_2(self.heads // self.kv_heads), self.head_dim
        return self._options(scores, pdl=pdl) | {
            "R": max(16, heads),
            "PROGRAMS": self.programs,
            "WORK_SPLIT": WORK_SPLIT,
            "HEADS": heads,
            "MERGED": max(1, MERGED_VALUES // (heads * _padded(dim))),
            "COUNTED": rows >= COUNTED_ROWS,
            "AHEAD": tiles_ahead((0, 0, dim), self.tile_keys, dim, self.item) if pdl else 0,
            "STAGES": self.stages,
            "num_warps": 4,
        }

    def combine_options(self, rows: int, scores: Scores, *, pdl: bool) -> dict[str, int | bool]:
        """Return the constants of `combine_kernel` for steps of so many rows."""
        own = ("H", "G", "D", "PADDED", "R", "PROGRAMS", "WORK_SPLIT", "HEADS", "MERGED",
               "WINDOWED", "PDL", "num_warps")  # fmt: skip
        options = self.decode_options(rows, scores, pdl=pdl)
        channels = min(COMBINED_CHANNELS, _padded(self.head_dim))
        merged = max(1, MERGED_VALUES // (options["HEADS"] * channels))
        return {name: options[name] for name in own} | {"CHANNELS": channels, "MERGED": merged}

    def chunk_options(self, rows: int, scores: Scores, *, pdl: bool) -> dict[str, int | bool]:
        """Return the constants of `chunk_kernel` for steps of so many rows."""
        return self._options(scores, pdl=pdl) | {
            "ROWS": triton.next_power_of_2(rows),
            "N": self.chunk_keys,
            "M": self.chunk_rows,
            "TILE": self.tile_queries,
            "STAGES": self.chunk_stages,
            "num_warps": self.chunk_warps,
        }

    def _options(self, scores: Scores, *, pdl: bool) -> dict[str, int | bool]:
        return scores.options | {
            "H": self.heads,
            "G": self.kv_heads,
            "D": self.head_dim,
            "PADDED": _padded(self.head_dim),
            "N": self.tile_keys,
            "PAGE": BLOCK_TOKENS,
            "PDL": pdl,
        }


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _tile_keys(head_dim: int, item: int) -> int:
    return 32 if item == 4 or _padded(head_dim) > 128 else 64


def _chunk_tiles(
    queries: int, keys: int, item: int, *, row_bytes: int, room_bytes: int
) -> tuple[int, int]:
    """Return query rows and keys of a chunk's program, whose tiles fit the shared memory.

    Heads of 512 channels (Gemma 4) take smaller tiles where a program has 99 KiB.
    """
    least, rows = max(16, triton.next_power_of_2(queries)), _chunk_rows(queries, item)
    while (rows + 2 * keys) * row_bytes > room_bytes and (rows > least or keys > LEAST_KEYS):
        if rows > least and (rows >= 2 * keys or keys == LEAST_KEYS):
            rows //= 2
        else:
            keys //= 2
    return rows, keys


def _chunk_rows(queries: int, item: int) -> int:
    """Float32 operands take twice the memory, and no tensor core multiplies them."""
    return max(16 if item == 4 else CHUNK_ROWS, triton.next_power_of_2(queries))
