"""How attention over a pool of packed blocks is launched, and its rows as kernels read them.

    rows [7, R]   as paged_rows.py says; the last two running sums are, of rows of one token, the
                  parts of their packed tiles and those of their 16-bit rings
    work_split         what each program takes of them (packed_pages_deal.py)

Nothing here depends on the rows of a step, so that a captured step serves any.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton

from llmpq.kernels.formats.kv_block import TILE_TOKENS, KVFormat, pool_format
from llmpq.kernels.kv.launch_plan import AHEAD, LOOP_SHAPE, programs_per_sm, shared_memory
from llmpq.kernels.kv.paged.packed_pages_deal import ENTRY, Deal, Ints, deal
from llmpq.kernels.kv.paged.paged_plan import Scores
from llmpq.kernels.kv.paged.paged_rows import Rows, summed_rows
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, TAIL_TOKENS

RING_STEP = 32
"""Tokens of a step over the ring (attend.py)."""
CHUNK_ROWS = 64
"""Query rows of a chunk's program: what a warp group of tensor cores multiplies at once."""
CHUNK_KEYS = 32
"""16-bit keys that a chunk's program takes at once, of the ring and new ones; wide heads: half."""
MOST_CHANNELS = 256
"""Channels of a head at most: registers of a program hold no more (llmpq/plans/capabilities.py)."""
WORD_K_WIDTH = 4 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 2
"""Consecutive columns of an operand a thread holds, as Triton picks them for unpacked words. The
other value is right but shuffles: 3.6 halves the source's width at each join, 3.9 does not."""
MERGED = 4096
"""Values of parts (parts x heads x channels) that a program of the combine loads at once."""
FEW_PARTS = 16
"""Parts of a row that the combine merges without the threads that more would need."""
RING_PARTS = 5
"""Parts of a row's 16-bit ring at most."""
MANY_ROWS_LOOP = {8: (1, 2)}
"""Tiles a step and stages, by bits of keys, of steps of many rows: twice the programs of
LOOP_SHAPE's, each with fewer copies in flight (H200, 96 rows of 9,000 tokens: 442 us instead of
519)."""
MANY_PARTS = 64
"""Rows times key/value heads from which a step has many rows."""
DECODE_SCORES = ("ALIBI", "CAPPED", "WINDOWED", "CHUNKED")
"""What `decode_packed` does to scores; sinks come as parts are merged."""


