"""The log of a server whose lines are read late, or never."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from llmpq.runtime.serve.log_thread import LineQueue, Lines, lines_apart

_LOG = logging.getLogger("llmpq.serve.test")


@contextmanager
def root_that_writes_to(descriptor: int) -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers, _LOG.level
    with os.fdopen(descriptor, "w") as stream:
        root.handlers = [logging.StreamHandler(stream)]
        _LOG.setLevel(logging.INFO)
        try:
            yield
        finally:
            root.handlers = before
            _LOG.setLevel(level)


def test_lines_come_whole_and_in_order() -> None:
    read, write = os.pipe()
    with root_that_writes_to(write), lines_apart():
        for number in range(100):
            _LOG.info("line %d", number)
    with os.fdopen(read) as lines:
        assert lines.read().splitlines() == [f"line {number}" for number in range(100)]


def test_a_pipe_that_nobody_reads_holds_nothing_up() -> None:
    read, write = os.pipe()
    started_s = time.monotonic()
    with root_that_writes_to(write):
        with lines_apart():
            for number in range(12_000):
                _LOG.info("%d %s", number, "x" * 100)
            logged_s = time.monotonic() - started_s
        ended_s = time.monotonic() - started_s
    assert logged_s < 10 and ended_s < 20  # it would be for ever
    with os.fdopen(read) as lines:
        logged = lines.read().splitlines()
    assert logged[0].startswith("0 x") and 100 < len(logged) < 12_000


def test_it_says_how_many_lines_were_dropped() -> None:
    lines = Lines()
    handler = LineQueue(lines, most=2)
    for number in range(5):
        handler.emit(logging.makeLogRecord({"msg": str(number)}))
    for kept in ("0", "1"):
        record = lines.get_nowait()
        assert record is not None and record.getMessage() == kept
    handler.emit(logging.makeLogRecord({"msg": "5"}))
    record = lines.get_nowait()
    assert record is not None and record.getMessage().startswith("3 lines of the log were dropped")


def test_a_signal_amid_a_line_may_write_another() -> None:
    """A handler of signals runs between any two lines of Python, those of a queue's put, too."""
    lines = Lines()
    handler = LineQueue(lines)
    depth = 0

    def interrupted(frame: FrameType, event: str, _: object) -> Any:
        nonlocal depth
        if event == "line" and depth == 0:
            depth += 1
            handler.emit(logging.makeLogRecord({"msg": "ending"}))
            depth -= 1
        return interrupted

    def write() -> None:
        sys.settrace(interrupted)
        handler.enqueue(logging.makeLogRecord({"msg": "a request"}))
        sys.settrace(None)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(20)
    assert not writer.is_alive() and lines.qsize() > 2
