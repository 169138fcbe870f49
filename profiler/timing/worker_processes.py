"""The parent's side of the timing processes: start them, keep them in step, notice their death.

K copies of a child may time the same case at the same time, as K stages of one host would run at
once; the case's timing is then the median over them. Knows no torch.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, Self, TypeVar

from llmpq.child import CallFailed, Child
from llmpq.devices.cluster import Device
from llmpq.errors import DeadlineError, StageLostError
from llmpq.file_form import FileForm
from llmpq.profiler.timing.cases import (
    CaseTime,
    Effort,
    LinkJob,
    LinkTimings,
    Ready,
    Sampling,
    SetUp,
    SumJob,
    SumTimings,
    TimedCase,
)
from llmpq.sizes.memory import CpuActivations
from llmpq.workload import Dtype

_TIMED = "llmpq.profiler.timing.timed_process"
SUSTAIN_S = 0.1
"""Of load before calls are timed on a whole GPU; a share of one stays below its power cap."""

ANSWER_LIMIT_S = 3600.0
"""Longest wait for an answer. 4096 tokens through a layer of a 66B model are 8.4 TFLOP: four calls
by a core of 10 GFLOP/s take 56 minutes."""

Answer = TypeVar("Answer", bound=FileForm)


class TimingProcess:
    """One timing process; a method that sends is followed by one that receives."""

    def __init__(self, set_up: SetUp, *, gpu: int | None) -> None:
        threads = str(set_up.threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = _name_of(gpu, env.get("CUDA_VISIBLE_DEVICES"))
        first = set_up.model_dump(mode="json")
        self._child = Child(_TIMED, first, environment=env, capture_stderr=False)
        self._answer = self._child.call("ready")

    def send(self, message: TimedCase | LinkJob | SumJob, *more: object) -> None:
        """Send one job; `more`: what its call takes beside it."""
        method = {LinkJob: "link", SumJob: "sums", TimedCase: "time"}[type(message)]
        self._answer = self._child.call(method, message.model_dump(mode="json"), *more)

    def receive(self, kind: type[Answer]) -> Answer:
        """Wait for one answer: `StageLostError` if the child died, `JobFailedError` if it did not.

        `DeadlineError` if nothing comes: it was stopped, or hangs.
        """
        return kind.parse_data(self._result(self._answer), where="child")

    def close(self) -> None:
        """End the child, whatever it does."""
        self._child.kill()
        self._child.wait()

    def _result(self, answer: Future[Any]) -> Any:
        try:
            return answer.result(ANSWER_LIMIT_S)
        except TimeoutError:
            raise DeadlineError(
                f"profiling process {self._child.pid} gave no answer for {ANSWER_LIMIT_S:.0f} s "
                "(expected one in less): was it stopped, or is the host overloaded? Run the same "
                "command again to resume, with smaller --max-tokens if it is only slow"
            ) from None
        except CallFailed as failure:
            if failure.cause is not None:
                lost = self._result(self._child.call("lost"))
                raise JobFailedError(str(failure), lost=lost) from None
            raise StageLostError(
                f"a profiling process was lost: {failure} (its message stands above); "
                "out of memory, perhaps: use --max-batch or --max-len, then run again to resume"
            ) from None


class JobFailedError(RuntimeError):
    """A child could not do a job; it goes on unless it is `lost`."""

    def __init__(self, error: str, *, lost: bool = False) -> None:
        super().__init__(error)
        self.lost = lost


class Group:
    """Copies of a child for one device kind, working in step."""

    def __init__(self, set_up: SetUp, *, copies: int, gpus: Sequence[int | None]) -> None:
        self._set_up, self._gpus = set_up, [gpus[i % len(gpus)] for i in range(copies)]
        self.children = [TimingProcess(set_up, gpu=gpu) for gpu in self._gpus]
        self._ready: Ready | None = None
        self.restarts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all children."""
        for child in self.children:
            child.close()

    def restart(self) -> None:
        """End all children and start new ones."""
        self.close()
        self.children = [TimingProcess(self._set_up, gpu=gpu) for gpu in self._gpus]
        self._ready = None
        self.restarts += 1
        _ = self.ready

    @property
    def ready(self) -> Ready:
        """What the children run on, once all have started."""
        if self._ready is None:
            self._ready = [child.receive(Ready) for child in self.children][0]
        return self._ready

    def time(
        self, case: TimedCase, *, alone: bool = False, seconds: float | None = None
    ) -> CaseTime:
        """Time a case on all copies at once; return the median over the copies.

        `alone`: on one of them, while the others wait. `seconds`: for how long, at least.
        """
        children = self.children[:1] if alone else self.children
        for child in children:
            child.send(case, seconds)
        timings = _receive_all(children, CaseTime)
        return timings[0].model_copy(
            update={
                name: statistics.median(getattr(timing, name) for timing in timings)
                for name in ("seconds", "low_s", "high_s")
            }
        )


