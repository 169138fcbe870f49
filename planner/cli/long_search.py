"""One line on stderr for who waits at a terminal while a search takes long."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AFTER_S = 3.0
"""Searches that end before say nothing."""


@contextmanager
def line_if_long(doing: str, time_limit_s: float | None = None) -> Iterator[None]:
    """Say what is being done, once, if the block takes longer than `AFTER_S`.

    Only where stderr is a terminal. By an alarm of the system (none on Windows), not by a thread:
    a process with a second thread cannot fork its solvers (solving/worker.py).
    """
    alarm = getattr(signal, "SIGALRM", None)
    waits = sys.stderr.isatty() and threading.current_thread() is threading.main_thread()
    if alarm is None or not waits:
        yield
        return

    def say(number: int, frame: FrameType | None) -> None:
        limit = "" if time_limit_s is None else f" (--time-limit {time_limit_s:g})"
        sys.stderr.write(f"llmpq-algo: {doing}{limit}\n")
        sys.stderr.flush()

    before = signal.signal(alarm, say)
    timer = signal.setitimer(signal.ITIMER_REAL, AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(alarm, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)
