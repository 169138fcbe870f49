"""The stages of a plan laid open in one process, for tests and benchmarks.

Whoever holds them sees their parts, drives them with schedulers and drafters of its own, and runs
job after job; users have `LLM`. The loops and messages are those of every launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.plans.speculation import SpeculationMode
from llmpq.runtime.backends.build_stage import build_head, build_stage
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.engine.stage_loop import FirstStage, run_following_stage
from llmpq.runtime.links.thread_links import ThreadRendezvous
from llmpq.runtime.models.layer_tensors import TensorSource
from llmpq.runtime.requests.request import Finished, Mailbox, Request
from llmpq.runtime.steps.trace import MAX_EVENTS, Recorder, StageRecord
from llmpq.sizes.pool_size import PoolSize


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """What a job left behind."""

    finished: Sequence[Finished]
    records: Sequence[StageRecord]

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Generated tokens by request id."""
        return {request.id: request.tokens for request in self.finished}


class OpenStages:
    """The loaded stages of a plan: on the CPU, all on one GPU, or each on a GPU of its own."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        source: TensorSource,
        *,
        pool: PoolSize,
        speculate: SpeculationMode | None = None,
        device: torch.device | str | Sequence[str] = "cpu",
        graphs: bool = True,
    ) -> None:
        """`device`: of all stages, or one for each."""
        self.plan, self.spec, self._pool = plan, spec, pool
        if isinstance(device, (str, torch.device)):
            device = [str(device)] * len(plan.stages)
        self._devices = [torch.device(name) for name in device]
        self.computes: list[Any] = []
        """`StageRunner`s."""
        self.loads = []
        for index, place in enumerate(self._devices):
            with _current(place):
                compute, load = build_stage(plan, index, spec, source, place, pool, graphs=graphs)
                if speculate is not None:
                    layers = range(*plan.stages[index].layers)
                    head = None
                    if speculate == "mtp":
                        head = build_head(plan, index, source, compute, place)
                    compute.enable_speculation(
                        speculate, pool, layers=layers, kv=plan.workload.kv, head=head
                    )
            self.computes.append(compute)
            self.loads.append(load)

    def run(
        self,
        scheduler: Scheduler,
        requests: Sequence[Request],
        *,
        keep_events: bool = False,
    ) -> OpenRun:
        """Serve the requests to their end; a stage's failure is raised here."""
        num_stages = len(self.computes)
        mailbox, rendezvous = Mailbox(), ThreadRendezvous([str(device) for device in self._devices])
        links = [
            rendezvous.transport(rank, max_rows=self._pool.slots) for rank in range(num_stages)
        ]
        recorders = [
            Recorder(max_events=MAX_EVENTS if keep_events else 0) for _ in range(num_stages)
        ]
        failures: list[BaseException] = []

        def follow(rank: int) -> None:
            last = rank == num_stages - 1
            try:
                with _current(self._devices[rank]):
                    run_following_stage(
                        self.computes[rank], links[rank], recorders[rank], last=last
                    )
            except BaseException as error:
                failures.append(error)
                rendezvous.break_off()

        threads = [
            threading.Thread(target=follow, args=(rank,), daemon=True)
            for rank in range(1, num_stages)
        ]
        for thread in threads:
            thread.start()
        for request in requests:
            mailbox.requests.put(request)
        mailbox.requests.put(None)
        first = FirstStage(
            scheduler,
            self.computes[0],
            links[0] if num_stages > 1 else None,
            mailbox,
            recorders[0],
            num_stages=num_stages,
        )
        try:
            with _current(self._devices[0]):
                first.run()
        except BaseException as error:
            rendezvous.break_off()
            if failures and isinstance(error, ConnectionError):
                raise failures[0] from None
            raise
        for thread in threads:
            thread.join()
        records = [
            recorder.record(compute.device_totals())
            for recorder, compute in zip(recorders, self.computes, strict=True)
        ]
        return OpenRun(finished=list(mailbox.finished), records=records)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread; kernels are launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
