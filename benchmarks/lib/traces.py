"""Traces of real services in `data/traces/`: when requests came, and how long they were."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data" / "traces"
MOONCAKE_BLOCK = 512
"""Tokens that a block number of Mooncake's stands for."""


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Equal numbers: equal tokens. Empty where the trace does not say."""

    def prompt(self, vocab: int, number: int) -> list[int]:
        """Return tokens of the prompt's length that begin as the trace says."""
        if not self.blocks:
            return block_tokens(-1 - number, self.prompt_tokens, vocab)
        tokens: list[int] = []
        for block in self.blocks:
            tokens += block_tokens(block, MOONCAKE_BLOCK, vocab)
        return tokens[: self.prompt_tokens]


def block_tokens(number: int, count: int, vocab: int) -> list[int]:
    """Return tokens that differ for every number: an arithmetic sequence, begun by the number."""
    low = min(3, vocab - 1)
    room = vocab - low
    digits = []
    left = abs(number) * 2 + (number < 0)
    for _ in range(min(count, 8)):
        digits.append(low + left % room)
        left //= room
    step = 1 + abs(number) % (room - 1) if room > 1 else 0
    rest = [low + (number + index * step) % room for index in range(count - len(digits))]
    return digits + rest


def read_trace(name: str, limit: int | None = None) -> list[Arrival]:
    """Return the rows of a trace, in the order of their arrival."""
    with (FOLDER / f"{name}.csv").open() as file:
        rows = [
            Arrival(
                int(row["arrival_ms"]) / 1000,
                int(row["prompt_tokens"]),
                int(row["output_tokens"]),
                _numbers(row.get("blocks") or ""),
            )
            for row in csv.DictReader(file)
        ]
    return rows[:limit]


def names() -> Sequence[str]:
    """Return the traces there are."""
    return sorted(path.stem for path in FOLDER.glob("*.csv"))


def _numbers(text: str) -> tuple[int, ...]:
    """Read `3 5-7` as 3, 5, 6, 7."""
    found: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
