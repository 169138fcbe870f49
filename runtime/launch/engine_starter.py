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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

from llmpq.cluster import Cluster
from llmpq.errors import DeadlineError, LlmpqError, StageLostError
from llmpq.plan import Plan
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.launch.choose_launcher import make_launcher
from llmpq.runtime.launch.launcher import Launcher, OnLoad
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.launch.recovery import Recovery
from llmpq.runtime.launch.stages.stage_settings import StageSettings
from llmpq.runtime.options import EngineOptions

MOST_DEATHS, MOST_REFUSALS = 5, 2
"""Starts in a row in which one stage dies, or says why it cannot start, that mean that it has no
device any more."""
_DYING_S = 60.0
"""For how long starts must have failed like that: a tester who kills stages at random may hit some
that start."""
_KEPT = 1000
"""Recoveries that are remembered."""
_log = logging.getLogger("llmpq.run")


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """Another plan of the same job."""

    plan: Plan
    options: EngineOptions
    limits: PoolLimits
    change: Mapping[str, Any]
    """What is different, as JSON data."""


class Replan(Protocol):
    """What plans again."""

    def __call__(self, plan: Plan, index: int, *, whole_node: bool) -> Replanned:
        """Return a plan without the device of a stage, or without any of its node."""
        ...


class EngineStarter:
    """The stages of an engine, whatever becomes of them; its end takes them down."""

    def __init__(
        self,
        plan: Plan,
        settings: StageSettings,
        *,
        cluster: Cluster | None = None,
        replan: Replan | None = None,
    ) -> None:
        """`replan` makes other plans when a device is gone; without it that is the end."""
        self.plan = plan
        self._settings = settings
        self._cluster = cluster
        self._replan = replan
        self.limits: PoolLimits | None = None
        """Of another plan: which requests it has no room for."""
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
        """Start the stages for the first time; those that die while they load start again."""
        try:
            return self._started(on_load)
        except (StageLostError, DeadlineError) as error:
            placed = self.client is not None and self.client.is_placed
            if self.on_loss == "stop" or not placed or not self._may_come_back():
                raise
            self.lost(error)
        client = self.restart(on_load)
        self.resubmitted()
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
        recovery = self.recoveries[-1]
        failures, refusals = Counter[int | None](), Counter[int | None]()
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
                placed = self.client is not None and self.client.is_placed
                failures[blamed] += 1
                refusals[blamed] += not died
                tried_s = time.perf_counter() - recovery.clock_s
                if placed and not self._is_hopeless(failures[blamed], refusals[blamed], tried_s):
                    _log.warning("%s; it is started again", error)
                    continue
                lost = blamed if placed else recovery.stage
                if self._replan is None or lost is None:
                    raise
                _log.warning("%s; its device is given up", error)
                self._plan_without(lost, whole_node=not placed, reason=error)
                failures.clear()
                refusals.clear()
                continue
            self._start_s.append(time.perf_counter() - began_s)
            return client

    @staticmethod
    def _is_hopeless(num_failures: int, num_refusals: int, tried_s: float) -> bool:
        """Whether a stage that failed so often while it started has no device any more."""
        dies = num_failures >= MOST_DEATHS and tried_s >= _DYING_S
        return dies or num_refusals >= MOST_REFUSALS

    def _plan_without(self, index: int, *, whole_node: bool, reason: Exception) -> None:
        """Go on by another plan, or say why there is none."""
        assert self._replan is not None
        recovery = self.recoveries[-1]
        try:
            made = self._replan(self.plan, index, whole_node=whole_node)
        except (LlmpqError, ValueError) as error:
            raise type(error)(f"{error}; what was lost: {reason}") from None
        self.plan, self.limits = made.plan, made.limits
        kept = self._settings.options.layer_cache
        self._settings = replace(
            self._settings, options=replace(made.options, keep_layers_in=None, layer_cache=kept)
        )
        self._cluster = None
        recovery.action, recovery.plan, recovery.stage = "replan", made.change, None
        now = made.change["now"]
        _log.warning(
            "planned again: weights %s (before: %s), KV %s, %d requests at once, over %s",
            now["weights"],
            made.change["before"]["weights"],
            now["kv"],
            now["requests"],
            ", ".join(stage["device"] for stage in now["stages"]),
        )

    def resubmitted(self, *, num_requests: int = 0, num_kept: int = 0) -> None:
        """Note that fresh stages have what was under way: requests, and tokens that they had."""
        recovery = self.recoveries[-1]
        recovery.num_requests, recovery.num_kept = num_requests, num_kept
        recovery.measured_s = time.perf_counter() - recovery.clock_s
        self._is_recovered = num_requests > 0
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
