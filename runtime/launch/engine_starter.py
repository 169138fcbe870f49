"""Starts an engine's stages, and starts others when they are lost.

Stages that are lost are started anew, all of them, by the same launcher: what fork servers, Ray and
the system's page cache have is there still. One that is lost again and again before it serves has
no device: then `EngineOptions.on_loss` says whether to plan for the devices that are left, or to
give up.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from types import TracebackType
from typing import Self

from llmpq.cluster import Cluster
from llmpq.errors import DeadlineError, StageLostError
from llmpq.plan import Plan
from llmpq.runtime.launch.choose_launcher import make_launcher
from llmpq.runtime.launch.launcher import Launcher, OnLoad
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.launch.recovery import Recovery
from llmpq.runtime.launch.stages.stage_settings import StageSettings

MOST_DEATHS, MOST_REFUSALS = 5, 2
"""Starts in a row in which one stage dies, or says why it cannot start, that mean that it has no
device any more. Whoever kills stages on purpose may hit one that starts."""
_KEPT = 1000
"""Recoveries that are remembered."""
_log = logging.getLogger("llmpq.run")


class EngineStarter:
    """The stages of an engine, whatever becomes of them; its end takes them down."""

    def __init__(
        self, plan: Plan, settings: StageSettings, *, cluster: Cluster | None = None
    ) -> None:
        self.plan, self._settings, self._cluster = plan, settings, cluster
        self.recoveries: list[Recovery] = []
        """What was recovered, and what is; the newest last."""
        self._launcher: Launcher | None = None
        self.client: PipelineClient | None = None
        """Of the stages that were started last, which may be loading still."""
        self._start_s: list[float] = []
        """How long the stages took to start, each time after the first."""
        self._first_load_s = 0.0
        self._cancelled = self._is_recovered = False

    @property
    def on_loss(self) -> str:
        """What is done when a stage is lost."""
        return self._settings.options.on_loss

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.client is not None:
            self.client.kill()
        if self._launcher is not None:
            self._launcher.__exit__(kind, error, trace)

    def start(self, on_load: OnLoad | None = None) -> PipelineClient:
        """Start the stages for the first time; those that die are started again."""
        try:
            return self._started(on_load)
        except (StageLostError, DeadlineError) as error:
            if self.on_loss == "stop" or not self._may_come_back():
                raise
            self.lost(error)
        client = self.restart(on_load)
        self.resubmitted(idle=True)
        return client

    def lost(self, error: Exception) -> Recovery:
        """Note a loss; return what is being recovered, which it may be part of."""
        client = self.client
        if not self.recoveries or self.recoveries[-1].measured_s is not None:
            self.recoveries = self.recoveries[-_KEPT:]
            self.recoveries.append(
                Recovery(
                    reason=str(error),
                    phase="start-up" if client is None else client.phase,
                    stage=None if client is None else client.failed_stage,
                    predicted_s=self.predicted_s(),
                )
            )
        self._is_recovered = False
        return self.recoveries[-1]

    def predicted_s(self) -> float:
        """Return how long stages take to start again: as long as before, or as their loading."""
        return statistics.median(self._start_s) if self._start_s else self._first_load_s

    def restart(self, on_load: OnLoad | None = None) -> PipelineClient:
        """Start other stages in place of those that were lost, as often as it takes."""
        recovery, failures = self.recoveries[-1], Counter[int | None]()
        while True:
            recovery.num_attempts += 1
            began_s = time.perf_counter()
            try:
                client = self._started(on_load)
            except Exception as error:
                if self._cancelled:
                    raise
                blamed = None if self.client is None else self.client.failed_stage
                died = self._may_come_back()
                failures[blamed] += 1 if died else MOST_DEATHS // MOST_REFUSALS + 1
                if failures[blamed] >= MOST_DEATHS:
                    raise
                _log.warning("%s; it is started again", error)
                continue
            self._start_s.append(time.perf_counter() - began_s)
            return client

    def resubmitted(self, *, idle: bool) -> None:
        """Note that fresh stages have what was under way; `idle`: nothing was."""
        recovery = self.recoveries[-1]
        recovery.measured_s = time.perf_counter() - recovery.clock_s
        self._is_recovered = not idle
        _log.warning(
            "recovered in %.2f s (%.2f s predicted)", recovery.measured_s, recovery.predicted_s or 0
        )

    def recovered(self) -> None:
        """Note that tokens come."""
        if self._is_recovered:
            self._is_recovered = False
            recovery = self.recoveries[-1]
            recovery.pause_s = time.perf_counter() - recovery.clock_s

    def cancel(self) -> None:
        """End a start that is under way; called by another thread."""
        self._cancelled = True
        if self.client is not None:
            self.client.kill()

    def _may_come_back(self) -> bool:
        """Whether the last engine was lost by the death or the silence of a stage.

        One that says why it cannot start (no such file, no room, another device) will say it again.
        """
        return self.client is None or not self.client.was_refused

    def _started(self, on_load: OnLoad | None) -> PipelineClient:
        """Start all stages, in place of those that there were."""
        if self.client is not None:
            self.client.kill()
            self.client = None
        if self._launcher is not None and self._launcher.lost() is not None:
            self._launcher.__exit__(None, None, None)
            self._launcher = None
        if self._launcher is None:
            self._launcher = make_launcher(self.plan, self._settings.options).__enter__()
        else:
            self._launcher.stop()
        client = PipelineClient(self.plan, self._settings, self._cluster, on_load)
        self.client = client
        if self._cancelled:
            raise StageLostError("the engine was closed")
        client.place(self._launcher)
        began_s = time.perf_counter()
        client.begin()
        self._first_load_s = self._first_load_s or time.perf_counter() - began_s
        return client
