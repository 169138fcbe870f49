"""Whether a stage that loads gets on: what it does is counted there, and watched by the driver.

Loading takes minutes where weights are large or kernels are compiled, and reports nothing for long
stretches. But it computes, reads, or waits for a compiler that does. A stage of which none of this
can be seen for a while, or that does not answer, stands still.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from llmpq.kernels.native.file_lock import waited_s
from llmpq.runtime.launch.stages.launcher import OnLoad, StageHandle

_ASK_EVERY_S = 1.0
_GRAINS = (0.05, 64 * 1024, 1)
"""Seconds of processor time, bytes read and layers loaded that count as progress: polls take less
in a minute."""
_LINE_EVERY_S = 5.0
_log = logging.getLogger("llmpq.run")
_IO = Path("/proc/self/io")


class LoadSigns:
    """The stage's side: counters that grow while the thread that made this object loads."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._num_layers = 0

    def on_layer(self, index: int) -> None:
        """Count a layer that is loaded."""
        self._num_layers += 1

    def read(self) -> list[float]:
        """Return seconds of processor time and of waiting for compilers, bytes read, and layers."""
        worked_s = time.clock_gettime(self._clock) + _children_s() + waited_s()
        return [worked_s, _bytes_read(), self._num_layers]


class LoadWatch:
    """The driver's side: asks stages how they are and finds the one that stands still."""

    def __init__(
        self,
        stages: Sequence[StageHandle],
        limit_s: float,
        num_layers: Sequence[int],
        on_load: OnLoad | None = None,
    ) -> None:
        """`num_layers`: of each stage. `on_load`: see `OnLoad`."""
        now_s = time.monotonic()
        self._on_load = on_load
        self._stages = stages
        self._limit_s = limit_s
        self._num_layers = num_layers
        self._began_s = self._line_s = now_s
        self._asked: dict[int, Future[Any]] = {}
        self._asked_s: dict[int, float] = {}
        self._signs: dict[int, Sequence[float]] = {}
        self._moved_s = dict.fromkeys(range(len(stages)), now_s)

    def still(self, loading: Collection[int]) -> int | None:
        """Return a stage that is loading and has not got on within the limit, None if all have."""
        now_s = time.monotonic()
        for index in loading:
            asked = self._asked.get(index)
            if asked is not None and asked.done():
                del self._asked[index]
                if asked.exception() is None and self._moved(index, asked.result()["loading"]):
                    self._moved_s[index] = now_s
            if index not in self._asked and now_s - self._asked_s.get(index, 0.0) >= _ASK_EVERY_S:
                self._asked[index] = self._stages[index].call("health")
                self._asked_s[index] = now_s
            if now_s - self._moved_s[index] > self._limit_s:
                return index
        if self._on_load is not None:
            total = sum(self._num_layers)
            left = sum(self._num_layers[index] - self._loaded(index) for index in loading)
            self._on_load(total - left, total, self._said(loading))
        elif now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            _log.info("loading for %.0f s; %s", now_s - self._began_s, self._said(loading))
        return None

    def _loaded(self, index: int) -> int:
        """Return how many layers a stage that loads has, as far as is known."""
        return int((self._signs.get(index) or (0, 0, 0))[2])

    def _said(self, loading: Collection[int]) -> str:
        """Return how far the stages are; one with all layers compiles kernels and warms up."""
        parts = []
        for index in sorted(loading):
            done, of = self._loaded(index), self._num_layers[index]
            state = f"{done} of {of} layers" if done < of else "warming up"
            parts.append(f"stage {index}: {state}")
        return ", ".join(parts)

    def _moved(self, index: int, signs: Sequence[float] | None) -> bool:
        """Whether what a stage has done since it last got on is more than answering.

        A compiler that has ended takes its processor time with it.
        """
        if signs is None:  # has not begun
            return False
        before = self._signs.get(index)
        if before is not None and all(
            abs(now - old) < grain for now, old, grain in zip(signs, before, _GRAINS, strict=True)
        ):
            return False
        self._signs[index] = signs
        return True


def _children_s() -> float:
    """Return the processor time of what this process started: compilers start others, too."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _bytes_read() -> float:
    """Return the bytes this process has read from disks, 0 where the system does not say."""
    try:
        lines = _IO.read_text().splitlines()
    except OSError:
        return 0.0
    return float(next((x.split()[1] for x in lines if x.startswith("read_bytes")), 0))
