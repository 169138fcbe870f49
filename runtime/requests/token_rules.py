"""Constraints on a request's tokens beyond temperature, top-k, top-p and min-p.

The last stage gets them once, by the request's number, before the first stage gets the request;
what it noted (logprobs) is fetched by number, too. Steps carry the number only, so that rules may
be of any size. Standard library only; the arithmetic is in models/ruled_sampling.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

GuideKind = Literal["json", "regex", "choice", "grammar", "calls"]
NO_RULES = -1
"""Stands for the number of a request that has none."""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """What an answer's text must be: JSON of a schema, one of some texts, a call of a tool, ..."""

    kind: GuideKind
    text: str
    """The schema as JSON, the regular expression, the texts as a JSON list, the grammar, or tools
    as a JSON list of names and schemas."""


@dataclass(frozen=True, kw_only=True)
class Thought:
    """What stands around a thought; a guide begins behind one that the prompt has opened."""

    tokens: int | None
    """Of the answer, after which a thought is closed that the model has not closed; None: never."""
    begin: int
    """The token that opens a thought."""
    end: int
    """The token that closes it."""
    is_open: bool
    """Whether the prompt has opened one."""


@dataclass(frozen=True, kw_only=True)
class LogitsConstraints:
    """The rules of one request; the defaults change nothing."""

    repetition_penalty: float = 1.0
    """Logits of tokens seen, in the prompt or the answer: divided by it if positive, else times."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it is in the answer."""
    presence_penalty: float = 0.0
    """Taken from a token's logit if it is in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    """Tokens before which `end_ids` are not chosen."""
    end_ids: tuple[int, ...] = ()
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens none of which may be completed."""
    allowed_tokens: tuple[int, ...] = ()
    """The only tokens that may be chosen; empty for any."""
    thinking: Thought | None = None
    guide: Guide | None = None
    logprobs: int | None = None
    """Most likely tokens reported beside each chosen one; None reports nothing."""
    prompt_logprobs: int | None = None
    prompt: tuple[int, ...] = ()
    """The prompt's tokens, where a constraint needs them."""
    answer: tuple[int, ...] = ()
    """The tokens of the answer that are there already: it goes on from them."""

    @property
    def changes_logits(self) -> bool:
        """Whether a token may be chosen that would not be without the rules."""
        return self.guide is not None or self.weighs_tokens

    @property
    def weighs_tokens(self) -> bool:
        """As `changes_logits`, by anything but a guide."""
        return bool(
            self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or self.logit_bias
            or self.min_tokens
            or self.bad_tokens
            or self.allowed_tokens
            or (self.thinking is not None and self.thinking.tokens is not None)
        )

    def to_data(self) -> dict[str, Any]:
        """Return the rules as JSON data."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}  # `asdict` copies
        return own | {
            "logit_bias": [list(pair) for pair in self.logit_bias.items()],
            "guide": None if self.guide is None else asdict(self.guide),
            "thinking": None if self.thinking is None else asdict(self.thinking),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LogitsConstraints:
        """Return the rules that `to_data` wrote."""
        guide, thinking = data["guide"], data["thinking"]
        return cls(
            **{
                **data,
                "logit_bias": {token: bias for token, bias in data["logit_bias"]},
                "end_ids": tuple(data["end_ids"]),
                "bad_tokens": tuple(tuple(run) for run in data["bad_tokens"]),
                "allowed_tokens": tuple(data["allowed_tokens"]),
                "thinking": None if thinking is None else Thought(**thinking),
                "guide": None if guide is None else Guide(**guide),
                "prompt": tuple(data["prompt"]),
                "answer": tuple(data["answer"]),
            }
        )


@dataclass(frozen=True)
class TokenScore:
    """How likely a token was, by the model's own logits, before rules and temperature."""

    token: int
    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """1 for the most likely token; as many others are likelier as it says beyond that."""


TokenScores = tuple[TokenScore, ...]
"""The chosen token's first, then those of the most likely ones."""


@dataclass(kw_only=True)
class LogprobOutput:
    """Scores of one request, by the order of its tokens, and what became of its guide."""

    output: list[TokenScores] = field(default_factory=list)
    prompt: list[TokenScores] = field(default_factory=list)
    """Of the prompt's tokens from the second on."""
    failure: str | None = None
    """Why its guide could not be followed to its end."""

    def to_data(self) -> dict[str, Any]:
        """Return what was noted as JSON data."""
        parts = {"output": self.output, "prompt": self.prompt}
        scores = {
            key: [[[s.token, s.logprob, s.rank] for s in scores] for scores in part]
            for key, part in parts.items()
        }
        return {**scores, "failure": self.failure}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LogprobOutput:
        """Return what `to_data` wrote."""
        scores: dict[str, list[TokenScores]] = {
            key: [tuple(TokenScore(*score) for score in scores) for scores in data[key]]
            for key in ("output", "prompt")
        }
        return cls(**scores, failure=data["failure"])
