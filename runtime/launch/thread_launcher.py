"""Stages as threads of this process: one device's way to run, and the oracle of the others."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from llmpq.child import CallFailed
from llmpq.devices.cluster import Cluster
from llmpq.out_of_memory import first_line
from llmpq.plans.plan import Plan
from llmpq.runtime.launch.stages.launcher import Launcher, StageHandle
from llmpq.runtime.launch.stages.stage_worker import StageWorker
from llmpq.runtime.links.thread_links import ThreadRendezvous
from llmpq.runtime.options.stage_settings import StageSettings

_END_S = 60.0
"""How long loops may take to end: a step under way is not broken off.

A thread that still computes when the interpreter ends would abort the process.
"""
_LOAD_END_S = 10.0
"""The same for a load, which may be stuck: it ends with the layer under way."""


class ThreadLauncher(Launcher):
    """All stages in this process; those on GPUs use the devices of the plan's numbers."""

    needs_rendezvous = moves_stages = False

    def __init__(self) -> None:
        self._stages: list[ThreadStage] = []
        self._rendezvous: ThreadRendezvous | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(broken=error is not None)

    def stop(self, *, but: Collection[StageHandle] = (), broken: bool = True) -> None:
        """End the stages; `broken`: without waiting for those that wait for each other."""
        assert not but, "threads of a plan end together"
        end_s = time.monotonic() + _END_S
        if self._rendezvous is not None and broken:
            self._rendezvous.break_off()
        for stage in self._stages:
            stage.kill(0)
        for stage in self._stages:
            stage.wait(end_s - time.monotonic())
            stage.release()  # an engine that is still referred to holds its stages' handles
        self._stages.clear()
        if self._rendezvous is not None and any(d.type == "cuda" for d in self._rendezvous.devices):
            gc.collect()  # models, graphs and their modules refer to each other
            torch.cuda.empty_cache()
        # What threads freed stays in their arenas otherwise: 30 MB a round of the demo model.
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
            trim(0)

    def start(
        self,
        plan: Plan,
        settings: Sequence[StageSettings],
        cluster: Cluster | None,
        left: Mapping[int, StageHandle] = MappingProxyType({}),
    ) -> list[ThreadStage]:
        """Make an actor per stage."""
        assert not left, "threads of a plan end together"
        devices = ["cpu" if s.is_cpu else f"cuda:{s.device_index}" for s in plan.places]
        self._rendezvous = ThreadRendezvous(devices, plan.workers)
        for index, own in enumerate(settings):
            actor = StageWorker(index, plan, own, threads=self._rendezvous)
            self._stages.append(ThreadStage(actor, self._rendezvous))
        return list(self._stages)


class ThreadStage:
    """An actor of this process; every call has a thread of its own."""

    def __init__(self, actor: StageWorker, rendezvous: ThreadRendezvous) -> None:
        self._actor: StageWorker | None = actor
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._calls: set[threading.Thread] = set()
        """Changed under the lock: who waits for them must find none that has yet to start."""
        self._load: threading.Thread | None = None

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of the actor."""
        answer: Future[Any] = Future()
        if self._actor is None:
            answer.set_exception(CallFailed("its thread has ended"))
            return answer
        asked = getattr(self._actor, method)

        def work() -> None:
            try:
                value = asked(*args)
            except BaseException as error:  # the caller's to judge
                self._rendezvous.break_off()
                answer.set_exception(
                    CallFailed(f"{type(error).__name__}: {first_line(error)}", error)
                )
            else:
                answer.set_result(value)

        thread = threading.Thread(target=work, daemon=True, name=f"llmpq {method}")
        if method == "load":
            self._load = thread
        with self._lock:
            thread.start()
            self._calls = {call for call in self._calls if call.is_alive()} | {thread}
        return answer

    def kill(self, pid: int) -> None:
        """Let the loop end with the step under way, and loading with the layer under way."""
        if self._actor is not None:
            self._actor.stop()

    def wait(self, limit_s: float) -> None:
        """Wait until the loop and whatever else was asked for has ended; not long for a load."""
        end_s = time.monotonic() + limit_s
        with self._lock:
            calls = list(self._calls)
        for thread in calls:
            most_s = _LOAD_END_S if thread is self._load else limit_s
            thread.join(max(0.0, min(most_s, end_s - time.monotonic())))

    def release(self) -> None:
        """Free the stage's weights and cache."""
        self._actor = None