@dataclass(frozen=True, kw_only=True)
class PackedPlan:
    """How steps over a pool of packed blocks are launched, whatever their rows."""

    heads: int
    kv_heads: int
    head_dim: int
    precision: KVPrecision
    """Bits of keys and of values in blocks."""
    item: int
    """Bytes of an element of queries and rings."""
    columns: int
    """Query heads that a decoding program takes."""
    tiles: int
    """Packed tiles of a step of its loop."""
    stages: int
    programs: int
    """Programs of a key/value head (and of `columns` of its query heads) that share the rows."""
    many_rows: tuple[int, int, int] | None = None
    """Tiles, stages and programs of steps of many rows, if they are others (`for_rows`)."""
    ahead: int = AHEAD
    """Packed tiles that a program asks the L2 for before the kernel in front ends."""

    @classmethod
    @functools.cache
    def of(
        cls, fmt: KVFormat, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
    ) -> PackedPlan:
        """Choose as many programs as a device holds at once; `ValueError` for other formats."""
        if fmt != pool_format(fmt.precision, fmt.head_dim) or fmt.head_dim > MOST_CHANNELS:
            raise ValueError(
                f"a pool of packed blocks takes heads of at most {MOST_CHANNELS} channels in the "
                f"format of `pool_format`, got {fmt}"
            )
        columns = 8 if heads // kv_heads <= 8 else 16
        head_parts = kv_heads * -(-heads // kv_heads // columns)

        def loop(tiles: int, stages: int) -> tuple[int, int, int]:
            resident = programs_per_sm(
                *(fmt.precision, fmt.register_channels, dtype.itemsize, columns, tiles, stages),
                shared=shared_memory(device)[1],
            )
            return tiles, stages, max(1, resident * multiprocessors(device) // head_parts)

        tiles, stages, programs = loop(*LOOP_SHAPE[fmt.key_bits])
        many = MANY_ROWS_LOOP.get(fmt.key_bits)
        return cls(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=fmt.head_dim,
            precision=fmt.precision,
            item=dtype.itemsize,
            columns=columns,
            tiles=tiles,
            stages=stages,
            programs=programs,
            many_rows=None if many is None else loop(*many),
        )

    def for_rows(self, rows: int) -> PackedPlan:
        """Return the plan of steps of so many rows."""
        if self.many_rows is None or rows * self.head_parts < MANY_PARTS:
            return self
        tiles, stages, programs = self.many_rows
        return replace(self, tiles=tiles, stages=stages, programs=programs, many_rows=None)

    @property
    def fmt(self) -> KVFormat:
        """The format of blocks."""
        return pool_format(self.precision, self.head_dim)

    @property
    def register_channels(self) -> int:
        """Channels of a head, padded to what registers hold: a power of two."""
        return self.fmt.register_channels

    @property
    def max_registers(self) -> int:
        """Registers of a thread of `decode_packed` at most; 0: as many as ptxas takes.

        Left alone, ptxas takes so many that a twelfth program does not fit an SM.
        """
        few = self.columns == 8 and self.register_channels <= 128 and self.item == 2
        return 168 if few else 0

    @property
    def head_parts(self) -> int:
        """Key/value heads times the programs that share one's query heads."""
        return self.kv_heads * -(-self.group_heads // self.columns)

    @property
    def group_heads(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def chunk_rows(self) -> int:
        """Query rows of a chunk's program: fewer where wide heads or float32 take the memory."""
        most = CHUNK_ROWS if self.register_channels <= 128 else CHUNK_ROWS // 2
        most = 16 if self.item == 4 else most
        return max(most, triton.next_power_of_2(self.group_heads))

    @property
    def tile_queries(self) -> int:
        """New tokens that a chunk's program takes."""
        return self.chunk_rows // self.group_heads

    def table(
        self,
        slots: Rows,
        starts: Rows,
        counts: Rows,
        *,
        num_rows: int,
        num_places: int,
    ) -> Ints:
        """Return the rows' table, padding behind them."""
        if self.for_rows(num_rows) is not self:
            own = self.for_rows(num_rows)
            return own.table(slots, starts, counts, num_rows=num_rows, num_places=num_places)
        table = summed_rows(
            *(slots, starts, counts, self._steps),
            num_rows=num_rows,
            num_places=num_places,
            tile_queries=self.tile_queries,
        )
        parts = self._deal(table)
        table[5], table[6] = parts.packed.ends, parts.ring.ends
        return table

    @property
    def num_work_split(self) -> int:
        """Values that `work_split` returns."""
        most = self.programs if self.many_rows is None else max(self.programs, self.many_rows[2])
        return 2 * most * ENTRY

    def work_split(self, table: Ints) -> Ints:
        """Return what each program takes of a rows' table."""
        own = self.for_rows(table.shape[1])
        entries = own._deal(table).entries(own.programs, (table[0], table[1], table[3]))
        return np.pad(entries, (0, self.num_work_split - len(entries)))

    def _steps(self, positions_R: Ints) -> tuple[Ints, Ints]:
        """Return the steps over packed tiles and over the ring of queries at positions."""
        # packed_end of llmpq/sizes/kv_format.py
        line_R = np.maximum(0, (positions_R - HOLDBACK_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS
        ring_R = -(-(positions_R + 1 - line_R) // RING_STEP)
        return line_R // (self.tiles * TILE_TOKENS), ring_R

    def _deal(self, table: Ints) -> Deal:
        decodes_R = (table[0] >= 0) & (table[2] == 1)
        packed, rings = (of_rows * decodes_R for of_rows in self._steps(table[1]))
        return deal(tuple(packed.tolist()), tuple(rings.tolist()), self.programs)

    def decode_options(self, scores: Scores, *, pdl: bool) -> dict[str, int | bool]:
        """Return the constants of `decode_packed`."""
        options = self._options(1, pdl=pdl)
        del options["ROWS"]
        return (
            options
            | self._bits
            | {
                "R": self.columns,
                "PROGRAMS": self.programs,
                "TILES": self.tiles,
                "STAGES": self.stages,
                "AHEAD": min(8, self.ahead),
                "KW": WORD_K_WIDTH,
                "KW0": 2,
                "num_warps": 1,
            }
            | {name: scores.options[name] for name in DECODE_SCORES}
        )

    def combine_options(self, rows: int, scores: Scores, *, pdl: bool) -> dict[str, int | bool]:
        """Return the constants of `combine_packed` for steps of so many rows.

        The programs' parts are dealt over the rows: few rows have many each, of which a program
        loads all at once and takes few channels; many rows have few, so it takes several heads.
        """
        parts = -(-self.programs // rows) + RING_PARTS
        x_step = min(256, max(FEW_PARTS, triton.next_power_of_2(parts)))
        d_step = min(self.register_channels, max(16, MERGED // x_step))
        n_step = max(1, min(MERGED // (x_step * d_step), triton.next_power_of_2(self.heads)))
        options = self._options(1, pdl=pdl)
        del options["ROWS"]
        own = {"R": self.columns, "SINKS": scores.sinks, "num_warps": 4}
        steps = {"X_STEP": x_step, "X_FEW": FEW_PARTS, "D_STEP": d_step, "N_STEP": n_step}
        return options | own | steps

    def chunk_options(self, rows: int, scores: Scores, *, pdl: bool) -> dict[str, int | bool]:
        """Return the constants of `chunk_packed` for steps of so many rows."""
        return (
            self._options(rows, pdl=pdl)
            | self._bits
            | {
                "M": self.chunk_rows,
                "N": CHUNK_KEYS if self.register_channels <= 128 else CHUNK_KEYS // 2,
                "TILE": self.tile_queries,
                "STAGES": 2 if self.register_channels <= 128 else 1,
                "num_warps": 8,
            }
            | scores.options
        )

    def append_options(
        self, rows: int, *, rotary: bool, chunks: bool, behind: bool, pdl: bool
    ) -> dict[str, int | bool]:
        """Return the constants of `append_packed` for steps of so many rows."""
        options = self._options(rows, pdl=pdl) | self._bits
        own = {"ROTARY": rotary, "CHUNKS": chunks, "BEHIND": TAIL_TOKENS if behind else 0}
        return options | own | {"num_warps": 8}

    def ring_options(self, *, pdl: bool) -> dict[str, int | bool]:
        """Return the constants of `write_rings`."""
        return {
            "G": self.kv_heads, "D": self.head_dim, "TOKENS": RING_STEP, "PDL": pdl, "num_warps": 4
        }  # fmt: skip

    @property
    def _bits(self) -> dict[str, int]:
        return {"KEY_BITS": self.precision.key_bits, "VALUE_BITS": self.precision.value_bits}

    def _options(self, rows: int, *, pdl: bool) -> dict[str, int | bool]:
        return {
            "H": self.heads,
            "G": self.kv_heads,
            "D": self.head_dim,
            "ROWS": triton.next_power_of_2(rows),
            "PDL": pdl,
        }
