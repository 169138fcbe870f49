"""How many tokens to draft before verifying, and what came of it.

`FixedDrafter` always drafts as many; `AutoDrafter` asks the formulas of `llmpq.plans.speculation`
for the length that pays at this batch and context, with the acceptance it has observed, 0
included, and stops by the host's clock where rounds with drafts take longer a token than plain
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from llmpq.plans.speculation import (
    MAX_GAMMA,
    PRIOR_ACCEPTANCE,
    SpeculationMode,
    StepTimes,
    best_gamma,
    predicted_speedup,
)
from llmpq.runtime.drafts import ngram
from llmpq.runtime.drafts.round_times import RoundTimes
from llmpq.runtime.requests.request import Request


@dataclass
class Acceptance:
    """Counts of drafted and accepted tokens, per place in the draft."""

    drafted: list[int] = field(default_factory=lambda: [0] * 16)
    accepted: list[int] = field(default_factory=lambda: [0] * 16)
    verifies: int = 0
    refusals: int = 0
    """Verifies that refused a draft."""
    tokens: int = 0
    """Tokens that verifies yielded, each verify's own one included."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count one request's verify."""
        self.verifies += 1
        self.refusals += num_accepted < num_drafted
        self.tokens += num_accepted + 1
        for place in range(num_drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < num_accepted

    @property
    def per_token(self) -> float | None:
        """Share of the judged drafts that were accepted: those up to the first refused one."""
        judged = sum(self.accepted) + self.refusals
        return sum(self.accepted) / judged if judged else None

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


class Drafter(Protocol):
    """Chooses how many tokens a group drafts before it verifies, and may supply them itself."""

    @property
    def in_vain(self) -> bool:
        """Whether drafts can pay at no batch and context, so that they may end for good."""
        ...

    def gamma(self, requests: Sequence[Request]) -> int:
        """Return the draft length for a group; 0 means plain decoding."""
        ...

    def propose(self, request: Request, gamma: int) -> list[int] | None:
        """Return up to `gamma` tokens found without the model, None if the model drafts."""
        ...

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of one request's verify."""
        ...


class FixedDrafter:
    """Always drafts `gamma` tokens, with the model or by n-gram lookup."""

    def __init__(self, mode: SpeculationMode, gamma: int) -> None:
        if not 1 <= gamma <= MAX_GAMMA:
            raise ValueError(f"--gamma must be between 1 and {MAX_GAMMA} or auto, got {gamma}")
        self.mode, self._gamma = mode, gamma
        self.acceptance = Acceptance()
        self.rounds_by_gamma: dict[int, int] = {}
        """Draft length -> how many rounds were started with it, where lengths are chosen."""

    @property
    def reported_gamma(self) -> int | Literal["auto"]:
        """The draft length, or that it is chosen for every round."""
        return self._gamma

    @property
    def in_vain(self) -> bool:
        """Whether drafts can pay at no batch and context: never where their length is given."""
        return False

    @property
    def by_head(self) -> bool:
        """Whether the last stage drafts with the model's own head (MTP), as it samples."""
        return self.mode == "mtp"

    @property
    def rests(self) -> bool:
        """Whether no request gets drafts in the next rounds."""
        return False

    def gamma(self, requests: Sequence[Request]) -> int:
        """Return the draft length for a group."""
        return self._gamma

    def propose(self, request: Request, gamma: int) -> list[int] | None:
        """Return drafts found without the model, None if the model drafts."""
        if self.mode == "mtp":
            return request.drafts[:gamma]
        if self.mode != "ngram":
            return None
        newest = request.output[-ngram.LOOK_BACK :]
        rest = ngram.LOOK_BACK - len(newest)
        return ngram.propose([*(request.prompt[-rest:] if rest else ()), *newest], gamma)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of one request's verify; one without drafts was a plain step."""
        if num_drafted:
            self.acceptance.add(num_drafted, num_accepted)


