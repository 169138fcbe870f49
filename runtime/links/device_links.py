"""From GPU to GPU: hidden states to the next stage, sampled tokens back to the first.

    headers, verify's tables    gloo, between hosts: the receiver reads them on its CPU
    hidden states, tokens       from device to device:
        peer                    straight into the other GPU's memory (peer_links.py), on one host
        nccl                    one communicator per pair of neighbours, and one for the way back

A send waits on the device for the step that makes its tensor, a receive makes the device wait for
what arrives: no host waits for either, and both overlap with the layers of other micro-batches.

Every pair is tried at start-up, within a deadline. If one fails, all stages take the next kind of
link, and gloo in the end, so that both ends of every link agree.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from llmpq.runtime.links.peer_links import BufferSizes, PeerLinks
from llmpq.runtime.links.transport import IDLE_LIMIT, GlooTransport, MessageSizes
from llmpq.runtime.requests.request import StepKind, StepMessage
from llmpq.runtime.steps.device_copies import HostCopy
from llmpq.runtime.steps.step import speculates
from llmpq.sizes.gpu_workspace import OUTPUTS_LEAVING

_log = logging.getLogger("llmpq.links")

KINDS = ("peer", "nccl")
"""What is tried, best first; gloo needs no device links. A new kind stands here, in
`connect_devices` and in `LinkChoice` (options/stage_settings.py)."""
TRIAL_LIMIT_S = 20.0
"""Making two communicators and one exchange takes 1-6 s on one host."""
_TRIAL_SIZE = 1 << 10
_MAX_PENDING = 8
_MAX_CTAS = 4
"""Thread blocks of an NCCL kernel: what waits for a neighbour takes SMs from the layers."""


class StageLinks(Protocol):
    """The links of one stage; `PeerLinks` and `DeviceLinks`."""

    name: str
    device: torch.device

    def send(self, tensor: Tensor) -> None:
        """Send hidden states to the next stage once the current stream has made them."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the previous stage's next message, ready when the current stream gets to it."""
        ...

    def release(self) -> None:
        """Say that the current stream is done with what was received so far."""
        ...

    def send_tokens(self, tokens_B1: Tensor) -> None:
        """Send sampled tokens to the first stage."""
        ...

    def expect_tokens(self, rows: int) -> int:
        """Announce a micro-batch whose tokens will come; return its ticket (first stage)."""
        ...

    def tokens(self, ticket: int, rows: int) -> Tensor:
        """Return a micro-batch's tokens [B, 1], ready when the current stream gets to them."""
        ...

    def fetch_tokens(self, ticket: int, rows: int) -> Tensor | HostCopy:
        """Return a micro-batch's tokens on the host, or on their way there."""
        ...

    def sending_s(self) -> float:
        """Return how long sends have taken since the last call, as far as it is known."""
        ...

    def trial(self) -> str | None:
        """Exchange something with every neighbour; return what went wrong."""
        ...

    def close(self) -> None:
        """Wait until everything sent has left."""
        ...

    def break_off(self) -> None:
        """End what waits for stages that are gone; called by another thread."""
        ...


