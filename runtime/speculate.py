"""How many tokens to draft before verifying, and what came of it.

With acceptance a per token, a round of gamma drafts yields E = (1 - a^(gamma+1)) / (1 - a) tokens
and takes gamma drafts and one verify of gamma + 1 positions. The expected speed-up over plain
decoding is

    S(gamma) = E * decode / (gamma * draft + verify(gamma + 1))

`AutoDrafter` takes the times from a cost model, the acceptance from what it observes, and drafts
only where S is above 1. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from llmpq.runtime import ngram
from llmpq.runtime.request import Request

SpeculationMode = Literal["qspec", "w4kv4", "planes", "kv4", "ngram"]
MODES: tuple[str, ...] = get_args(SpeculationMode)
DEFAULT_GAMMA = 3
MAX_GAMMA = 7
PRIOR_ACCEPTANCE = {"qspec": 0.8, "w4kv4": 0.9, "planes": 0.95, "kv4": 0.97, "ngram": 0.3}
"""Per token, until it is observed (trained models at 4 bits, round to nearest)."""
WORTHWHILE = 1.02
"""Least predicted speed-up that is worth drafting for: cost models err by a few percent."""


class StepTimes(Protocol):
    """Seconds of a micro-batch of `rows` requests with `context` tokens in the cache."""

    def decode_s(self, rows: int, context: float) -> float:
        """One plain decode step."""
        ...

    def draft_s(self, rows: int, context: float) -> float:
        """One draft step; 0 where drafts need no model."""
        ...

    def verify_s(self, rows: int, context: float, q_len: int) -> float:
        """One verify of `q_len` positions a request."""
        ...


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the mean number of tokens one round yields."""
    if acceptance >= 1:
        return gamma + 1.0
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def predicted_speedup(
    times: StepTimes, acceptance: float, gamma: int, *, rows: int, context: float
) -> float:
    """Return S(gamma) over plain decoding; 1 for gamma 0."""
    if gamma == 0:
        return 1.0
    spent_s = gamma * times.draft_s(rows, context) + times.verify_s(rows, context, gamma + 1)
    return expected_tokens(acceptance, gamma) * times.decode_s(rows, context) / spent_s


def best_gamma(
    times: StepTimes, acceptance: float, *, rows: int, context: float, limit: int = MAX_GAMMA
) -> tuple[int, float]:
    """Return the draft length of the highest predicted speed-up, and that; (0, 1) if none."""
    best = (0, 1.0)
    for gamma in range(1, limit + 1):
        speedup = predicted_speedup(times, acceptance, gamma, rows=rows, context=context)
        if speedup > max(best[1], WORTHWHILE):
            best = (gamma, speedup)
    return best


@dataclass
class Acceptance:
    """Counts of drafted and accepted tokens, per place in the draft."""

    drafted: list[int] = field(default_factory=lambda: [0] * 16)
    accepted: list[int] = field(default_factory=lambda: [0] * 16)
    verifies: int = 0
    tokens: int = 0
    """Tokens that verifies yielded, each verify's own one included."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count one request's verify."""
        self.verifies += 1
        self.tokens += num_accepted + 1
        for place in range(num_drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < num_accepted

    @property
    def rate(self) -> float | None:
        """Share of drafted tokens that were accepted, None before the first."""
        drafted = sum(self.drafted)
        return sum(self.accepted) / drafted if drafted else None

    def per_place(self) -> list[float]:
        """Return the share of drafts accepted at place 1, 2, ..., as far as there were any."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]

    def tokens_per_verify(self) -> float | None:
        """Return the mean number of tokens a verify yielded."""
        return self.tokens / self.verifies if self.verifies else None


class FixedDrafter:
    """Always drafts `gamma` tokens, with the model or by n-gram lookup."""

    def __init__(self, mode: SpeculationMode, gamma: int) -> None:
        if not 1 <= gamma <= MAX_GAMMA:
            raise ValueError(f"--gamma must be between 1 and {MAX_GAMMA} or auto, got {gamma}")
        self.mode, self._gamma = mode, gamma
        self.acceptance = Acceptance()

    def gamma(self, requests: Sequence[Request]) -> int:
        """Return the draft length for a group."""
        return self._gamma

    def propose(self, request: Request, gamma: int) -> list[int] | None:
        """Return drafts found without the model, None if the model drafts."""
        if self.mode != "ngram":
            return None
        return ngram.propose([*request.prompt, *request.output], gamma)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of one request's verify; one without drafts was a plain step."""
        if num_drafted:
            self.acceptance.add(num_drafted, num_accepted)


class AutoDrafter(FixedDrafter):
    """Drafts as many tokens as the cost model and the observed acceptance make worth while."""

    MEMORY = 0.98
    """Weight of the past at each observed token: about the last fifty count."""

    def __init__(
        self, mode: SpeculationMode, times: StepTimes, *, acceptance: float | None = None
    ) -> None:
        super().__init__(mode, MAX_GAMMA)
        self._times = times
        self.estimate = PRIOR_ACCEPTANCE[mode] if acceptance is None else acceptance
        self.chosen: dict[int, int] = {}
        """Draft length -> how many rounds were started with it."""

    def gamma(self, requests: Sequence[Request]) -> int:
        """Return the draft length for a group; 0 where drafting does not pay."""
        context = sum(request.num_cached for request in requests) / len(requests)
        gamma, _ = best_gamma(self._times, self.estimate, rows=len(requests), context=context)
        self.chosen[gamma] = self.chosen.get(gamma, 0) + 1
        return gamma

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of one request's verify and update the acceptance per token."""
        super().observe(num_drafted, num_accepted)
        # Drafts behind the first refused one were not judged.
        judged = min(num_drafted, num_accepted + 1)
        for place in range(judged):
            hit = float(place < num_accepted)
            self.estimate = self.MEMORY * self.estimate + (1 - self.MEMORY) * hit


def choose_mode(
    times: dict[SpeculationMode, StepTimes], *, rows: int, context: float
) -> tuple[SpeculationMode, float] | None:
    """Return the mode of the highest predicted speed-up with it, None where none is above 1."""
    best: tuple[SpeculationMode, float] | None = None
    for mode, mode_times in times.items():
        _, speedup = best_gamma(mode_times, PRIOR_ACCEPTANCE[mode], rows=rows, context=context)
        if speedup >= WORTHWHILE and (best is None or speedup > best[1]):
            best = (mode, speedup)
    return best
