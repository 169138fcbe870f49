"""Ends a command at Ctrl-C, SIGTERM or SIGHUP, whatever it is doing.

The signal raises `KeyboardInterrupt` in the main thread, and what the command has started goes
with it. An interrupt that a library loses is raised again. A command that has not ended `END_S`
later all the same (its main thread waits for what never comes), or that gets a third signal, is
ended as it is, with all processes that it has started.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from llmpq.errors import ExitCode

AGAIN_S = 1.0
"""After which a command that has lost its interrupt is interrupted again."""
END_S = 30.0
"""How long a command may take to end once it is interrupted: to close a Ray takes seconds."""
_MOST_SIGNALS = 3
"""The second signal ends a clean-up, the third one the process."""
_LOCKED_S = 5.0
"""After which, beyond that, a process ends whose interpreter runs no thread any more."""
_SAY_S = 1.0
"""How long a reader of stderr may take to make room for the reason."""
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_PACKAGE = str(Path(__file__).parents[1])


class Interrupts:
    """In its block, signals that end a command raise `KeyboardInterrupt` in the main thread.

    One that is ignored (nohup, a script's `&`) stays ignored.
    """

    def __init__(self, reason: Callable[[str], str], *, own_process: bool) -> None:
        """`reason`: the line on stderr if the process is ended as it is, from a clause that says
        why. `own_process`: it is the command's and may be ended so, also after the block.
        """
        self._reason, self._own_process = reason, own_process
        self._before: dict[int, Any] = {}
        self._count, self._number = 0, signal.SIGINT
        self._insists = self._is_handled = self._over = self._watches = False
        self._end_s = float("inf")
        """When the process is ended as it is, by the monotonic clock."""

    def __enter__(self) -> None:
        global _current
        if threading.current_thread() is not threading.main_thread():
            return
        for name in _SIGNALS:
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._interrupt)
        _current = self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _current
        self._over = True
        if not self._own_process:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            _current = None
        if self._count and kind is not None and issubclass(kind, Exception):
            raise KeyboardInterrupt  # of an import that was cut off, say

    def end_within(self, limit_s: float) -> None:
        """Have the process ended as it is, unless it has ended in so many seconds."""
        self._end_s = min(self._end_s, time.monotonic() + limit_s)
        if self._own_process:
            # A thread of the system's, which also ends an interpreter that is locked.
            left_s = max(0.0, self._end_s - time.monotonic()) + _LOCKED_S
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(left_s, exit=True, file=nowhere)
        if not self._watches:
            self._watches = True
            # No `threading.Thread`: this is called by a signal, also where the main thread starts
            # one and holds the lock that another start takes.
            _thread.start_new_thread(self._watch, ())

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._insists:
            self._insists = False
            self._is_handled = _is_interrupted(sys.exc_info()[1])
            if self._is_handled or self._over:
                return
            raise KeyboardInterrupt
        self._count += 1
        if self._own_process and self._over:
            self._end_now()
        if self._own_process and self._count >= _MOST_SIGNALS:
            self._end_now("ended at once, by the third signal")
        self._number, self._is_handled = signal.Signals(number), False
        self.end_within(END_S)
        raise KeyboardInterrupt

    def _watch(self) -> None:
        """See to it that an interrupt is heard, and that the process ends."""
        main = threading.main_thread().ident
        assert main is not None
        while self._own_process or not self._over:
            time.sleep(AGAIN_S)
            if self._own_process and time.monotonic() >= self._end_s:
                self._end_now(f"ended as it is, since it still waited {_place(main)}")
            if self._count and not (self._is_handled or self._over):
                self._insists = True
                if hasattr(signal, "pthread_kill"):  # not on Windows
                    signal.pthread_kill(main, self._number)  # ends its wait, too
                else:
                    _thread.interrupt_main(self._number)

    def _end_now(self, why: str = "") -> None:
        """End the process, and what it has started."""
        with contextlib.suppress(Exception):
            if why:
                _say(self._reason(why))
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(ExitCode.INTERRUPTED)


_current: Interrupts | None = None
"""Of the command that this process runs."""


def end_within(limit_s: float) -> None:
    """Have a command that ends in order ended as it is, unless it has in so many seconds.

    For handlers of signals that a command has in place of these.
    """
    if _current is not None:
        _current.end_within(limit_s)


def descendants() -> list[int]:
    """Return the processes below this one, by /proc; without those that began a session.

    Who begins one sees to what is left behind once this process has ended.
    """
    own, parents, sessions = os.getpid(), dict[int, int](), dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(entry.name)], sessions[int(entry.name)] = int(fields[1]), int(fields[3])
    found, level = [], [own]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found += level
    return [pid for pid in found if sessions[pid] == sessions[own]]


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is being handled, or what came of handling it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _place(thread: int) -> str:
    """Return where a thread is: the innermost of this package's lines, else the innermost."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "to end"
    path = frame.f_code.co_filename.removeprefix(f"{os.path.dirname(_PACKAGE)}/")
    return f"in line {frame.f_lineno} of {path}"


def _say(line: str) -> None:
    """Write a line on stderr, unless that would wait for a reader."""
    ready = select.poll()
    ready.register(2, select.POLLOUT)
    if ready.poll(1000 * _SAY_S):
        os.write(2, line.encode()[: select.PIPE_BUF])
