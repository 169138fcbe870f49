"""A server's log lines are written in a thread of their own: a slow reader holds nothing up.

The server may have been started with a pipe as stderr that is not read.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import QueueHandler
from typing import Any

_MOST_LINES = 10_000
"""Lines buffered for a slow reader; further ones are dropped and counted."""
_PART_BYTES = select.PIPE_BUF
"""What a pipe that can be written to takes without waiting."""
_POLL_S, _END_S = 0.2, 1.0
"""How often it is tried, and how long the last lines may take."""


Lines = queue.SimpleQueue[logging.LogRecord | None]
"""Its `put` may be interrupted by another of the same thread, as signals' handlers write lines; a
`queue.Queue`'s may not: it would wait for ever for a lock that its own thread holds."""


class LineQueue(QueueHandler):
    """Puts lines in a queue while there is room."""

    queue: Lines
    num_dropped = 0

    def __init__(self, lines: Lines, most: int = _MOST_LINES) -> None:
        super().__init__(lines)
        self._most = most

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Leave a line as it is: it stays in this process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Keep a line, behind a word on those that were dropped before it."""
        if self.queue.qsize() >= self._most:
            self.num_dropped += 1
            return
        if self.num_dropped:
            dropped, self.num_dropped = self.num_dropped, 0
            self.queue.put(_note(dropped))
        self.queue.put(record)


def _note(num_dropped: int) -> logging.LogRecord:
    said = f"{num_dropped} lines of the log were dropped: those before them were not read"
    return logging.makeLogRecord({"name": "llmpq.serve", "levelno": logging.WARNING, "msg": said})


class LineWriter:
    """A thread that writes a queue's lines where handlers would; never waits inside a write."""

    def __init__(self, lines: Lines, handlers: Sequence[logging.Handler]) -> None:
        self._lines, self._handlers = lines, handlers
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True, name="llmpq log")
        self._thread.start()

    def end(self) -> None:
        """Write what is left, as far as somebody reads it."""
        self._lines.put(None)
        self._thread.join(_END_S)
        self._ending.set()
        self._thread.join(_END_S)

    def _write(self) -> None:
        while (record := self._lines.get()) is not None and not self._ending.is_set():
            for handler in self._handlers:
                if isinstance(handler, logging.StreamHandler) and _descriptor(handler) is not None:
                    self._put(handler, record)
                else:
                    handler.handle(record)

    def _put(self, handler: logging.StreamHandler[Any], record: logging.LogRecord) -> None:
        """Write a line by parts that a reader has room for."""
        to = _descriptor(handler)
        text = (handler.format(record) + handler.terminator).encode(errors="backslashreplace")
        while text and to is not None:
            _, ready, _ = select.select([], [to], [], _POLL_S)
            if ready:
                try:
                    text = text[os.write(to, text[:_PART_BYTES]) :]
                except OSError:  # the reader has gone, the disk is full: as logging does, go on
                    return
            elif self._ending.is_set():
                return


def _descriptor(handler: logging.StreamHandler[Any]) -> int | None:
    try:
        return int(handler.stream.fileno())
    except (OSError, ValueError, AttributeError):  # a test's stream, one that is closed
        return None


@contextmanager
def lines_apart() -> Iterator[None]:
    """Let a thread write what the root logger's handlers would, for as long as the block runs."""
    root = logging.getLogger()
    before, lines = list(root.handlers), Lines()
    writer = LineWriter(lines, before)
    root.handlers = [LineQueue(lines)]
    try:
        yield
    finally:
        root.handlers = before
        writer.end()
