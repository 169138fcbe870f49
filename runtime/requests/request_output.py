"""What a prompt gets: the names are those of vLLM's results. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NO_ROOM = "max_model_len"
"""`stop_reason` of an answer that ended, by `length`, before its `max_tokens`: no room is left."""


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """How likely a token was, by the model's own logits, before penalties and temperature."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str
    """Its text by itself."""


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    """Which of the prompt's answers."""
    text: str
    token_ids: Sequence[int]
    finish_reason: str
    """`stop` (end-of-text, a stop text or token), `length`, `abort`, or `error`: what was asked
    of the text could not be followed to its end, and `stop_reason` says why."""
    first_token_s: float
    """From submission to the first token."""
    total_s: float
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    """For each token: itself, then the most likely ones; None where they were not asked for."""
    stop_reason: int | str | None = None
    """The stop token or text that ended it, or `NO_ROOM`; None for end-of-text and other ends."""
    queue_s: float = 0.0
    """From submission to its first step."""
    num_preemptions: int = 0
    """How often its keys and values were given up for others and computed again."""
    num_before: int = 0
    """Tokens that it went on from: an earlier run's (`llmpq-dist run --resume`)."""

    @property
    def per_token_s(self) -> float | None:
        """The mean time of a token after the first; None for an answer of less than two."""
        later = len(self.token_ids) - self.num_before - 1
        return (self.total_s - self.first_token_s) / later if later > 0 else None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' logprobs."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(row[token].logprob for token, row in pairs)


@dataclass(frozen=True, kw_only=True)
class CompletionDelta:
    """What is new of one answer since the last delta; the last one says how it ended."""

    index: int
    text: str
    """Text is held back while it may be the beginning of a stop text, or half a character."""
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_token_s: float = 0.0
    """From submission to the first token; known at the end, as what follows is."""
    total_s: float = 0.0
    queue_s: float = 0.0
    """From submission to its first step."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    num_preemptions: int = 0
    heard_s: float = 0.0
    """When the tokens were read from the stages, by `time.perf_counter`."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """None where tokens were given."""
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool = True
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    """For each token of the prompt, None for the first, which nothing leads to."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    failure: str | None = None
    """Why it was given up: its logits are not finite, or it ends whatever stage computes it."""
    engine: int | None = None
    """Which engine of a plan of several answered; None where there is one."""

    def or_raise(self) -> RequestOutput:
        """Return this; `ValueError` says why where it was given up."""
        if self.failure is not None:
            raise ValueError(self.failure)
        return self

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str:
        """Why the first answer ended: `stop`, `length`, `abort` or `error`."""
        return self.outputs[0].finish_reason
