"""The same engine without processes: every stage is a thread of this one.

For tests and benchmarks: the loops, the scheduler and the messages are those of the actors, only
the links differ.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.runtime.loader import TensorSource
from llmpq.runtime.request import Request
from llmpq.runtime.scheduler import Scheduler
from llmpq.runtime.stage_compute import StageCompute, build_stage
from llmpq.runtime.stage_loop import Finished, FirstStage, Mailbox, run_following_stage
from llmpq.runtime.trace import Recorder, StageRecord
from llmpq.runtime.transport import Ring, ThreadTransport
from llmpq.speculation import SpeculationMode


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What a job left behind."""

    finished: Sequence[Finished]
    records: Sequence[StageRecord]

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Generated tokens by request id."""
        return {request.id: request.tokens for request in self.finished}


class ThreadEngine:
    """The loaded stages of a plan, on the CPU or all on one GPU."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        source: TensorSource,
        *,
        speculate: SpeculationMode | None = None,
        device: torch.device | str = "cpu",
        graphs: bool = True,
    ) -> None:
        self.plan = plan
        built = [
            build_stage(plan, index, spec, source, torch.device(device), graphs=graphs)
            for index in range(len(plan.stages))
        ]
        self.computes: list[StageCompute] = [compute for compute, _ in built]
        self.loads = [load for _, load in built]
        for compute in self.computes:
            if speculate is not None:
                compute.enable_speculation(speculate, plan.workload)

    def run(
        self, scheduler: Scheduler, requests: Sequence[Request], *, keep_events: bool = False
    ) -> EngineRun:
        """Serve the requests to their end; a stage's failure is raised here."""
        num_stages = len(self.computes)
        mailbox, ring = Mailbox(), Ring.of(num_stages)
        max_rows = max(self.plan.prefill_microbatch, self.plan.decode_microbatch)
        links = [ThreadTransport(ring, rank, max_rows=max_rows) for rank in range(num_stages)]
        recorders = [Recorder(keep_events=keep_events) for _ in range(num_stages)]
        failures: list[BaseException] = []

        def follow(rank: int) -> None:
            try:
                run_following_stage(
                    self.computes[rank], links[rank], recorders[rank], last=rank == num_stages - 1
                )
            except BaseException as error:
                failures.append(error)
                ring.broken.set()

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
            first.run()
        except ConnectionError:
            raise failures[0] from None
        for thread in threads:
            thread.join()
        records = [
            recorder.record(compute.device_totals())
            for recorder, compute in zip(recorders, self.computes, strict=True)
        ]
        return EngineRun(finished=list(mailbox.finished), records=records)
