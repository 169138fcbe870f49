"""How one request's tokens are chosen. Standard library only; the arithmetic is in sampling.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenChoice:
    """How one request's tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    """Only the k most likely tokens; None for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if self.top_k is not None and not 1 <= self.top_k < 2**31:
            raise ValueError(
                f"top_k must be between 1 and 2^31 - 1, or absent for all, got {self.top_k}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2^63 - 1, got {self.seed}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0
