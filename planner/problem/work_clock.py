"""A clock that counts what searches compute: the same command searches as far under any load.

Searches share out their limits in seconds of this clock. It goes on by the calls of array functions
and by the elements they work on, each as long as it takes on one core, never by time. The time of
day (of live traffic: CPU time) ends a search only at `ends_at`, the user's own time limit, and the
clock then says so (`cut`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

CALL_S, ELEMENT_S = 2e-6, 1.5e-9
"""Seconds of a call of an array function, and of an element that it works on."""
LATE_S = 1e9
"""What the clock goes on by whenever it is read behind `ends_at`: no deadline is after that."""


class WorkClock:
    """Seconds of work so far."""

    def __init__(
        self, ends_at: float = math.inf, time_s: Callable[[], float] = time.perf_counter
    ) -> None:
        """`ends_at`: of `time_s`."""
        self.ends_at = ends_at
        self._time_s = time_s
        self.spent_s = 0.0
        self.cut = False
        """Whether a search read the clock behind `ends_at`."""

    def read(self) -> float:
        """Return the seconds so far; a reading is a call itself."""
        self.spent_s += CALL_S
        if self._time_s() > self.ends_at:
            self.cut = True
            self.spent_s += LATE_S
        return self.spent_s


class Timer:
    """What passes from its making on, by both clocks."""

    def __init__(self) -> None:
        self._began_s, self._from_s = time.perf_counter(), now_s()

    @property
    def seconds(self) -> float:
        """Time, as people see it."""
        return time.perf_counter() - self._began_s

    @property
    def work_s(self) -> float:
        """Work, in seconds of the clock of searches."""
        return now_s() - self._from_s


_CLOCK: ContextVar[WorkClock] = ContextVar("clock of the search")


@contextmanager
def counting(
    ends_at: float = math.inf, time_s: Callable[[], float] = time.perf_counter
) -> Iterator[WorkClock]:
    """Give the searches inside a clock of their own, which is cut at `ends_at` of `time_s`."""
    token = _CLOCK.set(WorkClock(ends_at, time_s))
    try:
        yield _CLOCK.get()
    finally:
        _CLOCK.reset(token)


@contextmanager
def apart() -> Iterator[WorkClock]:
    """Give the search inside a clock that begins at 0, and count its work when it is over.

    It counts the same to the last bit whatever was done before; the time ends it as it would.
    """
    around = _clock()
    try:
        with counting(around.ends_at, around._time_s) as clock:
            yield clock
    finally:
        around.spent_s += clock.spent_s
        around.cut |= clock.cut


def now_s() -> float:
    """Return the seconds of work so far: differences and deadlines are of them."""
    return _clock().read()


def spend(calls: int, elements: float = 0) -> None:
    """Count the work of so many calls of array functions, and of the elements of all of them."""
    _clock().spent_s += calls * CALL_S + elements * ELEMENT_S


def spend_s(seconds: float) -> None:
    """Count what a solver took that stops by the time of day itself."""
    _clock().spent_s += seconds


def _clock() -> WorkClock:
    clock = _CLOCK.get(None)
    if clock is None:
        clock = WorkClock()
        _CLOCK.set(clock)
    return clock
