"""The driver's side of a running plan: start the stages, watch them, submit requests, get results.

    with Pipeline.start(plan, settings) as pipeline:
        pipeline.submit(requests)
        for update in pipeline.updates(): ...

Every wait has a deadline and watches all stages at once: the first that fails is named, with its
cause, and everything is torn down. Nothing the stages exchange passes through here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmpq.cluster import Cluster
from llmpq.errors import DeadlineError, LlmpqError
from llmpq.plan import Plan
from llmpq.runtime.engine.mailbox import Finished, Progress
from llmpq.runtime.launch.failures import GRACE_S, is_consequence, lost_stage
from llmpq.runtime.launch.placement import ray_cluster, reserve
from llmpq.runtime.launch.stage_actor import StageActor
from llmpq.runtime.launch.stage_host import meeting_host, process_space
from llmpq.runtime.launch.stage_settings import StageSettings, write_request
from llmpq.runtime.request import Request
from llmpq.runtime.trace import LoadReport, StageRecord

_THREADS = 6
"""Threads of an actor: the loop, a poll, health checks and a submission."""
_POLL_S = 0.25
_STILL_STEPS = 4
"""Step deadlines for which nobody may compute while rows wait: a message is under way, or lost."""
MAX_TIMEOUT_S = 10**7
"""The longest deadline that can be asked for: four months."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long things may take before the job is given up."""

    placement_s: float = 25.0
    load_s: float = 600.0
    step_s: float = 30.0
    """One micro-batch on one stage, or a stage's silence."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Where the stages meet."""

    ray_address: str | None = None
    """An existing Ray; None starts one on this machine."""
    master_addr: str | None = None
    """None: this host, or the first stage's if the cluster's stages are on several nodes."""
    master_port: int = 0
    """0 lets the system choose."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """News of a running job."""

    finished: Sequence[Finished]
    progress: Progress


class Pipeline:
    """The stages of a plan, running."""

    def __init__(self, plan: Plan, settings: StageSettings, deadlines: Deadlines) -> None:
        self.plan, self._settings, self._deadlines = plan, settings, deadlines
        self.load_reports: list[LoadReport] = []
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._running: dict[Any, int] = {}
        self._health: dict[int, Any] = {}
        self._last_answer_s: dict[int, float] = {}
        self._asked_s: dict[int, float] = {}
        """When `_health` was asked for: a reader who takes long must not count as a silence."""
        self._phase = "start-up"
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
        deadlines: Deadlines | None = None,
        launch: Launch | None = None,
    ) -> Iterator[Pipeline]:
        """Place, load and connect the stages; the block's end takes them down."""
        deadlines, launch = deadlines or Deadlines(), launch or Launch()
        with ExitStack() as stack:
            stack.enter_context(ray_cluster(launch.ray_address))
            group = reserve(plan, cluster, timeout_s=deadlines.placement_s)
            stack.callback(_remove, group)
            pipeline = cls(plan, settings, deadlines)
            stack.callback(pipeline._kill)
            pipeline._place(group, cluster)
            pipeline._load()
            pipeline._connect(launch, cluster)
            yield pipeline

    def submit(self, requests: Sequence[Request], *, more: bool = False) -> None:
        """Queue requests; unless `more` are to come, the job ends when these have ended."""
        first = self._actors[0]
        text = json.dumps([write_request(request) for request in requests])
        self._gather([first.submit.remote(text)], [0], self._deadlines.step_s)
        self._num_submitted += len(requests)
        self._closed, self._moved_s = not more, time.monotonic()
        if not more:
            self._gather([first.finish_submitting.remote()], [0], self._deadlines.step_s)

    def updates(self) -> Iterator[Update]:
        """Yield news until every stage has ended its loop."""
        poll = None
        now_s = time.monotonic()
        self._last_answer_s = dict.fromkeys(range(len(self._actors)), now_s)
        self._moved_s = now_s
        while self._running:
            poll = poll or self._actors[0].poll.remote(_POLL_S)
            done, _ = ray.wait(
                [poll, *self._running, *self._health.values()], num_returns=1, timeout=_POLL_S
            )
            if poll in done:
                news, told_s = self._read_poll(poll), time.monotonic()
                yield news
                self._moved_s += time.monotonic() - told_s  # the reader's time, not the stages'
                poll = None
            for ref in [ref for ref in done if ref in self._running]:
                self._result(ref, self._running[ref])
                del self._running[ref]
            self._check_health()
        if poll is not None:
            yield self._read_last(poll)
        yield self._read_last(self._actors[0].poll.remote(0.0))

    def records(self) -> list[StageRecord]:
        """Return what every stage recorded."""
        refs = [actor.record.remote() for actor in self._actors]
        texts = self._gather(refs, range(len(refs)), self._deadlines.step_s)
        return [StageRecord.from_json(text) for text in texts]

    def speculation(self) -> dict[str, Any] | None:
        """Return what came of the drafts, None without any."""
        ref = self._actors[0].speculation.remote()
        (text,) = self._gather([ref], [0], self._deadlines.step_s)
        report: dict[str, Any] | None = json.loads(text)
        return report

    def stage_pids(self) -> list[int]:
        """Return the process of every stage."""
        return list(self._pids)

    def _place(self, group: PlacementGroup, cluster: Cluster | None) -> None:
        """Start a process per stage; a node may keep the model at a path of its own."""
        actor_class = ray.remote(StageActor)
        plan_json, settings = self.plan.dump_json(), asdict(self._settings)
        folders = {node.name: node.model_dir for node in cluster.nodes} if cluster else {}
        for index, stage in enumerate(self.plan.stages):
            options = actor_class.options(
                num_cpus=0,
                num_gpus=0 if stage.is_cpu else 1,
                max_concurrency=_THREADS,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
            )
            folder = folders.get(stage.node) or settings["model_dir"]
            self._actors.append(options.remote(index, plan_json, {**settings, "model_dir": folder}))
        identities = self._all("identity", self._deadlines.load_s)
        here = process_space()
        self._pids = [who["pid"] if who["space"] == here else 0 for who in identities]

    def _load(self) -> None:
        self._phase = "loading"
        self.load_reports = [
            LoadReport(**report) for report in self._all("load", self._deadlines.load_s)
        ]

    def _connect(self, launch: Launch, cluster: Cluster | None) -> None:
        """Join the stages' process group and start their loops."""
        self._phase = "connecting"
        host = meeting_host(launch.master_addr, self.plan, cluster)
        limit_s = self._deadlines.load_s
        if len(self._actors) > 1:
            opened = self._actors[0].open_rendezvous.remote(host, launch.master_port)
            (port,) = self._gather([opened], [0], limit_s)
            self._all("join", limit_s, host, port)
        self._phase = "prefill"
        self._running = {actor.run.remote(): i for i, actor in enumerate(self._actors)}

    def _all(self, method: str, limit_s: float, *args: object) -> list[Any]:
        refs = [getattr(actor, method).remote(*args) for actor in self._actors]
        return self._gather(refs, range(len(refs)), limit_s)

    def _gather(self, refs: Sequence[Any], stages: Sequence[int], limit_s: float) -> list[Any]:
        """Wait for all; the first failure wins, whichever stage it is."""
        index_of = dict(zip(refs, stages, strict=True))
        starting = self._phase in ("start-up", "loading", "connecting")
        option = "--load-timeout" if starting else "--step-timeout"
        pending, end_s = list(refs), time.monotonic() + limit_s
        while pending:
            done, pending = ray.wait(
                pending, num_returns=1, timeout=max(0.0, end_s - time.monotonic())
            )
            if not done:
                names = ", ".join(self.plan.stages[index_of[ref]].device for ref in pending)
                raise DeadlineError(
                    f"no answer from {names} during {self._phase} within {limit_s:.0f} s; raise "
                    f"the deadline with {option} or look at the stage's host"
                )
            self._result(done[0], index_of[done[0]])
        return list(ray.get(list(refs)))

    def _result(self, ref: Any, index: int) -> Any:
        """Return a finished call's value, or raise for the stage that is to blame."""
        try:
            return ray.get(ref)
        except LlmpqError as error:
            raise getattr(error, "cause", error) from None
        except ray.exceptions.RayError as error:
            raise self._blame(error, index) from None

    def _blame(self, error: Exception, index: int) -> Exception:
        """Name the stage that failed first: a broken connection is the death of another."""
        if is_consequence(error):
            others = {ref: i for ref, i in self._running.items() if i != index}
            end_s = time.monotonic() + GRACE_S
            while others and time.monotonic() < end_s:
                done, _ = ray.wait(list(others), num_returns=1, timeout=end_s - time.monotonic())
                for ref in done:
                    other = others.pop(ref)
                    try:
                        ray.get(ref)
                    except ray.exceptions.RayError as found:
                        if not is_consequence(found):
                            return self._describe(found, other)
        return self._describe(error, index)

    def _describe(self, error: Exception, index: int) -> Exception:
        pid = self._pids[index] if self._pids else 0
        return lost_stage(error, self.plan, index, phase=self._phase, pid=pid)

    def _read_last(self, ref: Any) -> Update:
        """Read a poll once the loops have ended, when health is asked for no more."""
        self._gather([ref], [0], self._deadlines.step_s)
        return self._read_poll(ref)

    def _read_poll(self, ref: Any) -> Update:
        data = json.loads(self._result(ref, 0))
        progress = Progress(**data["progress"])
        if progress.phase != "idle":
            self._phase = progress.phase
        idle = not self._closed and progress.finished >= self._num_submitted
        if idle or progress != self._progress:
            self._progress, self._moved_s = progress, time.monotonic()
        return Update(finished=[Finished(**row) for row in data["finished"]], progress=progress)

    def _check_health(self) -> None:
        """Ask every stage how it is; silence or one step beyond the deadline is an error."""
        now_s, limit_s = time.monotonic(), self._deadlines.step_s
        for index in self._running.values():
            ref = self._health.get(index)
            if ref is not None and ray.wait([ref], timeout=0)[0]:
                health = self._result(ref, index)
                stuck_s = health["stuck_s"]
                if health["kind"] is not None or health["num_begun"] != self._num_begun[index]:
                    self._moved_s = now_s
                self._num_begun[index] = health["num_begun"]
                del self._health[index]
                if stuck_s > limit_s:
                    raise self._silent(index, f"has been in one {self._phase} step for")
                self._last_answer_s[index] = now_s
            if index not in self._health:
                if now_s - self._last_answer_s[index] >= min(1.0, limit_s / 4):
                    self._health[index] = self._actors[index].health.remote()
                    self._asked_s[index] = now_s
            elif now_s - self._asked_s[index] > limit_s:
                raise self._silent(index, "has not answered for")
        if self._running and now_s - self._moved_s > _STILL_STEPS * limit_s:
            raise DeadlineError(
                f"no stage has computed for {_STILL_STEPS * limit_s:.0f} s during {self._phase} "
                "while rows wait: a message between two stages is lost or very late; look at the "
                "network between their hosts, raise --step-timeout, or continue with: llmpq-dist "
                "run --resume"
            )

    def _silent(self, index: int, what: str) -> DeadlineError:
        stage = self.plan.stages[index]
        pid = f", pid {self._pids[index]}" if self._pids[index] else ""
        return DeadlineError(
            f"stage {index} ({stage.device} on {stage.node}{pid}) {what} "
            f"{self._deadlines.step_s:.0f} s during {self._phase} (step deadline); look at its "
            "host, raise --step-timeout, or continue with: llmpq-dist run --resume"
        )

    def _kill(self) -> None:
        """End the stages' processes, stopped ones too."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        for pid in filter(None, self._pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _remove(group: PlacementGroup) -> None:
    with contextlib.suppress(Exception):
        remove_placement_group(group)
