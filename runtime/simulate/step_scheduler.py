"""What a simulation asks of a scheduler: the runtime's has it, and counted_scheduler.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.requests.request import Ints, MicroBatch, Request


class StepScheduler(Protocol):
    """Decides the steps of one engine; all it has is as `engine/scheduler.py` says."""

    limits: PoolLimits

    @property
    def idle(self) -> bool:
        """Whether every submitted request has ended."""
        ...

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; `ValueError` if it can never run."""
        ...

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step, or None until another one completes."""
        ...

    def update_from_output(self, micro_batch: MicroBatch, tokens: Ints) -> list[Request]:
        """Take the tokens of the oldest step under way; return the requests that ended."""
        ...

    def rounds_ahead(self) -> int:
        """Return for how many rounds nothing but decoding can happen."""
        ...

    def repeats(self, groups: Sequence[Ints]) -> bool:
        """Whether these steps come again and again, in this order."""
        ...

    def next_caches(self, rows: Ints) -> list[int]:
        """Return the tokens in the caches of rows that decode, with their next step."""
        ...

    def pass_rounds(
        self, rounds: int, steps: int, under_way: Iterable[MicroBatch], token: int
    ) -> None:
        """Be as after so many rounds of so many steps."""
        ...
