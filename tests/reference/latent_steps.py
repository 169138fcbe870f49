"""A step over a pool of latents: rows of any lengths, a table of blocks, what these hold.

T places of a step.  S slots.  M blocks of a request.  P blocks of the pool.  E a token's entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmpq.sizes.kv_format import BLOCK_TOKENS

SLOTS, COLUMNS, PADDING = 6, 3, 2
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6}
CPU = torch.device("cpu")
MIXES = {
    "decode": [(2, 0, 1), (0, 127, 1), (5, 128, 1), (1, 300, 1)],
    "chunks": [(4, 0, 20), (1, 126, 5), (0, 200, 2)],
    "mixed": [(0, 300, 1), (4, 3, 9), (3, 0, 1), (1, 250, 5), (2, 0, 2)],
}
"""(slot, start, count) of rows before, at and behind the end of a block."""


@dataclass(frozen=True, kw_only=True)
class LatentStep:
    """A step's rows and the pool they are in."""

    rows_FR: Tensor
    table_SM: Tensor
    pool_P1BE: Tensor
    used: int
    """Places of rows; behind them stand PADDING more."""
    chunks: bool

    @property
    def places(self) -> int:
        """Tokens of the step, padding among them."""
        return self.used + PADDING

    def asked_of(self, *, wrong_table: bool) -> Tensor:
        """Return the blocks that kernels get: others' where a fault is planted."""
        return self.table_SM.roll(1, 0) if wrong_table else self.table_SM


def latent_step(mix: list[tuple[int, int, int]], plan: Any, entry: int, dtype: Any) -> LatentStep:
    """Return a step of a mix over random entries, by torch's generator."""
    used = sum(count for _, _, count in mix)
    slots, starts, counts = zip(*mix, strict=True)
    table = plan.table(slots, starts, counts, num_rows=len(mix) + 2, num_places=used + PADDING)
    return LatentStep(
        rows_FR=torch.tensor(table, dtype=torch.int32),
        table_SM=torch.randperm(SLOTS * COLUMNS).view(SLOTS, COLUMNS).int(),
        pool_P1BE=torch.randn(SLOTS * COLUMNS, 1, BLOCK_TOKENS, entry).to(dtype),
        used=used,
        chunks=max(counts) > 1,
    )


def error(got: Tensor, want: Tensor) -> float:
    """Return the relative error, by the Frobenius norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())