class AutoDrafter(FixedDrafter):
    """Drafts as many tokens as the cost model and the observed acceptance make worth while."""

    MEMORY = 0.99
    """Weight of the past at each observed token: about the last hundred count."""

    PRIOR_TOKENS = 20
    """Observed tokens that the acceptance it starts from weighs as much as."""

    WORTH_A_CHANGE = 1.02
    """Least predicted gain for which a group of some size changes its draft length: the estimate
    wavers, and near the best length the speed hardly depends on it."""

    PROBES, PROBE_EVERY = 16, 64
    """N-grams are accepted as the text has it, and only drafts tell: so many are tried, and then
    one in so many rounds, where they do not seem to pay. Finding them costs nothing."""

    JUDGED, LOOK_EVERY = 12, 8
    """A model's drafts are given up once so many were judged and, looked at every so many rounds
    without any, what was kept of them makes them pay nowhere: a copy of the cache is kept for them.
    Until then they are tried, whatever the clock says."""

    def __init__(
        self,
        mode: SpeculationMode,
        times: StepTimes,
        *,
        acceptance: float | None = None,
        lengths: Sequence[int] = range(1, MAX_GAMMA + 1),
        corners: Sequence[tuple[int, float]] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`lengths`: those to choose from, 0 beside them. `clock`: the host's, to stop by it.

        `corners`: the (rows, context) that drafts have to pay at one of, not to be given up.
        """
        super().__init__(mode, MAX_GAMMA)
        self._clock = clock
        self._clocked: dict[int, RoundTimes] = {}
        """Rows of a group (up to a power of two) -> what its rounds take."""
        self._current: RoundTimes | None = None
        self._times, self._lengths = times, lengths
        self.estimate = PRIOR_ACCEPTANCE[mode] if acceptance is None else acceptance
        self._last: dict[int, int] = {}
        """Rows of a group -> the draft length chosen last."""
        self._idle_rounds = 0
        self._known = self.PRIOR_TOKENS
        self._corners = corners
        self._in_vain = False

    @property
    def reported_gamma(self) -> int | Literal["auto"]:
        """The draft length, or that it is chosen for every round."""
        return "auto"

    @property
    def in_vain(self) -> bool:
        """Whether the acceptance that was observed makes drafts pay nowhere."""
        return self._in_vain

    def gamma(self, requests: Sequence[Request]) -> int:
        """Return the draft length for a group; 0 where drafting does not pay, or did not."""
        rows = len(requests)
        clocked = self._clocked_for(rows)
        allowed = clocked is None or clocked.allows() or self._on_trial
        gamma = self._predicted(requests) if allowed else 0
        if clocked is not None:
            clocked.started(drafting=gamma > 0, rows=rows)
        self._idle_rounds = 0 if gamma > 0 else self._idle_rounds + 1
        if self._idle_rounds % self.LOOK_EVERY == self.LOOK_EVERY - 1:
            self._in_vain = self._pays_nowhere()
        self.rounds_by_gamma[gamma] = self.rounds_by_gamma.get(gamma, 0) + 1
        return gamma

    @property
    def rests(self) -> bool:
        """Whether drafts have lost by the clock at every size of group, and are not tried soon."""
        known = self._clocked.values()
        return bool(known) and all(clocked.rests for clocked in known)

    def _clocked_for(self, rows: int) -> RoundTimes | None:
        if self._clock is None:
            return None
        size = 1 << (rows - 1).bit_length()
        clocked = self._clocked.setdefault(size, RoundTimes(self._clock))
        if self._current is not None and self._current is not clocked:
            clocked.forget_time()
        self._current = clocked
        return clocked

    def _predicted(self, requests: Sequence[Request]) -> int:
        """Return the draft length that step times and the acceptance so far speak for."""
        rows = len(requests)
        context = sum(request.num_cached for request in requests) / rows
        gamma, speedup = best_gamma(
            self._times, self.estimate, rows=rows, context=context, lengths=self._lengths
        )
        last = self._last.get(rows, gamma)
        stay = predicted_speedup(self._times, self.estimate, last, rows=rows, context=context)
        if gamma > 0 and speedup < stay * self.WORTH_A_CHANGE:
            gamma = last
        self._last[rows] = gamma
        if gamma == 0 and self.mode == "ngram":
            untried = self.acceptance.verifies < self.PROBES
            gamma = min(self._lengths) if untried or self._idle_rounds >= self.PROBE_EVERY else 0
        return gamma

    @property
    def _may_end(self) -> bool:
        return self.mode != "ngram" and bool(self._corners)

    @property
    def _on_trial(self) -> bool:
        """Whether drafts that may be given up have yet to be judged, once some were."""
        return self._may_end and 0 < self._known - self.PRIOR_TOKENS < self.JUDGED

    def _pays_nowhere(self) -> bool:
        """Whether drafts pay nowhere at what was kept of them, the prior left out."""
        judged = self._known - self.PRIOR_TOKENS
        if not self._may_end or judged < self.JUDGED:
            return False
        kept = (sum(self.acceptance.accepted) + 1) / (judged + 2)
        return not any(
            best_gamma(self._times, kept, rows=rows, context=context, lengths=self._lengths)[0]
            for rows, context in self._corners
        )

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of one request's verify and update the acceptance per token."""
        super().observe(num_drafted, num_accepted)
        if self._current is not None:
            self._current.add(num_accepted + 1)
        # Drafts behind the first refused one were not judged.
        judged = min(num_drafted, num_accepted + 1)
        for place in range(judged):
            self._known += 1
            share = max(1 - self.MEMORY, 1 / self._known)
            self.estimate += share * (float(place < num_accepted) - self.estimate)


def speculation_report(drafter: FixedDrafter) -> dict[str, Any]:
    """Return what came of the drafts, as JSON data."""
    seen = drafter.acceptance
    return {
        "mode": drafter.mode,
        "gamma": drafter.reported_gamma,
        "given_up": drafter.in_vain,
        "rounds_by_gamma": drafter.rounds_by_gamma,
        "verifies": seen.verifies,
        "acceptance": seen.rate,
        "acceptance_per_token": seen.per_token,
        "acceptance_by_place": seen.per_place(),
        "tokens_per_verify": seen.tokens_per_verify(),
    }
