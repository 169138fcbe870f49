"""What a prompt gets: the names are those of vLLM's results. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    """Which of the prompt's answers."""
    text: str
    token_ids: Sequence[int]
    finish_reason: str
    """`stop` (end-of-text, a stop text or token), `length` or `abort`."""
    first_token_s: float
    """From submission to the first token."""
    total_s: float


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """None where tokens were given."""
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool = True

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text
