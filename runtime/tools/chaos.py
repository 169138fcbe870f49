"""Kills stages of a running engine at random, so that anyone can see what becomes of a job."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from llmpq.runtime.entrypoints.llm import LLM

_log = logging.getLogger("llmpq.bench")
_AGAIN_S = 0.5


@dataclass(frozen=True)
class Kill:
    """A stage that was killed: when, by `time.monotonic`, and its process."""

    at_s: float
    pid: int


class Chaos:
    """As a context manager: kills a random stage every so many seconds, those that load too."""

    def __init__(
        self,
        pids: Callable[[], Sequence[int]],
        mean_s: float,
        *,
        evenly: bool = False,
        seed: int = 0,
    ) -> None:
        """`pids` returns the stages' processes of this host, such as `stage_pids` of an LLM.

        `mean_s`: seconds between two kills, on average; `evenly`: always.
        """
        self._pids, self._mean_s, self._evenly = pids, mean_s, evenly
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="llmpq chaos")
        self.kills: list[Kill] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        wait_s = self._pause_s()
        while not self._over.wait(wait_s):
            pids, wait_s = self._pids(), _AGAIN_S
            if pids:
                self._kill(self._random.choice(pids))
                wait_s = self._pause_s()

    def _pause_s(self) -> float:
        return self._mean_s if self._evenly else self._random.expovariate(1 / self._mean_s)

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills.append(Kill(time.monotonic(), pid))
            _log.info("chaos: killed pid %d", pid)


def stage_pids(llm: LLM) -> list[int]:
    """Return the processes of an LLM's stages; those of Ray on other hosts are not known here."""
    started = llm.stages_started
    pids = [] if started is None else started.stage_pids()
    return [pid for pid in pids if pid not in (0, os.getpid())]


def chaos_of(llm: LLM, mean_s: float, *, seed: int = 0) -> Chaos:
    """Return what kills an LLM's stages; `ValueError` where they are no processes of this host."""
    if not stage_pids(llm):
        raise ValueError(
            "--chaos kills stages that are processes of this host, and there are none: add "
            "--backend processes"
        )
    return Chaos(lambda: stage_pids(llm), mean_s, seed=seed)
