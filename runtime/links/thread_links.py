"""Links between stages that are threads of one process: queues, and copies from GPU to GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from llmpq.plans.plan import Worker
from llmpq.runtime.links.message import pack_header, pack_paging, unpack_header, unpack_paging
from llmpq.runtime.links.transport import HostTokens
from llmpq.runtime.requests.request import Ints, StepMessage

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ring:
    """The queues that connect the threads of one process; the simplest transport."""

    steps: tuple[queue.Queue[tuple[Tensor, Tensor, Tensor | None, Ints | None]], ...]
    tokens: queue.Queue[Tensor]
    broken: threading.Event
    """Set when a stage's thread failed, so that the others do not wait for it."""

    @classmethod
    def of(cls, num_stages: int) -> Ring:
        """Build the queues for `num_stages` stages."""
        steps = tuple(queue.Queue() for _ in range(num_stages))  # type: ignore[var-annotated]
        return cls(steps, queue.Queue(), threading.Event())

    def take(self, source: queue.Queue[_T]) -> _T:
        """Wait for the next item of a queue."""
        while True:
            try:
                return source.get(timeout=0.5)
            except queue.Empty:
                if self.broken.is_set():
                    raise ConnectionError("another stage's thread failed") from None


class ThreadTransport(HostTokens):
    """The links of one stage that is a thread: what the gloo transport is tested against.

    Headers are packed here too, so that both transports carry the same bytes.
    """

    def __init__(self, ring: Ring, rank: int, *, max_rows: int, one_way: bool = False) -> None:
        """`one_way`: as of `GlooTransport`."""
        self._ring = ring
        self._rank = rank
        self._max_rows, self._one_way = max_rows, one_way

    def send_step(self, message: StepMessage, hidden_BQH: Tensor | None) -> None:
        """Send a micro-batch to the next stage; a STOP has no hidden states."""
        tokens = message.tokens_T if self._one_way or message.sends_tokens else None
        header, paging = pack_header(message, self._max_rows), pack_paging(message.news)
        self._ring.steps[self._rank + 1].put((header, paging, hidden_BQH, tokens))

    def receive_step(self) -> tuple[StepMessage, Tensor | None]:
        """Wait for the next micro-batch of the previous stage."""
        header, paging, hidden_BQH, tokens = self._ring.take(self._ring.steps[self._rank])
        message = unpack_paging(unpack_header(header), paging)
        if tokens is not None:
            message = replace(message, tokens_T=tokens)
        return message, hidden_BQH

    def send_tokens(self, tokens_BK: Tensor) -> None:
        """Send sampled tokens from the last stage to the first."""
        self._ring.tokens.put(tokens_BK)

    def receive_tokens(self, rows: int, width: int) -> Tensor:
        """Wait for the sampled tokens of the oldest micro-batch in flight."""
        tokens = self._ring.take(self._ring.tokens)
        assert tokens.shape == (rows, width)
        return tokens

    def close(self) -> None:
        """Nothing is pending between threads."""


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


class ThreadSum:
    """The sum over threads that are the devices of one stage."""

    def __init__(self, count: int) -> None:
        self._parts: list[Tensor | None] = [None] * count
        self._barrier = threading.Barrier(count)

    def of(self, member: int) -> Callable[[Tensor], Tensor]:
        """Return a device's all-reduce."""

        def total(part: Tensor) -> Tensor:
            self._parts[member] = part
            try:
                _settle(part)
                self._barrier.wait()
                parts = [one.to(part.device) for one in self._parts if one is not None]
                summed = sum(parts[1:], parts[0].clone())
                _settle(part)
                self._barrier.wait()
            except threading.BrokenBarrierError:
                raise ConnectionError("another stage's thread failed") from None
            return part.copy_(summed)

        return total

    def break_off(self) -> None:
        """Wake all that wait."""
        self._barrier.abort()


def _settle(part: Tensor) -> None:
    """Wait for a GPU's stream: another thread's works on its own."""
    if part.is_cuda:
        torch.cuda.current_stream(part.device).synchronize()


class ThreadRendezvous:
    """Where the stages of one process find each other; it is made before they are."""

    def __init__(self, devices: Sequence[str], workers: Sequence[Worker] = ()) -> None:
        """`devices`: of each worker, as torch names them; without `workers` each is a stage."""
        self.devices = tuple(torch.device(name) for name in devices)
        leaders = [w.leads for w in workers] or [True] * len(devices)
        pairs = zip(self.devices, leaders, strict=True)
        self._of_stages = tuple(device for device, leads in pairs if leads)
        self._ring = Ring.of(len(self._of_stages))
        self._sums = {w.stage: ThreadSum(len(w.shares)) for w in workers if w.shares}
        self._followed = {
            (w.stage, w.member): replace(Ring.of(2), broken=self._ring.broken)
            for w in workers
            if not w.leads
        }
        self._lock = threading.Lock()
        self._hops: tuple[_Hop, ...] | None = None

    def transport(self, rank: int, *, max_rows: int) -> ThreadTransport:
        """Return a stage's links; between GPUs hidden states never wait for other work."""
        devices = self._of_stages
        if len(set(devices)) == 1 or any(device.type != "cuda" for device in devices):
            return ThreadTransport(self._ring, rank, max_rows=max_rows)
        with self._lock:
            if self._hops is None:
                pairs = zip(devices[:-1], devices[1:], strict=True)
                self._hops = tuple(_Hop(here, there) for here, there in pairs)
        return _DeviceTransport(
            self._ring,
            rank,
            max_rows=max_rows,
            out=self._hops[rank] if rank < len(self._hops) else None,
            into=self._hops[rank - 1] if rank > 0 else None,
        )

    def followed(self, stage: int, member: int, *, leads: bool, max_rows: int) -> ThreadTransport:
        """Return an end of the link from a stage's first device to another: the one that leads."""
        ring = self._followed[stage, member]
        return ThreadTransport(ring, 0 if leads else 1, max_rows=max_rows, one_way=True)

    def sum_of(self, worker: Worker) -> Callable[[Tensor], Tensor]:
        """Return a device's sum over those of its stage, in a tensor's place."""
        return self._sums[worker.stage].of(worker.member)

    def break_off(self) -> None:
        """Wake all that wait for a stage that has failed."""
        self._ring.broken.set()
        for total in self._sums.values():
            total.break_off()
