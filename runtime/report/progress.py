"""Progress of a running job on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from llmpq.runtime import request

LINE_EVERY_S = 5.0

_log = logging.getLogger("llmpq.run")


class ProgressReporter:
    """Shows rows done and tokens per second since the first submission."""

    def __init__(self, num_rows: int, *, quiet: bool = False) -> None:
        self._num_rows = num_rows
        self._started_s = self._last_line_s = time.monotonic()
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} rows"),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("generating", total=num_rows, rate="")
        self._quiet = quiet

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: request.Progress, num_done: int) -> None:
        """Take the counters of the job; `num_done` counts failed and earlier rows too."""
        now_s = time.monotonic()
        rate = f"{progress.generated_tokens / max(now_s - self._started_s, 1e-3):.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(
                self._task, completed=num_done, rate=rate, description=progress.phase.ljust(8)
            )
        elif not self._quiet and now_s - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now_s
            _log.info(
                "%d/%d rows, %d running, %d waiting, %s",
                num_done,
                self._num_rows,
                progress.running,
                progress.waiting,
                rate,
            )


class LoadBar:
    """Shows how many layers the stages of a plan have loaded, where stderr is a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("loading"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("layers"),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("", total=None)

    @property
    def on_load(self) -> Callable[[int, int, str], None] | None:
        """What is called while stages load; None where there is no bar."""
        return None if self._bar is None else self._update

    def _update(self, done: int, total: int, said: str) -> None:
        assert self._bar is not None
        self._bar.update(self._task, completed=done, total=total, description=said)

    def stop(self) -> None:
        """Leave the bar as it is; again does nothing."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