def time_link(
    first: TimingProcess,
    second: TimingProcess,
    *,
    hidden: int,
    seconds: float,
    on_device: bool = False,
) -> LinkTimings:
    """Return one-way times of messages between two children that are ready."""
    first_job = LinkJob(
        rank=0, port=free_port(), hidden=hidden, seconds=seconds, on_device=on_device
    )
    jobs = [first_job, first_job.model_copy(update={"rank": 1})]
    for child, job in zip((first, second), jobs, strict=True):
        child.send(job)
    return _receive_all((first, second), LinkTimings)[0]


def time_sums(
    children: Sequence[TimingProcess], *, hidden: int, dtype: Dtype, most_tokens: int
) -> SumTimings:
    """Return what sums over children that are ready take."""
    first = SumJob(
        rank=0,
        count=len(children),
        port=free_port(),
        hidden=hidden,
        dtype=dtype,
        most_tokens=most_tokens,
    )
    for rank, child in enumerate(children):
        child.send(first.model_copy(update={"rank": rank}))
    return _receive_all(children, SumTimings)[0]


def _receive_all(children: Sequence[TimingProcess], kind: type[Answer]) -> list[Answer]:
    """Return every child's answer; `JobFailedError` once all have answered, if any failed.

    An answer left behind would pass for that to the next job.
    """
    answers: list[Answer] = []
    failed: JobFailedError | None = None
    for child in children:
        try:
            answers.append(child.receive(kind))
        except JobFailedError as error:
            failed = error if failed is None or error.lost else failed
    if failed is not None:
        raise failed
    return answers


def set_up_for(
    device: Device,
    model: str,
    *,
    sampling: Sampling,
    effort: Effort,
    cpu_activations: CpuActivations = "exact",
) -> SetUp:
    """Return the set-up of a child that stands for a device of the cluster."""
    whole_gpu = not (device.spec.is_cpu or device.emulate)
    load = {
        "rest_s": effort.rest_s if device.spec.is_cpu else 0.0,
        "sustain_s": SUSTAIN_S if whole_gpu else 0.0,
    }
    return SetUp(
        model=model,
        threads=device.threads or 1,
        cuda=not device.spec.is_cpu,
        sms=device.emulate.sms if device.emulate else None,
        sampling=sampling,
        cpu_activations=cpu_activations if device.spec.is_cpu else "exact",
        effort=effort.model_copy(update=load),
    )


def _name_of(gpu: int, visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES of a child for one of the GPUs that this process sees."""
    return visible.split(",")[gpu].strip() if visible else str(gpu)


def free_port() -> int:
    """Return a TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@lru_cache(maxsize=1)
def visible_gpus() -> tuple[str, ...]:
    """Return the names of this host's GPUs in order, as a fresh process sees them."""
    code = (
        "import json, sys, torch; n = torch.cuda.device_count();"
        "json.dump([torch.cuda.get_device_name(i) for i in range(n)], sys.stdout)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StageLostError(f"torch could not list the GPUs:\n{done.stderr.strip()}")
    return tuple(json.loads(done.stdout))
