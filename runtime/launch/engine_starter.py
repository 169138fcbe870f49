"""Starts an engine's stages, and starts others when they are lost.

A stage that is lost is started anew by the same launcher: what fork servers, Ray and the system's
page cache have is there still. The others' processes go on with the layers that they hold, where
the launcher can have that. One that is lost again and again before it serves has no device: then
`EngineOptions.on_loss` says whether to plan for the devices that are left, or to give up.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from llmpq.devices.cluster import Cluster
from llmpq.errors import DeadlineError, LlmpqError, StageLostError
from llmpq.plans.plan import Plan
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.launch.choose_launcher import choose_backend, make_launcher
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.launch.recovery import Recovery
from llmpq.runtime.launch.stages.launcher import Launcher, OnLoad, StageHandle
from llmpq.runtime.launch.stages.stage_place import DeviceOf, device_of
from llmpq.runtime.launch.start_times import StartModel
from llmpq.runtime.options.engine_options import Backend, EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings

MOST_DEATHS, MOST_REFUSALS = 5, 2
"""Starts in a row in which one stage dies, or says why it cannot start, that mean that it has no
device any more."""
_ALL_ANEW = 3
"""The start in a row, of those that fail, for which no process goes on: whatever one of them has
come to, it has not then."""
_DYING_S = 60.0
"""For how long starts must have failed like that: a tester who kills stages at random may hit some
that start."""
MOST_FAULTS, FAULT_WINDOW_S = 2, 3600.0
"""Faults that a device reports of itself within so long that mean that it is not to be trusted: at
a first restart a card takes memory that has failed out of use."""
_KEPT = 1000
"""Recoveries that are remembered."""
_ORDER: Sequence[Backend] = ("threads", "processes", "ray")
"""Each can start what those before it can."""
_log = logging.getLogger("llmpq.run")


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """Another plan of the same job."""

    plan: Plan
    options: EngineOptions
    limits: PoolLimits
    change: Mapping[str, Any]
    """What is different, as JSON data."""
    before: Plan | None = None
    """The plan before at the costs of this one; None where it is not known there."""


class Replan(Protocol):
    """What plans again."""

    def __call__(
        self, plan: Plan, index: int, *, whole_node: bool = False, less_memory: bool = False
    ) -> Replanned:
        """Return a plan without the device of a stage, or without any of its node.

        `less_memory`: with less of its memory, unless it has been given less before.
        """
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
        self._backend: Backend = "threads"
        """How the launcher starts stages."""
        self.client: PipelineClient | None = None
        """Of the stages that were started last, which may be loading still."""
        self._before: tuple[Plan, StageSettings, Cluster | None, PoolLimits | None] | None = None
        """What ran before a plan that has yet to start."""
        self._times = StartModel(layer_bytes=_layer_bytes(plan, settings))
        self._started_plan = plan
        """That of the stages that were started last."""
        self._cancelled = self._is_recovered = False
        self._faults: dict[DeviceOf, list[float]] = {}
        """When devices reported faults of their own, of late."""
        self._distrusted: tuple[int, Exception] | None = None
        """A stage whose device is to be given up, and why."""

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
        if client is not None:
            self._times.begun(client.took)
        if not self.recoveries or self.recoveries[-1].measured_s is not None:
            self.recoveries = self.recoveries[-_KEPT:]
            self.recoveries.append(
                Recovery(
                    reason=str(error),
                    phase="start-up" if client is None else client.phase,
                    stage=None if client is None else client.failed_stage,
                    loss=None if client is None else client.loss,
                    predicted_s=self.predicted_s(
                        lost=None if client is None else client.failed_stage
                    ),
                )
            )
        self._is_recovered = False
        if client is not None and client.loss == "device" and client.failed_stage is not None:
            self._note_fault(client.plan, client.failed_stage, error)
        return self.recoveries[-1]

    def _note_fault(self, plan: Plan, index: int, error: Exception) -> None:
        """Note that a stage's device reported a fault of its own."""
        now_s, device = time.monotonic(), device_of(plan.places[index])
        before = [then for then in self._faults.get(device, ()) if now_s - then < FAULT_WINDOW_S]
        self._faults[device] = [*before, now_s]
        if len(before) + 1 >= MOST_FAULTS:
            self._distrusted = index, error

    def distrust(self, error: Exception) -> bool:
        """Give up the device of the stage that was lost, as no request is to blame for that.

        Whether another plan may do without it, or with less of its memory.
        """
        client = self.client
        if self._replan is None or client is None or client.failed_stage is None:
            return False
        if client.loss not in ("kernel", "memory"):
            return False
        self._distrusted = client.failed_stage, error
        return True

    def planned(self, made: Replanned, *, reason: str, action: str) -> Recovery:
        """Note that the stages will be those of another plan; return what begins with that.

        The next `restart` starts them, or those that there were where they cannot be started.
        """
        self.recoveries = self.recoveries[-_KEPT:]
        self.recoveries.append(
            Recovery(
                reason=reason,
                phase="start-up" if self.client is None else self.client.phase,
                action=action,
                plan=made.change,
                predicted_s=self.predicted_s(made.plan),
            )
        )
        self._before = (self.plan, self._settings, self._cluster, self.limits)
        self._use(made)
        return self.recoveries[-1]

    def _go_back(self, error: Exception) -> None:
        """Take the plan before, as the one that was chosen instead cannot be started."""
        assert self._before is not None
        self.plan, self._settings, self._cluster, self.limits = self._before
        self._before = None
        recovery = self.recoveries[-1]
        recovery.undone = str(error)
        _log.warning("%s; the plan before goes on", error)

    def predicted_s(self, plan: Plan | None = None, *, lost: int | None = None) -> float:
        """Return how long stages of a plan take to start in place of those that there are.

        `plan`: the one that runs, by default; `lost`: the stage whose process is gone.
        """
        launcher, before = self._launcher, self._started_plan
        left: set[DeviceOf] = set()
        if launcher is not None and launcher.moves_stages and not (plan is None and lost is None):
            left = {device_of(place) for index, place in enumerate(before.places) if index != lost}
        return self._times.predicted_s(plan or self.plan, before, left)

    def restart(self, on_load: OnLoad | None = None) -> PipelineClient:
        """Start other stages in place of those that were lost, as often as it takes."""
        recovery = self.recoveries[-1]
        failures, refusals = Counter[int | None](), Counter[int | None]()
        while True:
            if self._distrusted is not None:
                (index, why), self._distrusted = self._distrusted, None
                self._give_up(index, why)
            recovery.num_attempts += 1
            try:
                client = self._started(on_load, keep=failures.total() + 1 != _ALL_ANEW)
            except Exception as error:
                if self._cancelled:
                    raise
                blamed = None if self.client is None else self.client.failed_stage
                died = self._may_come_back()
                placed = self.client is not None and self.client.is_placed
                failures[blamed] += 1
                refusals[blamed] += not died
                if self._before is not None and failures.total() >= MOST_REFUSALS:
                    self._go_back(error)
                    failures.clear()
                    refusals.clear()
                    continue
                tried_s = time.perf_counter() - recovery.clock_s
                if placed and not self._is_hopeless(failures[blamed], refusals[blamed], tried_s):
                    _log.warning("%s; it is started again", error)
                    continue
                lost = blamed if placed else recovery.stage
                if self._replan is None or lost is None:
                    raise
                self._plan_without(lost, whole_node=not placed, reason=error)
                failures.clear()
                refusals.clear()
                continue
            self._before = None
            recovery.num_held = sum(load.num_held for load in client.load_reports)
            recovery.num_loaded = (
                sum(place.num_layers for place in self.plan.places) - recovery.num_held
            )
            return client

    @staticmethod
    def _is_hopeless(num_failures: int, num_refusals: int, tried_s: float) -> bool:
        """Whether a stage that failed so often while it started has no device any more."""
        dies = num_failures >= MOST_DEATHS and tried_s >= _DYING_S
        return dies or num_refusals >= MOST_REFUSALS

    def _give_up(self, index: int, reason: Exception) -> None:
        """Go on without a device that is not to be trusted, or end."""
        if self._replan is None:
            raise StageLostError(
                f"{reason}; it is fault {MOST_FAULTS} of this device within "
                f"{FAULT_WINDOW_S / 60:.0f} minutes, and no other may take over: "
                "--on-loss replan goes on without it"
            )
        self._plan_without(index, whole_node=False, reason=reason)

    def _plan_without(self, index: int, *, whole_node: bool, reason: Exception) -> None:
        """Go on by another plan, or say why there is none."""
        assert self._replan is not None
        recovery = self.recoveries[-1]
        less = not whole_node and self.client is not None and self.client.loss == "memory"
        if less:
            _log.warning("%s; it is planned with less memory", reason)
        else:
            _log.warning("%s; its device is given up", reason)
        try:
            made = self._replan(self.plan, index, whole_node=whole_node, less_memory=less)
        except (LlmpqError, ValueError) as error:
            raise type(error)(f"{error}; what was lost: {reason}") from None
        self._use(made)
        recovery.action, recovery.plan, recovery.stage = "replan", made.change, None
        passed_s = time.perf_counter() - recovery.clock_s
        recovery.predicted_s = passed_s + self.predicted_s(made.plan, lost=index)

    def _use(self, made: Replanned) -> None:
        self.plan, self.limits = made.plan, made.limits
        kept = self._settings.options.layer_cache
        self._settings = replace(
            self._settings, options=replace(made.options, keep_layers_in=None, layer_cache=kept)
        )
        self._cluster = None
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

    def _started(self, on_load: OnLoad | None, *, keep: bool = False) -> PipelineClient:
        """Start all stages, in place of those that there were; `keep`: in their processes."""
        left: Mapping[DeviceOf, StageHandle] = {}
        if self.client is not None:
            began_s = time.perf_counter()
            if keep:
                left = self.client.leave()
            else:
                self.client.kill()
            self._times.leave_s = time.perf_counter() - began_s
            self.client = None
        backend = choose_backend(self.plan, self._settings.options)
        launcher = self._launcher
        if launcher is not None and (launcher.lost() is not None or self._outgrown(backend)):
            launcher.__exit__(None, None, None)
            self._launcher, left = None, {}
        if self._launcher is None:
            self._launcher = make_launcher(self.plan, self._settings.options).__enter__()
            self._backend = backend
        settings = replace(self._settings, awaited=bool(self.recoveries))
        client = PipelineClient(self.plan, settings, self._cluster, on_load)
        self.client = client
        if self._cancelled:
            raise StageLostError("the engine was closed")
        client.place(self._launcher, left)
        self._started_plan = self.plan
        client.begin()
        self._times.learn(self.plan, client.took, client.load_reports, client.moved)
        return client

    def _outgrown(self, backend: Backend) -> bool:
        """Whether a plan has stages that the launcher of a smaller one cannot start."""
        return _ORDER.index(backend) > _ORDER.index(self._backend)


def _layer_bytes(plan: Plan, settings: StageSettings) -> float:
    """Return about how many bytes of a checkpoint a layer is: what a plan or else its files say."""
    memory = [place.memory for place in plan.places]
    planned = sum(one.weights_bytes for one in memory if one is not None)
    if planned or settings.options.load_format == "dummy":
        return planned / plan.model.num_layers
    path = Path(settings.model_dir)
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files if file.is_file()) / plan.model.num_layers
