"""What benchmarks that kill stages share: three stages of unequal memory, signals, quantiles."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.precision import Precision
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.workload import Workload

DEMO = Path(__file__).parents[2] / "examples" / "demo-7m"


def unequal_plan(directory: Path, *, batch: int, prompt_len: int, gen_len: int) -> Plan:
    """Return a plan of a model in float32 over three CPU stages, the middle one the largest."""
    spec = ModelSpec.from_directory(directory)
    first = spec.num_layers // 4
    job = {"batch": batch, "prompt_len": prompt_len, "gen_len": gen_len, "dtype": "float32"}
    return manual_plan(
        spec,
        Workload.parse_data(job, where="the job"),
        splits=(first, spec.num_layers - first),
        precision=Precision.W16A16,
        prefill_microbatch=batch // 2,
        decode_microbatch=batch // 2,
        model_dir=str(directory),
    )


def strike(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process, which may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, how)


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the least value that a share of sorted values does not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def stages_of(command: psutil.Process) -> list[psutil.Process]:
    """Return the stage processes of a command, in the order in which they were started."""
    found = []
    for child in command.children(recursive=True):
        with suppress(psutil.Error):
            if any("stage_process" in word for word in child.cmdline()):
                found.append(child)
    return sorted(found, key=lambda process: process.pid)


@dataclass(frozen=True)
class Kill:
    """A stage that was killed: when, by `time.monotonic`, and its process."""

    at_s: float
    pid: int


class Killer:
    """As a context manager: kills one stage of a command every so many seconds, at random."""

    def __init__(self, command: psutil.Process, every_s: float, *, seed: int = 0) -> None:
        self._command, self._every_s = command, every_s
        self._random, self._over = random.Random(seed), threading.Event()
        self.kills: list[Kill] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
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

    def _run(self) -> None:
        next_s = time.monotonic() + self._every_s
        while not self._over.wait(max(0.0, next_s - time.monotonic())):
            next_s += self._every_s
            with suppress(psutil.Error):
                stages = stages_of(self._command)
                if stages:
                    victim = self._random.choice(stages).pid
                    strike(victim)
                    self.kills.append(Kill(time.monotonic(), victim))
