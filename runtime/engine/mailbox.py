"""The queue of requests to the first stage's loop, and of its results back.

No torch: a driver whose stages are other processes needs nothing else of the engine.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmpq.runtime.request import Finished, Progress, Request


@dataclass(frozen=True, kw_only=True)
class EngineOutputs:
    """Finished requests, streamed tokens and counters since the driver's last poll."""

    finished: Sequence[Finished]
    tokens: Mapping[int, Sequence[int]]
    """New tokens of the requests that are streamed or recorded, by id."""
    progress: Progress


@dataclass(frozen=True)
class Abort:
    """Ends a request with the step under way."""

    id: int | None
    """None: that all do."""


@dataclass(frozen=True)
class ResetPrefixCache:
    """Lets requests behind it find nothing that was computed before it."""


@dataclass
class Mailbox:
    """Requests on their way to the first stage's loop, and its outputs on their way back."""

    requests: queue.Queue[Request | Abort | ResetPrefixCache | None] = field(
        default_factory=queue.Queue
    )
    """Submissions; None closes: the loop ends when all submitted requests have ended."""
    finished: deque[Finished] = field(default_factory=deque)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    awaited: bool = False
    """Whether there is something for which the driver is woken."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    progress: Progress = field(default_factory=Progress)

    def collect(self, timeout_s: float) -> EngineOutputs:
        """Return what happened since the last call, waiting up to `timeout_s` for something."""
        with self.changed:
            if not self.awaited:
                self.changed.wait(timeout_s)
            self.awaited = False
            outputs = EngineOutputs(
                finished=list(self.finished), tokens=self.tokens, progress=self.progress
            )
            self.finished.clear()
            self.tokens = {}
            return outputs
