"""Rows of a step, and inputs of recurrent layers, for tests of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.kernels.recurrent.delta_step import Convolution, GatedNorm, StepProduct
from llmpq.kernels.recurrent.notes import Notes
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


def step_product(places: int, heads: int, given: int, dtype: torch.dtype) -> StepProduct:
    """Return what makes a delta rule's steps; rows of what is given lie further apart."""
    x, weight = normal(places, given + 8, seed=31), normal(2 * heads, given, seed=32)
    return StepProduct(given_Th=x.to(dtype)[:, :given], weight_Jh=(weight * given**-0.5).to(dtype))


def around(
    places: int, states_SHNP: Tensor, channels: int, *, taps: int = 4, bias: bool = False
) -> tuple[Convolution, GatedNorm, Tensor]:
    """Return what stands before and behind a delta rule, and tails [S, K - 1, C]."""
    slots, heads, _, value_dim = states_SHNP.shape
    weight = normal(taps, 1, channels, seed=20).permute(2, 1, 0)  # each tap's side by side
    convolution = Convolution(weight_C1K=weight, bias_C=normal(channels, seed=21) if bias else None)
    norm = GatedNorm(
        weight_P=normal(value_dim, seed=22),
        eps=1e-5,
        gate_TC=normal(places, heads * value_dim + 5, seed=23)[:, 5:],
        gate="sigmoid" if bias else "silu",
    )
    return convolution, norm, normal(slots, taps - 1, channels, seed=24)


NOTED_ROWS = [(2, 7, 1), (4, 300, 4), (0, 9, 3), (1, 0, 5), (3, 8, 1), (-1, 0, 2), (-1, 0, 0)]
"""Rows of which some have noted tokens in front, and some are noted."""
NOTED = [(3, 4, 1, 0), (2, 3, 1, 0), (0, 1, 1, 0), (0, 5, 5, 0), (2, 0, 0, 2), (0,) * 4, (0,) * 4]
"""What is before, settled, certain, and where the rest goes: a step behind drafts, verifies of
several and of none in front, a prompt, a draft."""
ONE_EACH = [(0, 1, 1, 0), (3, 4, 1, 0), (2, 0, 0, 2), (0, 0, 0, 0), (0,) * 4]
"""The same of rows of one token: a step, one behind drafts, a further and a first draft."""
SINGLE_NOTED = [(2, 7, 1), (0, 5, 1), (3, 8, 1), (4, 300, 1), (-1, 0, 1)]
MOST_NOTED = 7


def some_notes(
    noted: Sequence[tuple[int, ...]],
    channels: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
) -> Notes:
    """Return notes of some earlier step, and the rows that go on from them."""
    shape = (SLOTS, MOST_NOTED, channels + steps)
    notes, mixed = normal(*shape, seed=11).to(dtype), normal(*shape, seed=12).to(dtype)
    rows = torch.tensor(noted, dtype=torch.int32).t().contiguous()
    return Notes(noted_SME=notes, mixed_SME=mixed, rows_FR=rows)


def copy_of(notes: Notes, device: str = "cpu", dtype: torch.dtype | None = None) -> Notes:
    """Return notes of one's own."""
    parts = (notes.noted_SME.clone(), notes.mixed_SME.clone())
    noted, mixed = (part.to(device=device, dtype=dtype) for part in parts)
    return Notes(noted_SME=noted, mixed_SME=mixed, rows_FR=notes.rows_FR.to(device))
