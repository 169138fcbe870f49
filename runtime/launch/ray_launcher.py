"""Stages as Ray actors: placed by Ray, on this machine or on several. Nothing else is Ray's."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmpq.cluster import Cluster
from llmpq.out_of_memory import first_line
from llmpq.plan import Plan
from llmpq.runtime.launch.launcher import StageFailure
from llmpq.runtime.launch.placement import ray_cluster, reserve
from llmpq.runtime.launch.stage_actor import StageActor
from llmpq.runtime.launch.stage_settings import StageSettings

_THREADS = 6
"""Threads of an actor: the loop, a poll, health checks and a submission."""


class RayLauncher:
    """One actor per stage, in a placement group with one bundle each."""

    meets_by_address = True

    def __init__(self, address: str | None, *, placement_s: float) -> None:
        """`address`: of a running Ray; None uses this process's, or starts one that ends here."""
        self._address, self._placement_s = address, placement_s
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(ray_cluster(self._address))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def start(
        self, plan: Plan, settings: Sequence[StageSettings], cluster: Cluster | None
    ) -> list[RayStage]:
        """Reserve the bundles and start an actor in each."""
        group = reserve(plan, cluster, timeout_s=self._placement_s)
        self._stack.callback(_remove, group)
        actor_class, plan_json = ray.remote(StageActor), plan.dump_json()
        stages = []
        for index, stage in enumerate(plan.stages):
            options = actor_class.options(
                num_cpus=0,
                num_gpus=0 if stage.is_cpu else 1,
                max_concurrency=_THREADS,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
            )
            stages.append(RayStage(options.remote(index, plan_json, asdict(settings[index]))))
            self._stack.callback(stages[-1].kill)
        return stages


class RayStage:
    """An actor's calls as futures."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of the actor."""
        answer: Future[Any] = Future()

        def arrived(inner: Future[Any]) -> None:
            error = inner.exception()
            if error is None:
                answer.set_result(inner.result())
            else:
                answer.set_exception(failure_of(error))

        getattr(self._actor, method).remote(*args).future().add_done_callback(arrived)
        return answer

    def kill(self, pid: int = 0) -> None:
        """End the actor's process; by its number, if it is known, even if it is stopped."""
        with contextlib.suppress(Exception):
            ray.kill(self._actor, no_restart=True)
        if pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def failure_of(error: BaseException) -> StageFailure:
    """Return Ray's error as a stage's: what was raised there, or why its process is gone."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return StageFailure(f"{type(cause).__name__}: {first_line(cause)}", cause)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return StageFailure(f"the host ran out of memory ({first_line(error)})")
    text = str(error)
    exit_type = re.search(r"Worker exit type: (\w+)", text)
    detail = re.search(r"Worker exit detail: (.*?)(?:\. |\n|$)", text)
    if exit_type is None:
        return StageFailure(first_line(error))
    return StageFailure(
        f"its process died ({exit_type[1]}: {detail[1] if detail else 'no detail'}; killed by a "
        "signal such as SIGKILL from the kernel's out-of-memory killer, or crashed)"
    )


def _remove(group: PlacementGroup) -> None:
    with contextlib.suppress(Exception):
        remove_placement_group(group)
