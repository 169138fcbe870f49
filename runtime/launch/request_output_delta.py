"""What an engine's callers hear of their requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmpq.runtime.request import Finished
from llmpq.runtime.token_rules import LogprobOutput


@dataclass(frozen=True, kw_only=True)
class RequestOutputDelta:
    """What is new of one request: tokens, its end, or the error that ended the engine."""

    id: int
    tokens: Sequence[int] = ()
    finished: Finished | None = None
    noted: LogprobOutput | None = None
    """Logprobs of those tokens, where they were asked for."""
    error: BaseException | None = None
    """What ended the engine; beside `finished`, what ended this request alone."""
    heard_s: float = 0.0
    """When it was read from the stages, by `time.perf_counter`; 0 for errors."""


Listener = Callable[[RequestOutputDelta], None]
"""Called in the engine's thread; it may not wait."""
