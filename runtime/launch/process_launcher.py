"""Stages as plain processes of this host, without Ray: JSON lines on pipes (stage_process.py)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from llmpq import errors
from llmpq.cluster import Cluster
from llmpq.plan import Plan, StagePlan
from llmpq.runtime.launch.launcher import StageFailure
from llmpq.runtime.launch.stages.stage_settings import StageSettings
from llmpq.runtime.launch.stages.stage_wire import plan_data, read_answer, write_args

_KEPT_LINES = 20
"""Of what a process writes to stderr: the last line may say why it died."""
_RAISED = {
    kind.__name__: kind for kind in (ValueError, ConnectionError, MemoryError, RuntimeError)
} | {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.LlmpqError)
}
"""What a stage may raise by name; anything else becomes a RuntimeError that names it."""


class ProcessLauncher:
    """One process per stage; a GPU stage sees the GPU of its plan's device number."""

    meets_by_address = True

    def __init__(self, *, behind_server: bool = False) -> None:
        """`behind_server`: stages on CPUs leave them to this process whenever it wants one."""
        self._behind_server = behind_server
        self._stages: list[ProcessStage] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stage in self._stages:
            stage.kill()
        for stage in self._stages:
            stage.wait()

    def lost(self) -> None:
        """Nobody else keeps the stages."""

    def start(
        self, plan: Plan, settings: Sequence[StageSettings], cluster: Cluster | None
    ) -> list[ProcessStage]:
        """Start a process per stage; they import, construct their actors and wait for calls."""
        data = plan_data(plan)
        for index, stage in enumerate(plan.stages):
            first: dict[str, Any] = {"index": index, "plan": data}
            first |= {"settings": settings[index].to_data()}
            first |= {"lowest_priority": self._behind_server and stage.is_cpu}
            self._stages.append(ProcessStage(first, _environment(stage)))
        return list(self._stages)


class ProcessStage:
    """A process that answers calls; its death answers all that are open."""

    def __init__(self, first: dict[str, Any], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llmpq.runtime.launch.stages.stage_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, Future[Any]]] = {}
        """Method and answer of each call under way."""
        self._lock = threading.Lock()
        self._gone: StageFailure | None = None
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._listening = [
            threading.Thread(target=target, daemon=True) for target in (self._hear, self._overhear)
        ]
        for thread in self._listening:
            thread.start()
        self._write(first)

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of the process's actor."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._gone is not None:
                answer.set_exception(self._gone)
                return answer
            number = next(self._numbers)
            self._open[number] = method, answer
        self._write({"number": number, "call": method, "args": write_args(method, args)})
        return answer

    def kill(self, pid: int = 0) -> None:
        """End the process, a stopped one too."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def wait(self) -> None:
        """Wait for its end, and for what it said last."""
        self._process.wait()
        for thread in self._listening:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):  # what was written and never read
                if pipe is not None:
                    pipe.close()

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._lock:  # who reads its answers hears of its death
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _hear(self) -> None:
        """Hand answers to whoever waits for them, until the process ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._lock:
                method, answer = self._open.pop(message["number"])
            if "error" in message:
                answer.set_exception(_failure(message["error"], message["text"]))
            else:
                answer.set_result(read_answer(method, message["value"]))
        code = self._process.wait()
        self._listening[1].join()
        with self._lock:
            self._gone = StageFailure(self._obituary(code))
            waiting, self._open = list(self._open.values()), {}
        for _, answer in waiting:
            answer.set_exception(self._gone)

    def _overhear(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                self._said.append(line.strip())

    def _obituary(self, code: int) -> str:
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            hint = "; the kernel's out-of-memory killer sends it, too" if name == "SIGKILL" else ""
            return f"its process died (killed by {name}{hint})"
        last = f": {self._said[-1][:300]}" if self._said else ""
        return f"its process ended with code {code}{last}"


def _failure(name: str, text: str) -> StageFailure:
    kind = _RAISED.get(name)
    cause = kind(text) if kind is not None else RuntimeError(f"{name}: {text}")
    return StageFailure(f"{name}: {text}", cause)


def _environment(stage: StagePlan) -> dict[str, str]:
    """Return a stage's environment: the GPU it sees, as nvidia-smi counts them."""
    environment = dict(os.environ)
    if stage.is_cpu:
        return environment | {"OMP_NUM_THREADS": str(stage.threads or 1)}
    seen = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = seen.split(",") if seen else []
    number = stage.device_index
    chosen = names[number] if number < len(names) else str(number)
    return environment | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen}
