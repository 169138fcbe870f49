"""One line of `--method all`: a method's plan, and the exact method's at no more quality loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """What a method found; `exact_s` is None where the exact method found nothing in time."""

    bits: str
    omega: float
    time_s: float
    tokens_per_s: float
    solved_in_s: float | None = None
    exact_s: float | None = None
