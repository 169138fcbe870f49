"""Plans of engines that a fork of this process solves ahead, while this one does something else.

A search asks for one plan after the other, and each follows from its job alone. So a second process
may run the same search, or a part of it, and note each plan as it has it: this one takes the plan
that it would have solved, and counts the same work for it. What is answered is the same with a
second process and without, whichever of the two was quicker; what was solved in vain is lost.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self

from llmpq.planner.problem.work_clock import apart, spend_s
from llmpq.planner.solving.worker import end_fork, may_fork, start_fork
from llmpq.plans.plan import Plan

WAIT_S = 2e-3
"""Between two looks at a plan that the fork is at."""


@dataclass
class _Notes:
    """What a fork has noted in a file that both processes have."""

    file: IO[bytes]
    child: int
    ends: bool = False
    read: int = 0
    rest: bytes = b""
    begun: set[str] = field(default_factory=set)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def look(self) -> None:
        """Read what was noted since; whether the fork has ended is known before that."""
        self.ends = self.ends or os.waitpid(self.child, os.WNOHANG)[0] != 0
        while more := os.pread(self.file.fileno(), 1 << 20, self.read):
            self.read += len(more)
            self.rest += more
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            note = json.loads(line)
            self.begun.add(note["key"])
            if "work_s" in note:
                self.done[note["key"]] = note

    def take(self, key: str) -> dict[str, Any] | None:
        """Return what was noted of a plan, once it is there; None where it is not begun."""
        if key not in self.done:
            self.look()
        while key in self.begun and key not in self.done and not self.ends:
            time.sleep(WAIT_S)
            self.look()
        return self.done.get(key)


class PlansAhead:
    """Solves plans, each once in this process or in a fork of it."""

    def __init__(self) -> None:
        self._notes: _Notes | None = None
        """Those of the fork, in the process that has one."""
        self._file: IO[bytes] | None = None
        """Where this process, a fork, notes its own."""

    def solve(self, key: str, solved: Callable[[], Plan | None]) -> Plan | None:
        """Return what `solved` does; `key` says what it depends on."""
        note = None if self._notes is None else self._notes.take(key)
        if note is not None:
            spend_s(note["work_s"])
            plan = note["plan"]
            return None if plan is None else Plan.parse_data(plan, where="plan")
        self._note({"key": key})
        with apart() as clock:
            found = solved()
        plan = None if found is None else found.model_dump(mode="json", by_alias=True)
        self._note({"key": key, "plan": plan, "work_s": clock.spent_s})
        return found

    def begin(self, search: Callable[[], object]) -> None:
        """Have a fork run a search that asks for plans, instead of the one before.

        Nothing is done where there is one core, or a fork is not possible.
        """
        self.end()
        if _has_second_core() and may_fork():
            with suppress(OSError):  # no room for a file, or for a process
                file = tempfile.TemporaryFile()  # noqa: SIM115
                self._notes = _Notes(file, start_fork(lambda: self._run(file, search)))

    def end(self) -> None:
        """End the fork, if there is one."""
        if self._notes is not None:
            if not self._notes.ends:
                end_fork(self._notes.child)
            self._notes.file.close()
            self._notes = None

    def __enter__(self) -> Self:
        """Return itself; a fork ends with the block."""
        return self

    def __exit__(self, *of_error: object) -> None:
        """End the fork, if there is one."""
        self.end()

    def _run(self, file: IO[bytes], search: Callable[[], object]) -> None:
        """Search, in the fork."""
        self._notes, self._file = None, file
        search()

    def _note(self, note: dict[str, Any]) -> None:
        if self._file is not None:
            os.write(self._file.fileno(), json.dumps(note).encode() + b"\n")


def _has_second_core() -> bool:
    has_sets = hasattr(os, "sched_getaffinity")
    return (len(os.sched_getaffinity(0)) if has_sets else os.cpu_count() or 1) > 1
