"""Stages as Ray actors: placed by Ray, on this machine or on several. Nothing else is Ray's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmpq.cluster import Cluster
from llmpq.errors import StageLostError
from llmpq.plan import Plan
from llmpq.runtime.launch.launcher import StageHandle
from llmpq.runtime.launch.nodes.node_questions import require_same
from llmpq.runtime.launch.on_ray.actor_class import actor_class
from llmpq.runtime.launch.on_ray.connect import ray_cluster
from llmpq.runtime.launch.on_ray.placement import own_raylet, reserve
from llmpq.runtime.launch.on_ray.ray_stage import RayStage
from llmpq.runtime.launch.on_ray.ray_watch import SILENCE, Raylet, RayWatch
from llmpq.runtime.launch.stages.stage_settings import StageSettings
from llmpq.runtime.launch.stages.stage_wire import plan_data
from llmpq.runtime.options import EngineOptions

if TYPE_CHECKING:
    from llmpq.runtime.launch.on_ray.weight_server import WeightServer

_THREADS = 7
"""Threads of an actor: the loop, a poll, health checks, a submission and a heartbeat."""

RemoteStageWorker = actor_class(
    "llmpq.runtime.launch.stages.stage_wire",
    "RemoteStageWorker",
    (
        "identity",
        "heartbeat",
        "end",
        "load",
        "open_rendezvous",
        "join",
        "run",
        "halt",
        "submit",
        "abort",
        "reset_prefix_cache",
        "stop",
        "take_rules",
        "guide_is_ready",
        "noted",
        "finish_submitting",
        "poll",
        "health",
        "work",
        "record",
        "peak_memory",
        "speculation",
    ),
)


class RayLauncher:
    """One actor per stage, in a placement group with one bundle each."""

    needs_rendezvous, moves_stages = True, False

    def __init__(self, options: EngineOptions) -> None:
        """`ray_address`: a running Ray; else this process's is used, or one started for the job."""
        self._address, self._deadlines = options.ray_address, options.deadlines
        self._ray, self._started = ExitStack(), ExitStack()
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
        if self._raylet is not None:
            self._raylet.close()
        self._ray.__exit__(kind, error, trace)

    def stop(self, *, but: Collection[StageHandle] = ()) -> None:
        """End the actors that were started, and give their bundles back."""
        assert not but, "actors end with their placement group"
        if self._watch is not None:
            self._watch.close()
        self._started.close()
        self._watch = None

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
        """Reserve the bundles and start an actor in each; nodes of other versions are refused."""
        assert not left, "actors end with their placement group"
        joined = self._address is not None
        placed = reserve(
            plan,
            cluster,
            joined=joined,
            wait_s=self._deadlines.wait_nodes_s,
            timeout_s=self._deadlines.placement_s,
        )
        self._started.callback(self._unless_lost, _remove, placed.group)
        if joined:  # first: a worker that is idle answers at once
            require_same(placed.nodes, settings)
        remote_class, data = ray.remote(RemoteStageWorker), plan_data(plan)
        stages: list[RayStage] = []
        reader: WeightServer | None = None
        for index, stage in enumerate(plan.places):
            options = remote_class.options(
                num_cpus=0,
                num_gpus=0 if stage.is_cpu else 1,
                max_concurrency=_THREADS,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placed.group, placement_group_bundle_index=index
                ),
            )
            node = placed.nodes[index]
            own = replace(settings[index], address=node.address)
            copies = own.options.copy_weights and not node.is_here
            if copies and reader is None:
                from llmpq.runtime.launch.on_ray.weight_server import WeightServer

                reader = WeightServer.start(own.driver_model_dir or own.model_dir)
                self._started.callback(reader.close)
            given = reader if copies else None
            stages.append(RayStage(options.remote(index, data, own.to_data(), weights=given)))
            self._started.callback(self._end, stages[-1])
        head = ray.get_runtime_context().gcs_address
        self._watch = RayWatch(head, stages, SILENCE * self._deadlines.step_s)
        return stages

    def _end(self, stage: RayStage) -> None:
        if self.lost() is None:
            stage.kill()
        else:  # Ray, which would end it, is gone
            stage.call("end")

    def _unless_lost(self, undo: Callable[[PlacementGroup], None], group: PlacementGroup) -> None:
        if self.lost() is None:
            undo(group)


def _remove(group: PlacementGroup) -> None:
    with contextlib.suppress(Exception):
        remove_placement_group(group)
