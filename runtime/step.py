"""One forward of a stage: which requests, where each stands, how many new tokens.

`Step` itself has rows that are right padded: the windows of calibration. The engine's steps pack
their rows, one behind the other (ragged_step.py, paged_step.py).

Everything a forward decides on is a host value, so no device is asked for anything while it runs.

Legend: B rows, Q new tokens per row, T keys in sight, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from llmpq.runtime.upload import upload

Derived = TypeVar("Derived")


@dataclass(frozen=True, kw_only=True)
class Step:
    """The rows of one forward. Build it with `Step.of`, which derives the host flags."""

    slots_B: Tensor
    """Row of the block tables of each row."""
    start_B: Tensor
    """Tokens already in the cache."""
    num_new_B: Tensor
    """Valid new tokens of each row, 1..q_len; the rest of the row is padding on the right."""
    q_len: int
    max_end: int
    """The largest start + num_new: keys beyond it are not read."""
    fresh: bool
    """Every start is 0: attention needs the new tokens only."""
    uniform: bool = False
    """Every row has the same start and `q_len` valid tokens."""
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was derived from the step once, shared by all layers."""

    @classmethod
    def of(
        cls,
        slots: Sequence[int],
        starts: Sequence[int],
        num_new: Sequence[int],
        *,
        device: torch.device | str = "cpu",
    ) -> Step:
        """Build the step of rows at `starts` that bring `num_new` tokens each."""
        if not len(slots) == len(starts) == len(num_new) > 0:
            raise ValueError(
                f"a step needs equally many slots, starts and counts, got {len(slots)}, "
                f"{len(starts)}, {len(num_new)}"
            )
        if min(num_new) < 1 or min(starts) < 0:
            raise ValueError(f"a row needs a new token and a start >= 0, got {num_new}, {starts}")
        rows = upload([slots, starts, num_new], torch.long, device)
        return cls(
            slots_B=rows[0],
            start_B=rows[1],
            num_new_B=rows[2],
            q_len=max(num_new),
            max_end=max(s + n for s, n in zip(starts, num_new, strict=True)),
            fresh=max(starts) == 0,
            uniform=len(set(starts)) == 1 and len(set(num_new)) == 1,
        )

    @classmethod
    def of_prompts(cls, rows: int, length: int, *, device: torch.device | str = "cpu") -> Step:
        """Build the step of so many whole prompts, all of one length."""
        return cls.of(range(rows), [0] * rows, [length] * rows, device=device)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.slots_B.shape[0]

    @property
    def positions_BQ(self) -> Tensor:
        """Position of every new token, padding included; [1, Q] when all rows are alike."""
        return self.once("positions", self._positions)

    @property
    def lengths_BQ(self) -> Tensor:
        """Tokens of every row's request with this step, [B, 1]."""
        return (self.start_B + self.num_new_B)[:, None]

    @property
    def ends_by_place(self) -> bool:
        """Whether `ends` has every place's."""
        return False

    @property
    def ends(self) -> Tensor:
        """Tokens of every row's request with this step, [B]; of packed rows every place's, [T]."""
        return self.start_B + self.num_new_B

    def once(self, key: str, make: Callable[[], Derived]) -> Derived:
        """Return what was derived under `key`, making it at its first use."""
        if key not in self.memo:
            self.memo[key] = make()
        made: Derived = self.memo[key]
        return made

    def last_valid(self, x_BQH: Tensor) -> Tensor:
        """Return [B, H]: each row at its last valid token."""
        if self.q_len == 1 or self.uniform:
            return x_BQH[:, -1]
        rows = torch.arange(self.batch, device=x_BQH.device)
        return x_BQH[rows, self.num_new_B - 1]

    def _positions(self) -> Tensor:
        start = self.start_B[:1] if self.fresh or self.uniform else self.start_B
        return start[:, None] + torch.arange(self.q_len, device=start.device)
