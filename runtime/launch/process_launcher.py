"""Stages as child processes of this host, without Ray (stage_process.py).

Those on CPUs are forked from one process that has imported what they need (fork_server.py): a
stage that was lost is there again in milliseconds. Those on GPUs are started.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

from llmpq.child import Child, ChildProcess
from llmpq.devices.cluster import Cluster
from llmpq.plans.plan import Plan, StagePlan
from llmpq.runtime.launch.stages.fork_server import STAGE_PROCESS
from llmpq.runtime.launch.stages.forked_process import ForkServer
from llmpq.runtime.launch.stages.launcher import Launcher, StageHandle
from llmpq.runtime.launch.stages.stage_wire import RemoteStage, plan_data
from llmpq.runtime.options.stage_settings import StageSettings


class ProcessLauncher(Launcher):
    """One process per device of a stage; a GPU stage sees the GPU of its plan's device number."""

    needs_rendezvous = moves_stages = True

    def __init__(self, *, behind_server: bool = False) -> None:
        """`behind_server`: stages on CPUs leave them to this process whenever it wants one."""
        self._behind_server = behind_server
        self._stages: list[ProcessStage] = []
        self._forks = ForkServer()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._forks.close()

    def stop(self, *, but: Collection[StageHandle] = ()) -> None:
        """End the stages that were started, but some."""
        ended = [stage for stage in self._stages if stage not in but]
        for stage in ended:
            stage.kill()
        for stage in ended:
            stage.wait()
        self._stages = [stage for stage in self._stages if stage in but]

    def start(
        self,
        plan: Plan,
        settings: Sequence[StageSettings],
        cluster: Cluster | None,
        left: Mapping[int, StageHandle] = MappingProxyType({}),
    ) -> list[StageHandle]:
        """Start a process per device; they import, make their workers and wait for calls."""
        data = plan_data(plan)
        stages: list[StageHandle] = []
        for index, stage in enumerate(plan.places):
            if index in left:
                stages.append(left[index])
                continue
            first: dict[str, Any] = {"index": index, "plan": data}
            first |= {"settings": settings[index].to_data()}
            first |= {"lowest_priority": self._behind_server and stage.is_cpu}
            forks = self._forks if stage.is_cpu else None
            self._stages.append(ProcessStage(first, environment_of(stage), forks))
            stages.append(self._stages[-1])
        return stages


class ProcessStage(RemoteStage):
    """A stage's process; its death fails all open calls."""

    def __init__(
        self,
        first: dict[str, Any],
        environment: dict[str, str],
        forks: ForkServer | None = None,
    ) -> None:
        """`forks`: what forks the process; without it, or where it cannot, it is started."""
        process: ChildProcess | None = None
        if forks is not None:
            with contextlib.suppress(OSError):
                process = forks.fork(environment)
        self._child = Child(STAGE_PROCESS, first, environment=environment, process=process)
        super().__init__(self._child.call)

    def kill(self, pid: int = 0) -> None:
        """End the process, a stopped one too."""
        self._child.kill()

    def wait(self) -> None:
        """Wait for its end and close its pipes."""
        self._child.wait()


def environment_of(stage: StagePlan) -> dict[str, str]:
    """Return a stage's environment: the GPU it sees, as nvidia-smi counts them."""
    environment = dict(os.environ)
    if stage.is_cpu:
        return environment | {"OMP_NUM_THREADS": str(stage.threads or 1)}
    seen = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = seen.split(",") if seen else []
    number = stage.device_index
    chosen = names[number] if number < len(names) else str(number)
    return environment | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen}
