"""The driver's side of a running plan: start the stages, watch them, submit requests, get results.

    with PipelineClient.start(plan, settings) as client:
        client.submit(requests)
        for outputs in client.updates(): ...

Every wait has a deadline and watches all stages at once: the first that fails is named, with its
cause, and everything is torn down. Nothing the stages exchange passes through here. A launcher says
what a stage is: a thread, a process or a Ray actor.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from llmpq.child import CallFailed
from llmpq.devices.cluster import Cluster
from llmpq.errors import DeadlineError, StageLostError
from llmpq.plans.plan import Plan
from llmpq.runtime.launch.choose_launcher import make_launcher
from llmpq.runtime.launch.device_errors import LossKind
from llmpq.runtime.launch.failures import (
    GRACE_S,
    is_consequence,
    loss_kind,
    lost_stage,
    named_stage,
    when,
)
from llmpq.runtime.launch.stages.launcher import Launcher, OnLoad, StageHandle
from llmpq.runtime.launch.stages.load_watch import LoadWatch
from llmpq.runtime.launch.stages.stage_host import meeting_host, process_space
from llmpq.runtime.launch.stages.stage_place import (
    DeviceOf,
    StagePlace,
    device_of,
    settings_of_stages,
)
from llmpq.runtime.launch.start_times import StartTimes
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import EngineOutputs, Finished, Progress, Request
from llmpq.runtime.requests.token_rules import Guide, LogprobOutput
from llmpq.runtime.steps.trace import LoadReport, StageRecord

_POLL_S, _IDLE_POLL_S = 0.25, 2.0
"""How long a poll may wait for news, and one while no request is under way: one wakes it."""
_HEALTH_S = 2.5
"""Seconds between two questions how a stage is, or a twelfth of the step deadline."""
_STILL_STEPS = 4
"""Step deadlines after which a pipeline that computes nothing while rows wait is given up."""
_LEAVE_S = 3.0
"""How long a stage may take to leave: for the step under way, and for what is on its device."""
_MOVE_S = 10.0
"""How long one that has left may take to free what is not held."""


class PipelineClient:
    """Starts, watches and calls the stages of one pipeline."""

    def __init__(
        self,
        plan: Plan,
        settings: StageSettings,
        cluster: Cluster | None,
        on_load: OnLoad | None,
    ) -> None:
        self.plan = plan
        self._settings = settings
        self._cluster = cluster
        self._on_load = on_load
        self._options, self._deadlines = settings.options, settings.options.deadlines
        self._launcher: Launcher | None = None
        self._news: Iterator[EngineOutputs] | None = None
        self.load_reports: list[LoadReport] = []
        self._stages: Sequence[StageHandle] = ()
        self.places: list[StagePlace] = []
        """Where each stage is; known once they have begun."""
        self._pids: list[int] = []
        self._running: dict[Future[Any], int] = {}
        self._health: dict[int, Future[Any]] = {}
        self._last_answer_s: dict[int, float] = {}
        self._asked_s: dict[int, float] = {}
        """When `_health` was asked for: a reader who takes long must not count as a silence."""
        self.phase = "start-up"
        """What the stages do, as far as is known; `idle`: no request is under way."""
        self.failed_stage: int | None = None
        """The stage that was lost first, once one was."""
        self.loss: LossKind = "process"
        """Why it was lost."""
        self.is_placed = False
        """Whether every stage was given its place; they may be loading."""
        self.was_refused = False
        """Whether it said why it could not go on; it died or was silent otherwise."""
        self.took = StartTimes()
        self._placed_s = time.perf_counter()
        self.moved: frozenset[int] = frozenset()
        """Stages whose process had one of another plan before."""
        self._moving: Mapping[DeviceOf, StageHandle] = {}
        """Those, by their devices, until all stages have their places."""
        self._progress = Progress()
        self._num_submitted, self._closed = 0, False
        self._moved_s = time.monotonic()
        self._num_begun: Counter[int] = Counter()

    @classmethod
    @contextmanager
    def start(
        cls,
        plan: Plan,
        settings: StageSettings,
        *,
        cluster: Cluster | None = None,
        on_load: OnLoad | None = None,
    ) -> Iterator[PipelineClient]:
        """Place, load and connect the stages; the block's end takes them down."""
        with cls.placed(plan, settings, cluster=cluster, on_load=on_load) as engine:
            engine.begin()
            yield engine

    @classmethod
    @contextmanager
    def placed(
        cls,
        plan: Plan,
        settings: StageSettings,
        *,
        cluster: Cluster | None = None,
        on_load: OnLoad | None = None,
    ) -> Iterator[PipelineClient]:
        """Start the stages, which import what they need; `begin` lets them load."""
        engine = cls(plan, settings, cluster, on_load)
        with ExitStack() as stack:
            launcher = stack.enter_context(make_launcher(plan, settings.options))
            stack.callback(engine.kill)
            engine.place(launcher)
            yield engine

    def begin(self) -> None:
        """Load and connect the stages and start their loops."""
        self.places = self._all("identity", self._deadlines.load_s)
        self.took.started_s = time.perf_counter() - self._placed_s
        here = process_space()
        self._pids = [place.pid if place.space == here else 0 for place in self.places]
        self.phase = "loading"
        began_s = time.perf_counter()
        loads = [stage.call("load") for stage in self._stages]
        for index, load in enumerate(loads):
            load.add_done_callback(partial(self.took.note_load, index, began_s))
        self.load_reports = self._gather(
            loads,
            self._deadlines.load_s,
            watch=LoadWatch(
                self._stages,
                self._deadlines.stall_s,
                [place.num_layers for place in self.plan.places],
                self._on_load,
            ),
        )
        began_s = time.perf_counter()
        self._connect()
        self.took.connected_s = time.perf_counter() - began_s
        self.phase = "idle"
        self._running = {stage.call("run"): i for i, stage in enumerate(self._stages)}

    def serve(self, requests: Sequence[Request]) -> list[Finished]:
        """Serve requests to their end; more may follow, until `end`."""
        self._news = self._news or self.updates()
        self.submit(requests, more=True)
        finished: list[Finished] = []
        while len(finished) < len(requests):
            finished += next(self._news).finished
        return finished

    def end(self) -> None:
        """Let the loops end."""
        self.submit((), more=False)
        for _ in self._news or self.updates():
            pass

    def submit(self, requests: Sequence[Request], *, more: bool = False) -> None:
        """Queue requests; unless `more` are to come, the job ends when these have ended."""
        ruled = [(r.id, r.rules) for r in requests if r.rules is not None]
        if ruled:  # first, so that no step comes to the last stage before its rules
            self._ask_last("take_rules", ruled)
        self._num_submitted += len(requests)  # first: a poll must not find all ended
        if requests and self.phase == "idle":
            self.phase = "prefill"
        self._ask_first("submit", requests)
        self._closed, self._moved_s = not more, time.monotonic()
        if not more:
            self._ask_first("finish_submitting")

    def wait_for_guide(self, guide: Guide) -> None:
        """Return once the last stage has compiled a guide: no step then waits for it.

        A large schema takes seconds, in which other requests' tokens are to come.
        """
        pause_s = 0.002
        while not self._ask_last("guide_is_ready", guide.kind, guide.text):
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 2 * pause_s)

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests as soon as the steps under way for them have; their outputs come as ever."""
        self._ask_first("abort", list(request_ids))

    def reset_prefix_cache(self) -> None:
        """Let requests to come find no prefix of those before."""
        self._ask_first("reset_prefix_cache")

    def noted(self, request_ids: Sequence[int], ended: Sequence[int]) -> dict[int, LogprobOutput]:
        """Return the scores of requests since the last call; the last stage forgets the ended."""
        found: dict[int, LogprobOutput] = self._ask_last("noted", list(request_ids), list(ended))
        return found

    def updates(self) -> Iterator[EngineOutputs]:
        """Yield outputs until every stage has ended its loop."""
        poll = None
        now_s = time.monotonic()
        self._last_answer_s = dict.fromkeys(range(len(self._stages)), now_s)
        self._moved_s = now_s
        while self._running:
            wait_s = _IDLE_POLL_S if self.phase == "idle" else _POLL_S
            poll = poll or self._stages[0].call("poll", wait_s)
            done, _ = wait_for(
                [poll, *self._running, *self._health.values()], _POLL_S, FIRST_COMPLETED
            )
            if poll in done:
                update, read_s = self._read_poll(poll), time.monotonic()
                yield update
                self._moved_s += time.monotonic() - read_s  # the reader's time, not the stages'
                poll = None
            for ended in done & self._running.keys():
                self._result(ended, self._running[ended])
                del self._running[ended]
            self._check_health()
        if poll is not None:
            yield self._read_last(poll)
        yield self._read_last(self._stages[0].call("poll", 0.0))

    def records(self) -> list[StageRecord]:
        """Return what every stage recorded."""
        return self._all("record", self._deadlines.step_s)

    def speculation(self) -> dict[str, Any] | None:
        """Return what came of the drafts, None without any."""
        found: dict[str, Any] | None = self._ask_first("speculation")
        return found

    def work(self) -> list[dict[str, Any]]:
        """Return how long each stage has computed since its loop began, and its steps by kind."""
        return self._all("work", self._deadlines.step_s)

    def peak_memory(self) -> list[int]:
        """Return the most bytes each stage had on its GPU at once; 0 on a CPU."""
        return self._all("peak_memory", self._deadlines.step_s)

    def stage_pids(self) -> list[int]:
        """Return the process of every stage."""
        return list(self._pids)

    def place(
        self, launcher: Launcher, left: Mapping[DeviceOf, StageHandle] = MappingProxyType({})
    ) -> None:
        """Start a stage each; a node may have the model at a path of its own.

        `left`: stages that have left another plan, by their devices; where this one has a stage
        there, their process goes on as that.
        """
        settings = settings_of_stages(self.plan, self._cluster, self._settings)
        self._launcher = launcher
        moved = {
            index: left[device_of(place)]
            for index, place in enumerate(self.plan.places)
            if device_of(place) in left
        }
        launcher.stop(but=moved.values())
        self.moved = frozenset(moved)
        self._moving = {device_of(self.plan.places[index]): one for index, one in moved.items()}
        self._stages = launcher.start(self.plan, settings, self._cluster, moved)
        self._placed_s = time.perf_counter()  # a launcher may have had to start itself
        self.is_placed = True
        calls = {i: one.call("move", i, self.plan, settings[i]) for i, one in moved.items()}
        for index, call in calls.items():
            try:
                call.result(_MOVE_S)
            except (CallFailed, TimeoutError) as error:
                self.failed_stage = index
                raise StageLostError(
                    f"{self._named(index)} did not go on as part of another plan: {error}"
                ) from None

    def halt(self) -> None:
        """Let the loops end with the steps under way; requests that have not ended go on later."""
        self._ask_first("halt")

    def leave(self) -> dict[DeviceOf, StageHandle]:
        """End this pipeline; return the stages whose processes may go on as others, by devices.

        Those are the ones that are not to blame, and whose loops end.
        """
        launcher = self._launcher
        if launcher is None or not launcher.moves_stages:
            self.kill()
            return {}
        if not self.is_placed:  # others could not be started, these have left another plan
            return dict(self._moving)
        lost = self.failed_stage
        if lost is not None:
            self._stages[lost].kill(self._pids[lost] if self._pids else 0)
        others = [index for index in range(len(self._stages)) if index != lost]
        calls = {index: self._stages[index].call("leave", _LEAVE_S) for index in others}
        end_s = time.monotonic() + 2 * _LEAVE_S
        found = {}
        for index, call in calls.items():
            try:
                left = bool(call.result(max(0.0, end_s - time.monotonic())))
            except (CallFailed, TimeoutError):
                left = False
            if left:
                found[device_of(self.plan.places[index])] = self._stages[index]
            else:
                self._stages[index].kill(self._pids[index] if self._pids else 0)
        return found

    def _connect(self) -> None:
        """Open the rendezvous and let every stage join it."""
        self.phase = "connecting"
        if len(self._stages) > 1 and self._launcher and self._launcher.needs_rendezvous:
            host = meeting_host(self._options.master_addr, [p.address for p in self.places])
            port = self._ask_first("open_rendezvous", host, self._options.master_port)
            self._all("join", self._limit_s, host, port)

    @property
    def _limit_s(self) -> float:
        return self._deadlines.load_s if self._starting else self._deadlines.step_s

    @property
    def _starting(self) -> bool:
        return self.phase in ("start-up", "loading", "connecting")

    def _ask_first(self, method: str, *args: object) -> Any:
        """Return the first stage's answer."""
        return self._gather([self._stages[0].call(method, *args)], self._limit_s)[0]

    def _ask_last(self, method: str, *args: object) -> Any:
        """Return the answer of the last stage's first device."""
        last = self.plan.last_leader
        return self._gather([self._stages[last].call(method, *args)], self._limit_s, first=last)[0]

    def _all(self, method: str, limit_s: float, *args: object) -> list[Any]:
        """Return every stage's answer."""
        return self._gather([stage.call(method, *args) for stage in self._stages], limit_s)

    def _gather(
        self,
        calls: Sequence[Future[Any]],
        limit_s: float,
        *,
        first: int = 0,
        watch: LoadWatch | None = None,
    ) -> list[Any]:
        """Wait for calls to stages `first` and on; the first failure wins, whosever it is."""
        index_of = {call: index for index, call in enumerate(calls, start=first)}
        pending, end_s = set(calls), time.monotonic() + limit_s
        while pending:
            self._require_launcher()
            left_s = max(0.0, end_s - time.monotonic())
            wait_s = min(left_s, _POLL_S)
            done, pending = wait_for(pending, wait_s, FIRST_COMPLETED)
            if watch is not None:
                still = watch.still([index_of[call] for call in pending])
                if still is not None:
                    raise self._stalled(still)
            if not done and wait_s == left_s:
                names = ", ".join(
                    self.plan.places[index].device
                    for call, index in index_of.items()
                    if call in pending
                )
                raise DeadlineError(
                    f"no answer from {names} {when(self.phase)} within {limit_s:.0f} s; look at "
                    "the stage's host, or allow more time",
                    deadline="load" if self._starting else "step",
                )
            for call in done:
                self._result(call, index_of[call])
        return [call.result() for call in calls]

    def _result(self, call: Future[Any], index: int) -> Any:
        """Return a finished call's value, or raise for the stage that is to blame."""
        try:
            return call.result()
        except CallFailed as failure:
            raise self._blame(failure, index) from None

    def _blame(self, failure: CallFailed, index: int) -> Exception:
        """Name the stage that failed first: a broken connection is the death of another."""
        if is_consequence(failure):
            others = {call: i for call, i in self._running.items() if i != index}
            end_s = time.monotonic() + GRACE_S
            while others and (left_s := end_s - time.monotonic()) > 0:
                done, _ = wait_for(others, left_s, FIRST_COMPLETED)
                for call in done:
                    other, found = others.pop(call), call.exception()
                    if isinstance(found, CallFailed) and not is_consequence(found):
                        return self._describe(found, other)
        return self._describe(failure, index)

    def _describe(self, failure: CallFailed, index: int) -> Exception:
        self.failed_stage, self.loss = index, loss_kind(failure)
        self.was_refused = failure.cause is not None and self.loss != "connection"
        pid = self._pids[index] if self._pids else 0
        card = self.places[index].uuid if self.places else None
        return lost_stage(failure, self.plan, index, phase=self.phase, pid=pid, card=card)

    def _read_last(self, poll: Future[Any]) -> EngineOutputs:
        """Read a poll once the loops have ended, when health is asked for no more."""
        self._gather([poll], self._deadlines.step_s)
        return self._read_poll(poll)

    def _read_poll(self, poll: Future[Any]) -> EngineOutputs:
        news: EngineOutputs = self._result(poll, 0)
        idle = not self._closed and news.progress.finished >= self._num_submitted
        if idle:
            self.phase = "idle"
        elif news.progress.phase != "idle":
            self.phase = news.progress.phase
        if idle or news.progress != self._progress:
            self._progress, self._moved_s = news.progress, time.monotonic()
        return news

    def _require_launcher(self) -> None:
        """Raise if the process that owns the stages is gone."""
        lost = None if self._launcher is None else self._launcher.lost()
        if lost is not None:
            raise lost

    def _check_health(self) -> None:
        """Ask every stage how it is; silence or one step beyond the deadline is an error."""
        self._require_launcher()
        now_s, limit_s = time.monotonic(), self._deadlines.step_s
        for index in self._running.values():
            asked = self._health.get(index)
            if asked is not None and asked.done():
                health = self._result(asked, index)
                stuck_s = health["stuck_s"]
                if health["kind"] is not None or health["num_begun"] != self._num_begun[index]:
                    self._moved_s = now_s
                self._num_begun[index] = health["num_begun"]
                del self._health[index]
                if stuck_s > limit_s:
                    raise self._silent(index, "has been in one step for")
                self._last_answer_s[index] = now_s
            if index not in self._health:
                if now_s - self._last_answer_s[index] >= min(_HEALTH_S, limit_s / 12):
                    self._health[index] = self._stages[index].call("health")
                    self._asked_s[index] = now_s
            elif now_s - self._asked_s[index] > limit_s:
                raise self._silent(index, "has not answered for")
        if self._running and now_s - self._moved_s > _STILL_STEPS * limit_s:
            raise DeadlineError(
                f"no stage has computed for {_STILL_STEPS * limit_s:.0f} s {when(self.phase)} "
                "while rows wait: a message between two stages is lost or very late; look at the "
                "network between their hosts, or allow more time",
                deadline="step",
            )

    def _silent(self, index: int, what: str) -> DeadlineError:
        self.failed_stage, self.loss = index, "silence"
        return DeadlineError(
            f"{self._named(index)} {what} "
            f"{self._deadlines.step_s:.0f} s {when(self.phase)} (step deadline); look at its "
            "host, or allow more time",
            deadline="step",
        )

    def _stalled(self, index: int) -> DeadlineError:
        self.failed_stage, self.loss = index, "silence"
        return DeadlineError(
            f"{self._named(index)} has made no progress for {self._deadlines.stall_s:.0f} s while "
            "it loads: look at its host and the disk that its weights are on, or allow more time",
            deadline="stall",
        )

    def _named(self, index: int) -> str:
        return named_stage(self.plan, index, self._pids[index] if self._pids else 0)

    def kill(self) -> None:
        """End the stages, stopped ones too."""
        for index, stage in enumerate(self._stages):
            stage.kill(self._pids[index] if self._pids else 0)
