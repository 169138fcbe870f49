"""Kills stages of a running engine at random, so that anyone can see what becomes of a job."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from llmpq.runtime.llm import LLM

_log = logging.getLogger("llmpq.bench")
_AGAIN_S = 0.5


class Chaos:
    """As a context manager: kills a random stage by a mean interval, those that load too."""

    def __init__(self, llm: LLM, mean_s: float, *, seed: int = 0) -> None:
        """`mean_s`: seconds between two kills, on average."""
        self._llm = llm
        self._mean_s = mean_s
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True, name="llmpq chaos")
        self.num_kills = 0

    def __enter__(self) -> Self:
        if not self._pids():
            raise ValueError(
                "--chaos kills stages that are processes of this host, and there are none: add "
                "--backend processes"
            )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _pids(self) -> list[int]:
        """Return the stages' processes of this host; those of Ray on others are not known here."""
        started = self._llm.stages_started
        pids = [] if started is None else started.stage_pids()
        return [pid for pid in pids if pid not in (0, os.getpid())]

    def _kill(self) -> None:
        wait_s = self._random.expovariate(1 / self._mean_s)
        while not self._over.wait(wait_s):
            pids, wait_s = self._pids(), _AGAIN_S
            if pids:
                victim = self._random.choice(pids)
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    self.num_kills += 1
                    _log.info("chaos: killed pid %d", victim)
                wait_s = self._random.expovariate(1 / self._mean_s)
