"""Blocks of the layers of one kind, unquantised: those that see all, or those with a window.

Token p of a request is at p % 128 of its block p // 128. Layers with a window have a pool of their
own where that takes less: blocks that have left the window are given to other requests, so what a
step reads begins with the first block in sight, and positions count from there.

Legend: N places of a pool, T tokens of a step, M blocks of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.kernels.cpu.block_attention import BlockRows
from llmpq.kernels.native import huge_pages
from llmpq.model_spec import ModelSpec
from llmpq.runtime.ragged_step import RaggedStep, Span
from llmpq.sizes.kv_format import BLOCK_TOKENS, first_seen_block


class BlockLists:
    """The block table of every slot, on the host."""

    def __init__(self, slots: int) -> None:
        self._blocks: list[list[int]] = [[] for _ in range(slots)]

    def take(self, slot: int, first: int, blocks: Sequence[int], *, gaps: bool = False) -> None:
        """Take the blocks a row brings; what its slot had behind them was another request's.

        `gaps`: a request may begin behind blocks that its window does not reach.
        """
        table = self._blocks[slot]
        if first > len(table):
            if not gaps:
                raise ValueError(
                    f"slot {slot} has {len(table)} blocks, its row brings those from {first} on"
                )
            table += [0] * (first - len(table))
        del table[first:]
        table += blocks

    def of(self, slot: int) -> Sequence[int]:
        """Return the blocks of a slot, in the order of its tokens."""
        return self._blocks[slot]


class BlockStorage:
    """Keys and values [layers, N, G, D] of a stage's layers of one kind, and who has what."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_layers: int,
        num_blocks: int,
        slots: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`window`: tokens that queries see and blocks are kept for; 0 for all."""
        shape = (num_layers, num_blocks * BLOCK_TOKENS, spec.kv_heads, spec.head_dim)
        self.k = huge_pages.zeros(shape, dtype, device)
        self.v = self.k  # MLA's latents are keys and values at once
        if spec.kv_vectors == 2:
            self.v = huge_pages.zeros(shape, dtype, device)
        self.window, self.tables = window, BlockLists(slots)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        return self.k.nbytes + (0 if self.v is self.k else self.v.nbytes)

    def places(self, step: RaggedStep) -> Tensor:
        """Return [T]: where in the pool each token of a step goes."""
        spans = step.spans
        rows = [self.places_of(span.slot, range(span.start, span.end)) for span in spans]
        return torch.tensor([place for row in rows for place in row], device=self.k.device)

    def places_of(self, slot: int, positions: Sequence[int]) -> list[int]:
        """Return where in the pool a request's tokens at these positions go."""
        table = self.tables.of(slot)
        return [table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in positions]

    def first_position(self, span: Span) -> int:
        """Return the position that what a row reads begins with."""
        return first_seen_block(span.start, self.window) * BLOCK_TOKENS if self.window else 0

    def num_keys(self, span: Span) -> int:
        """Return how many tokens a row reads, its new ones included."""
        return span.end - self.first_position(span)

    def in_sight(self, span: Span) -> Tensor:
        """Return [num_keys]: where the tokens are that a row reads."""
        first_M1 = self.rows([span]).tables_BM[0, :, None] * BLOCK_TOKENS
        places = (first_M1 + torch.arange(BLOCK_TOKENS)).flatten()[: self.num_keys(span)]
        return places.to(self.k.device)

    def rows(self, group: Sequence[Span]) -> BlockRows:
        """Return the blocks that rows read; block 0 where there is none."""
        tables = []
        for span in group:
            first = self.first_position(span) // BLOCK_TOKENS
            tables.append(self.tables.of(span.slot)[first : -(-span.end // BLOCK_TOKENS)])
        longest = max(map(len, tables))
        padded = [[*table, *[0] * (longest - len(table))] for table in tables]
        ends = torch.tensor([self.num_keys(span) for span in group])
        return BlockRows(torch.tensor(padded), ends)
