"""Rows of a step, and inputs of recurrent layers, for tests of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.kernels.recurrent.state_walk import Recurrence

SLOTS = 5
SINGLE = [(2, 7, 1), (0, 0, 1), (-1, 0, 1), (4, 300, 1), (-1, 0, 1)]
"""Slots, starts and tokens of rows of one token each; -1: padding."""
CHUNKS = [(1, 0, 5), (3, 9, 1), (0, 64, 2), (2, 0, 1), (4, 2, 37), (-1, 0, 3), (-1, 0, 0)]
LONG = [(1, 0, 70), (3, 9, 1), (0, 64, 20), (2, 0, 17), (4, 5, 131), (-1, 0, 3), (-1, 0, 0)]
"""Rows that begin and end within blocks of 64 places, beside short ones."""
Rows = Sequence[tuple[int, int, int]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table(rows: Rows) -> tuple[Tensor, int]:
    """Return a rows' table of which the kernels read four fields, and its places."""
    firsts = [sum(row[2] for row in rows[:at]) for at in range(len(rows))]
    columns = [[*row, first, 0, 0, 0] for row, first in zip(rows, firsts, strict=True)]
    return torch.tensor(columns, dtype=torch.int32).t().contiguous(), sum(row[2] for row in rows)


def slots_of(rows: Rows) -> Tensor:
    """Return the slot of every place."""
    return torch.tensor([SLOTS if s < 0 else s for s, _, count in rows for _ in range(count)])


KINDS = ("delta", "kda", "mamba2", "lightning")


def recurrence(kind: str, *, heads: int, key_heads: int, key_dim: int) -> Recurrence:
    """Return a recurrence's tensors."""
    decays = heads * (key_dim if kind == "kda" else 1)
    fixed = kind == "lightning"
    return Recurrence(
        delta=kind in ("delta", "kda"),
        key_heads=key_heads,
        decay_H=normal(heads, seed=5).abs() - (3 if fixed else 0),
        bias_H=None if fixed else normal(decays, seed=6) - 3,
        skip_H=normal(heads, seed=7) if kind == "mamba2" else None,
        by_channel=kind == "kda",
        beta_factor=1.7 if kind == "delta" else 1.0,
    )


def recurrent_inputs(
    places: int,
    kind: str,
    *,
    heads: int = 4,
    key_heads: int = 2,
    key_dim: int = 12,
    value_dim: int = 20,
) -> tuple[Tensor, Tensor, Recurrence, Tensor]:
    """Return what is convolved [T, E], steps, the recurrence, and states [S, H, N, P]."""
    channels = 2 * key_heads * key_dim + heads * value_dim
    mixed = normal(places, channels + 3, seed=8)[:, :channels]
    counts = {"delta": 2, "kda": 1 + key_dim, "mamba2": 1, "lightning": 1}
    steps = normal(places, counts[kind] * heads, seed=9)
    states = normal(SLOTS, heads, key_dim, value_dim, seed=10)
    form = recurrence(kind, heads=heads, key_heads=key_heads, key_dim=key_dim)
    return mixed, steps, form, states
