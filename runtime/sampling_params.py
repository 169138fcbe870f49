"""How tokens are chosen: what a user asks for, and what one request of it is told.

Standard library only; the arithmetic is in models/sampling.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "min_tokens": (0,),
    "bad_words": (None, (), []),
    "include_stop_str_in_output": (False,),
}
"""Names that other engines have, accepted only with values that change nothing."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How answers are sampled and when they end; names and defaults as in vLLM."""

    n: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = 16
    """None: as many as there is room for."""
    temperature: float = 1.0
    """0 is greedy: always the most likely token."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""
    top_k: int = 0
    """Only the k most likely tokens; 0 or -1 for all."""
    seed: int | None = None
    """None draws one; answer j of a prompt draws from seed + j."""
    stop: str | Sequence[str] | None = None
    """Texts at which an answer ends, without them."""
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    """Whether the end-of-text token ends nothing."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, neutral in _NOT_YET.items():
            value = getattr(self, name)
            if value not in neutral:
                raise ValueError(
                    f"{name}={value!r} is not supported yet, expected {neutral[0]!r}; leave it out"
                )
        for name, least in (("n", 1), ("max_tokens", 1), ("top_k", -1)):
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
        if not all(isinstance(text, str) and text for text in self.stop_texts):
            raise ValueError(f"stop must be a text or several, none empty, got {self.stop!r}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n={self.n} greedy answers would all be the same; set a temperature or leave n out"
            )
        self.choice(0)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts at which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def choice(self, seed: int) -> TokenChoice:
        """Return how the tokens of one answer are chosen, from this seed on."""
        return TokenChoice(
            temperature=float(self.temperature),
            top_k=self.top_k if self.top_k > 0 else None,
            top_p=float(self.top_p),
            seed=seed % 2**63,
        )