class DeviceLinks:
    """Links over torch.distributed: NCCL, or gloo where there are no GPUs (tests)."""

    def __init__(
        self,
        device: torch.device,
        sizes: BufferSizes | None = None,
        *,
        backend: str = "nccl",
        limit_s: float = TRIAL_LIMIT_S,
    ) -> None:
        """Make the communicators; every stage calls this at the same time.

        `sizes` bounds the bytes of what is on its way.
        """
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.name, self.device = backend, device
        self._limit_s, last = limit_s, self._world - 1
        groups = [_group([first, first + 1], backend, limit_s) for first in range(last)]
        self._back = _group([0, last], backend, limit_s)
        self._forward = groups[self._rank] if self._rank < last else None
        self._backward = groups[self._rank - 1] if self._rank > 0 else None
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._most_bytes = math.inf if sizes is None else OUTPUTS_LEAVING * sizes.hidden_bytes
        self._expected: dict[int, tuple[dist.Work, Tensor]] = {}
        self._fetched: deque[Tensor] = deque(maxlen=_MAX_PENDING)
        self._num_tickets = 0
        on_gpu = device.type == "cuda"
        self._fetching = torch.cuda.Stream(device) if on_gpu else None

    def send(self, tensor: Tensor) -> None:
        """Send to the next stage; the tensor is kept until it is known to have left."""
        self._keep(dist.isend(tensor, self._rank + 1, group=self._forward), tensor)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return what the previous stage sends, ready once the device gets to it."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(tensor, self._rank - 1, group=self._backward)
        assert work is not None
        work.wait()
        return tensor

    def release(self) -> None:
        """Nothing: every message has its own memory."""

    def send_tokens(self, tokens_B1: Tensor) -> None:
        """Send sampled tokens to the first stage."""
        tokens_B1 = tokens_B1.contiguous()
        self._keep(dist.isend(tokens_B1, 0, group=self._back), tokens_B1)

    def expect_tokens(self, rows: int) -> int:
        """Post the receive of a micro-batch's tokens; return its ticket."""
        tokens_B1 = torch.empty((rows, 1), dtype=torch.long, device=self.device)
        work = dist.irecv(tokens_B1, self._world - 1, group=self._back)
        assert work is not None
        self._num_tickets += 1
        self._expected[self._num_tickets] = (work, tokens_B1)
        return self._num_tickets

    def tokens(self, ticket: int, rows: int) -> Tensor:
        """Return a micro-batch's tokens [B, 1], ready when the current stream gets to them."""
        work, tokens_B1 = self._expected[ticket]
        assert tokens_B1.shape[0] == rows
        if not work.is_completed():
            work.wait()
        return tokens_B1

    def fetch_tokens(self, ticket: int, rows: int) -> Tensor | HostCopy:
        """Return a micro-batch's tokens on their way to the host; its ticket ends."""
        if self._fetching is None:
            found = self.tokens(ticket, rows)
            del self._expected[ticket]
            return found
        value = torch.empty(rows, 1, dtype=torch.long, pin_memory=True)
        with torch.cuda.stream(self._fetching):
            work, tokens_B1 = self._expected.pop(ticket)
            work.wait()
            value.copy_(tokens_B1, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._fetched.append(tokens_B1)
        return HostCopy(value, copied)

    def sending_s(self) -> float:
        """Return 0: a communicator does not say when it began."""
        return 0.0

    def close(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def break_off(self) -> None:
        """Abort the communicators."""
        for group in self.groups:
            group.abort()

    def trial(self) -> str | None:
        """Exchange a tensor with both neighbours; return what went wrong, None if nothing did."""
        end_s = time.monotonic() + self._limit_s
        sent = torch.full((_TRIAL_SIZE,), float(self._rank), device=self.device)
        got = torch.full((_TRIAL_SIZE,), -1.0, device=self.device)
        tokens = torch.full((_TRIAL_SIZE,), -1.0, device=self.device)
        last = self._world - 1
        works = []
        try:
            if self._rank > 0:
                works.append(dist.irecv(got, self._rank - 1, group=self._backward))
            if self._rank < last:
                works.append(dist.isend(sent, self._rank + 1, group=self._forward))
            if self._rank == 0:
                works.append(dist.irecv(tokens, last, group=self._back))
            if self._rank == last:
                works.append(dist.isend(sent, 0, group=self._back))
            for work in works:
                assert work is not None
                if not self._arrives(work, end_s):
                    return f"no answer from a neighbour within {self._limit_s:.0f} s"
        except RuntimeError as error:
            return str(error).splitlines()[0]
        sender, found = (self._rank - 1, got) if self._rank else (last, tokens)
        if not bool((found == float(sender)).all()):
            return f"stage {sender} sent {float(sender)}, got {float(found[0])}"
        # A message waits for the steps before it: how long, the driver judges (the step deadline).
        for group in self.groups:
            _set_pg_timeout(IDLE_LIMIT, group)
        return None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The communicators that this stage is part of."""
        all_groups = (self._forward, self._backward, self._back)
        return [group for group in all_groups if isinstance(group, dist.ProcessGroup)]

    def _keep(self, work: dist.Work | None, tensor: Tensor) -> None:
        assert work is not None
        self._sent.append((work, tensor))
        # NCCL's wait holds the device, not the host; gloo's does, but older sends have arrived.
        while self._sent and (self._sent[0][0].is_completed() or self._too_much()):
            self._sent.popleft()[0].wait()

    def _too_much(self) -> bool:
        """Whether more is on its way than a plan counts."""
        bytes_sent = sum(tensor.nbytes for _, tensor in self._sent)
        return len(self._sent) > _MAX_PENDING or bytes_sent > self._most_bytes

    def _arrives(self, work: dist.Work, end_s: float) -> bool:
        """Wait for a message, but not beyond `end_s`."""
        if self.device.type == "cpu":
            return bool(work.wait(timedelta(seconds=max(0.001, end_s - time.monotonic()))))
        while not work.is_completed():
            if time.monotonic() > end_s:
                return False
            time.sleep(0.002)
        work.wait()
        return True


def _group(ranks: list[int], backend: str, limit_s: float) -> dist.ProcessGroup:
    """Make a communicator of two stages; NCCL's is kept small."""
    options = None
    if backend == "nccl":
        if not dist.is_nccl_available():
            raise RuntimeError("this torch has no NCCL")
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = _MAX_CTAS
    return dist.new_group(
        ranks, backend=backend, timeout=timedelta(seconds=limit_s), pg_options=options
    )


def connect_devices(
    device: torch.device,
    sizes: BufferSizes | None,
    *,
    kinds: Sequence[str] = KINDS,
    limit_s: float = TRIAL_LIMIT_S,
) -> StageLinks | None:
    """Make and try links of one kind after the other; None, for every stage alike, for gloo.

    `peer` needs `sizes`; any other kind is a backend of torch.distributed. The verdicts travel over
    the stages' gloo group, which is joined already.
    """
    for kind in kinds:
        links: StageLinks | None = None
        try:
            if kind == "peer":
                assert sizes is not None
                links = PeerLinks(device, sizes, limit_s=limit_s)
            else:
                links = DeviceLinks(device, sizes, backend=kind, limit_s=limit_s)
            problem = links.trial()
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        verdict = torch.tensor([0 if problem else 1])
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        if problem is not None:
            _log.warning("stage %d: %s link failed: %s", dist.get_rank(), kind, problem)
        if int(verdict) == 1:
            return links
    _log.warning("hidden states travel over gloo, through the hosts")
    return None


class DeviceTransport(GlooTransport):
    """gloo for what hosts read, device links for hidden states and, where asked for, tokens."""

    def __init__(
        self,
        links: StageLinks,
        sizes: MessageSizes,
        *,
        tokens_on_device: bool = False,
    ) -> None:
        """As `GlooTransport`; gloo messages carry no hidden states, hence no hidden size.

        `tokens_on_device`: they return over the device links, but those of steps with drafts, whose
        tables hosts read.
        """
        super().__init__(replace(sizes, hidden=0))
        self._links, self._size = links, sizes.hidden
        self.tokens_on_device = tokens_on_device
        self._tickets: deque[int | None] = deque()
        """Of micro-batches in flight; None where hosts bring the tokens."""
        self._by_links = tokens_on_device
        """Whether the tokens of the step received last return over the device links."""

    def send_step(self, message: StepMessage, hidden_BQH: Tensor | None) -> None:
        """Send a micro-batch to the next stage; a STOP has no hidden states."""
        # The header first: the receiver enqueues its step while this stage still computes.
        nothing = None if hidden_BQH is None else hidden_BQH.new_empty(0, device="cpu")
        super().send_step(message, nothing)
        if hidden_BQH is not None:
            self._links.send(hidden_BQH.to(self._links.device).contiguous())

    def receive_step(self) -> tuple[StepMessage, Tensor | None]:
        """Wait for the next micro-batch's header; its hidden states are on their way.

        They are valid on the current stream until the next call.
        """
        self._links.release()
        message, _ = super().receive_step()
        if message.kind is StepKind.STOP:
            return message, None
        self._by_links = self._returns_by_links(message)
        shape = (*message.shape, self._size)
        return message, self._links.receive(shape, self._dtype)

    def send_tokens(self, tokens_BK: Tensor) -> None:
        """Send sampled tokens from the last stage to the first."""
        if self._by_links:
            self._links.send_tokens(tokens_BK)
        else:
            super().send_tokens(tokens_BK)

    def receive_tokens(self, rows: int, width: int) -> Tensor | HostCopy:
        """Return the sampled tokens of the oldest micro-batch in flight, perhaps on their way."""
        ticket = self._tickets.popleft()
        if ticket is None:
            return super().receive_tokens(rows, width)
        return self._links.fetch_tokens(ticket, rows)

    def bring_tokens(self, place: int, rows: int) -> Tensor:
        """Return the tokens of the micro-batch at a place in flight, for the current stream."""
        ticket = self._tickets[place]
        if ticket is None:
            return super().bring_tokens(place, rows)
        return self._links.tokens(ticket, rows)

    def close(self) -> None:
        """Wait until everything sent has arrived, then leave."""
        super().close()
        self._links.close()

    def _expect_tokens(self, message: StepMessage) -> None:
        ticket = None
        if self._returns_by_links(message):
            ticket = self._links.expect_tokens(message.num_rows)
        else:
            super()._expect_tokens(message)
        self._tickets.append(ticket)

    def _returns_by_links(self, message: StepMessage) -> bool:
        """Whether a step's tokens return over the device links: both ends read its news."""
        return self.tokens_on_device and not speculates(message.news)
