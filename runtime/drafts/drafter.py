"""What the scheduler asks of a drafter: a new kind is a class with these methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmpq.runtime.request import Request


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
