"""Progress of a quantisation on stderr: a bar on a terminal, a line per layer elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llmpq.units import format_size

_log = logging.getLogger("llmpq.quantize")


class QuantizeProgress:
    """Shows layers done and bytes written."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._bytes = num_layers, 0
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("quantising"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} layers, {task.fields[size]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("layers", total=num_layers, size="0 B")

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

    def update(self, index: int, size: int, resumed: bool) -> None:
        """Take a finished layer."""
        self._bytes += size
        if self._bar is not None:
            self._bar.update(self._task, completed=index + 1, size=format_size(self._bytes))
            return
        how = "already there" if resumed else "quantised"
        _log.info("layer %d of %d %s, %s", index + 1, self._num_layers, how, format_size(size))
