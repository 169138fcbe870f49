"""Bounds that hold in a node of the search: ranges of P and D, numbers of stages, hops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Box:
    """A range of P and D in seconds: what a part of the search may assume of the slowest stages."""

    p_low: float = 0.0
    p_high: float = math.inf
    d_low: float = 0.0
    d_high: float = math.inf
    island: int | None = None
    """The island on which plans stay (planner/exact/bounds/plan_cases.py)."""
    fewest: int = 1
    """Smallest number of stages."""
    most: int | None = None
    """Largest number of stages, None for any."""
    hops_prefill_s: float = 0.0
    """What all hops of prefill take together at least."""
    hops_decode_s: float = 0.0

    def with_limits(self, limits: dict[str, float]) -> Box:
        """Return the box with some limits of P and D replaced."""
        return replace(self, **limits)  # type: ignore[arg-type]


EVERYWHERE = Box()
