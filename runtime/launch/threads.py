"""The same engine without processes: every stage is a thread of this one.

For tests and benchmarks: the loops, the scheduler and the messages are those of the actors, only
the links differ.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.runtime.backends.stage_compute import StageCompute, build_stage
from llmpq.runtime.engine.mailbox import Finished, Mailbox
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.engine.stage_loop import FirstStage, run_following_stage
from llmpq.runtime.links.message import StepMessage
from llmpq.runtime.links.transport import Ring, ThreadTransport
from llmpq.runtime.request import Request
from llmpq.runtime.trace import Recorder, StageRecord
from llmpq.runtime.weights.sources import TensorSource
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
    """The loaded stages of a plan: on the CPU, all on one GPU, or each on a GPU of its own."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        source: TensorSource,
        *,
        speculate: SpeculationMode | None = None,
        device: torch.device | str | Sequence[str] = "cpu",
        graphs: bool = True,
    ) -> None:
        """`device`: of all stages, or one for each."""
        self.plan = plan
        if isinstance(device, (str, torch.device)):
            device = [str(device)] * len(plan.stages)
        self._devices = [torch.device(name) for name in device]
        built = []
        for index, place in enumerate(self._devices):
            with _current(place):
                compute, load = build_stage(plan, index, spec, source, place, graphs=graphs)
                compute.keep_on_device = place.type == "cuda"
                if speculate is not None:
                    compute.enable_speculation(speculate, plan.workload)
            built.append((compute, load))
        self.computes: list[StageCompute] = [compute for compute, _ in built]
        self.loads = [load for _, load in built]

    def _links(self, ring: Ring, max_rows: int) -> list[ThreadTransport]:
        """Return every stage's links; between GPUs hidden states never wait for other work."""
        devices = self._devices
        if len(set(devices)) == 1 or any(device.type != "cuda" for device in devices):
            return [ThreadTransport(ring, rank, max_rows=max_rows) for rank in range(len(devices))]
        hops = [_Hop(a, b) for a, b in zip(devices[:-1], devices[1:], strict=True)]
        return [
            _DeviceTransport(
                ring,
                rank,
                max_rows=max_rows,
                out=hops[rank] if rank < len(hops) else None,
                into=hops[rank - 1] if rank > 0 else None,
            )
            for rank in range(len(devices))
        ]

    def run(
        self, scheduler: Scheduler, requests: Sequence[Request], *, keep_events: bool = False
    ) -> EngineRun:
        """Serve the requests to their end; a stage's failure is raised here."""
        num_stages = len(self.computes)
        mailbox, ring = Mailbox(), Ring.of(num_stages)
        max_rows = max(self.plan.prefill_microbatch, self.plan.decode_microbatch)
        links = self._links(ring, max_rows)
        recorders = [Recorder(keep_events=keep_events) for _ in range(num_stages)]
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
            with _current(self._devices[0]):
                first.run()
        except BaseException as error:
            ring.broken.set()
            if failures and isinstance(error, ConnectionError):
                raise failures[0] from None
            raise
        for thread in threads:
            thread.join()
        records = [
            recorder.record(compute.device_totals())
            for recorder, compute in zip(recorders, self.computes, strict=True)
        ]
        return EngineRun(finished=list(mailbox.finished), records=records)


class _Hop:
    """From one GPU to the next, on streams of its own: behind what is sent, before what follows."""

    def __init__(self, here: torch.device, there: torch.device) -> None:
        self._here, self._there = here, there
        self._out, self._in = torch.cuda.Stream(here), torch.cuda.Stream(there)
        self._arrivals: queue.SimpleQueue[torch.cuda.Event] = queue.SimpleQueue()

    def send(self, hidden_BQH: Tensor) -> Tensor:
        """Return the copy on the other GPU, which is on its way."""
        self._out.wait_stream(torch.cuda.current_stream(self._here))
        hidden_BQH.record_stream(self._out)
        with torch.cuda.stream(self._in), torch.cuda.stream(self._out):
            moved = hidden_BQH.to(self._there, non_blocking=True)
            self._arrivals.put(self._in.record_event())
        return moved

    def take(self, moved_BQH: Tensor) -> None:
        """Have the other GPU's current stream wait for the oldest copy on its way."""
        stream = torch.cuda.current_stream(self._there)
        stream.wait_event(self._arrivals.get())
        moved_BQH.record_stream(stream)


class _DeviceTransport(ThreadTransport):
    """Links between threads whose stages have a GPU each."""

    def __init__(
        self, ring: Ring, rank: int, *, max_rows: int, out: _Hop | None, into: _Hop | None
    ) -> None:
        super().__init__(ring, rank, max_rows=max_rows)
        self._out, self._into = out, into

    def send_step(self, message: StepMessage, hidden_BQH: Tensor | None) -> None:
        if hidden_BQH is not None and hidden_BQH.is_cuda and self._out is not None:
            hidden_BQH = self._out.send(hidden_BQH)
        super().send_step(message, hidden_BQH)

    def receive_step(self) -> tuple[StepMessage, Tensor | None]:
        message, hidden_BQH = super().receive_step()
        if hidden_BQH is not None and hidden_BQH.is_cuda and self._into is not None:
            self._into.take(hidden_BQH)
        return message, hidden_BQH


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread; kernels are launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
