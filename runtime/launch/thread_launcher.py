"""Stages as threads of this process: one device's way to run, and the oracle of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from llmpq.cluster import Cluster
from llmpq.out_of_memory import first_line
from llmpq.plan import Plan
from llmpq.runtime.launch.launcher import StageFailure
from llmpq.runtime.launch.stages.stage_actor import StageActor
from llmpq.runtime.launch.stages.stage_settings import StageSettings
from llmpq.runtime.links.thread_links import ThreadMeeting

_END_S = 10.0
"""How long loops may take to end: a step under way is not broken off."""


class ThreadLauncher:
    """All stages in this process; those on GPUs use the devices of the plan's numbers."""

    meets_by_address = False

    def __init__(self) -> None:
        self._stages: list[ThreadStage] = []
        self._meeting: ThreadMeeting | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_s = time.monotonic() + _END_S
        if self._meeting is not None and error is not None:
            self._meeting.break_off()
        for stage in self._stages:
            stage.kill(0)
        for stage in self._stages:
            stage.wait(end_s - time.monotonic())
        self._stages.clear()

    def lost(self) -> None:
        """Nobody else keeps the stages."""

    def start(
        self, plan: Plan, settings: Sequence[StageSettings], cluster: Cluster | None
    ) -> list[ThreadStage]:
        """Make an actor per stage."""
        devices = ["cpu" if s.is_cpu else f"cuda:{s.device_index}" for s in plan.stages]
        self._meeting = ThreadMeeting(devices)
        plan_json = plan.dump_json()
        for index, own in enumerate(settings):
            actor = StageActor(index, plan_json, asdict(own), meeting=self._meeting)
            self._stages.append(ThreadStage(actor, self._meeting))
        return list(self._stages)


class ThreadStage:
    """An actor of this process; every call has a thread of its own."""

    def __init__(self, actor: StageActor, meeting: ThreadMeeting) -> None:
        self._actor, self._meeting = actor, meeting
        self._loop: threading.Thread | None = None

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of the actor."""
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                value = getattr(self._actor, method)(*args)
            except BaseException as error:  # the caller's to judge
                self._meeting.break_off()
                answer.set_exception(
                    StageFailure(f"{type(error).__name__}: {first_line(error)}", error)
                )
            else:
                answer.set_result(value)

        thread = threading.Thread(target=work, daemon=True, name=f"llmpq {method}")
        if method == "run":
            self._loop = thread
        thread.start()
        return answer

    def kill(self, pid: int) -> None:
        """Let the loop end with the step under way."""
        self._actor.stop()

    def wait(self, limit_s: float) -> None:
        """Wait for the loop's end."""
        if self._loop is not None:
            self._loop.join(max(0.0, limit_s))
