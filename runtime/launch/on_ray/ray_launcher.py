"""Stages as Ray actors, on this machine or on several: Ray places, starts and calls them.

Hidden states and tokens do not pass through Ray (runtime/links/).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

import ray

from llmpq.devices.cluster import Cluster
from llmpq.errors import StageLostError
from llmpq.plans.plan import Plan
from llmpq.runtime.launch.on_ray.actor_class import actor_class
from llmpq.runtime.launch.on_ray.connect import ray_cluster
from llmpq.runtime.launch.on_ray.node_questions import require_same
from llmpq.runtime.launch.on_ray.placement import Reserved, give_back, own_raylet, reserve
from llmpq.runtime.launch.on_ray.ray_stage import RayStage
from llmpq.runtime.launch.on_ray.ray_watch import SILENCE, Raylet, RayWatch
from llmpq.runtime.launch.stages.launcher import Launcher, StageHandle
from llmpq.runtime.launch.stages.stage_process import STAGE_CALLS
from llmpq.runtime.launch.stages.stage_wire import plan_data
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings

if TYPE_CHECKING:
    from llmpq.runtime.launch.on_ray.weight_server import WeightServer

_THREADS = 7
"""Threads of an actor, as some of its calls wait: its loop, a poll, health checks, submissions and
heartbeats."""

RemoteStageWorker = actor_class(
    "llmpq.runtime.launch.stages.stage_wire",
    "RemoteStageWorker",
    (*STAGE_CALLS, "heartbeat", "end", "stop"),
)


class RayLauncher(Launcher):
    """One actor per stage, each in a bundle of its own."""

    needs_rendezvous = moves_stages = True

    def __init__(self, options: EngineOptions) -> None:
        """`ray_address`: a running Ray; else this process's is used, or one started for the job."""
        self._address, self._deadlines = options.ray_address, options.deadlines
        self._ray = ExitStack()
        self._placed: dict[RayStage, Reserved] = {}
        """The stages that were started, and where."""
        self._reader: WeightServer | None = None
        self._watch: RayWatch | None = None
        self._raylet: Raylet | None = None

    def __enter__(self) -> Self:
        self._ray.enter_context(ray_cluster(self._address))
        self._raylet = Raylet(*own_raylet())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._reader is not None:
            self._reader.close()
        if self._raylet is not None:
            self._raylet.close()
        self._ray.__exit__(kind, error, trace)

    def stop(self, *, but: Collection[StageHandle] = ()) -> None:
        """End the actors that were started, but some, and give their bundles back."""
        ended = {stage: own for stage, own in self._placed.items() if stage not in but}
        self._placed = {stage: own for stage, own in self._placed.items() if stage in but}
        is_lost = self.lost() is not None
        self._watch_over([] if is_lost else [*self._placed])
        for stage in ended:
            if is_lost:  # Ray, which would end it, is gone
                stage.call("end")
            else:
                stage.kill()
        if not is_lost:
            give_back(own.group for own in ended.values())

    def _watch_over(self, stages: Sequence[RayStage]) -> None:
        """Send heartbeats to these stages, and to no others."""
        if self._watch is not None:
            self._watch.close()
        self._watch = None
        if stages:
            head = ray.get_runtime_context().gcs_address
            self._watch = RayWatch(head, stages, SILENCE * self._deadlines.step_s)

    def lost(self) -> StageLostError | None:
        """Return what to say once Ray's head, or its process on this host, is gone."""
        lost = None if self._watch is None else self._watch.lost()
        return lost if lost is not None or self._raylet is None else self._raylet.lost()

    def start(
        self,
        plan: Plan,
        settings: Sequence[StageSettings],
        cluster: Cluster | None,
        left: Mapping[int, StageHandle] = MappingProxyType({}),
    ) -> list[RayStage]:
        """Reserve bundles and start an actor in each; nodes of other versions are refused."""
        kept = {index: stage for index, stage in left.items() if isinstance(stage, RayStage)}
        joined = self._address is not None
        placed = reserve(
            plan,
            cluster,
            joined=joined,
            wait_s=self._deadlines.wait_nodes_s,
            timeout_s=self._deadlines.placement_s,
            held={index: self._placed[stage].node for index, stage in kept.items()},
        )
        try:
            if joined and placed:  # first: a worker that is idle answers at once
                nodes = [own.node for own in placed.values()]
                require_same(nodes, [settings[index] for index in placed])
        except BaseException:
            give_back(own.group for own in placed.values())
            raise
        remote_class, data = ray.remote(RemoteStageWorker), plan_data(plan)
        stages: list[RayStage] = []
        for index, stage in enumerate(plan.places):
            if index in kept:
                stages.append(kept[index])
                continue
            node = placed[index].node
            own = replace(settings[index], address=node.address)
            options = placed[index].options(stage, max_concurrency=_THREADS, max_restarts=0)
            weights = None if node.is_here else self._weights_for(own)
            actor = remote_class.options(**options).remote(
                index, data, own.to_data(), weights=weights
            )
            stages.append(RayStage(actor))
            self._placed[stages[-1]] = placed[index]
        self._watch_over(stages)
        return stages

    def _weights_for(self, own: StageSettings) -> WeightServer | None:
        """Return what sends a stage on another host its weights; None where it reads its own."""
        if not own.options.copy_weights:
            return None
        if self._reader is None:
            from llmpq.runtime.launch.on_ray.weight_server import WeightServer

            self._reader = WeightServer.start(own.driver_model_dir or own.model_dir)
        return self._reader
