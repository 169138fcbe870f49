"""The log of a server whose lines are read late, or never."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from llmpq.runtime.serve.log_thread import lines_apart

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
        told = lines.read().splitlines()
    assert told[0].startswith("0 x") and 100 < len(told) < 12_000


def test_it_says_how_many_lines_were_dropped() -> None:
    import queue

    from llmpq.runtime.serve.log_thread import LineQueue

    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(2)
    handler = LineQueue(lines)
    for number in range(5):
        handler.emit(logging.makeLogRecord({"msg": str(number)}))
    for kept in ("0", "1"):
        record = lines.get_nowait()
        assert record is not None and record.getMessage() == kept
    handler.emit(logging.makeLogRecord({"msg": "5"}))
    record = lines.get_nowait()
    assert record is not None and record.getMessage().startswith("3 lines of the log were dropped")
