"""Traces of real services in `data/traces/`: when requests came, and how long they were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmpq.traffic import Arrival, read_traffic

FOLDER = Path(__file__).parents[1] / "data" / "traces"


def read_trace(name: str, limit: int | None = None) -> list[Arrival]:
    """Return the rows of a trace, in the order of their arrival."""
    return list(read_traffic(FOLDER / f"{name}.csv")[:limit])


def names() -> Sequence[str]:
    """Return the traces there are."""
    return sorted(path.stem for path in FOLDER.glob("*.csv"))
