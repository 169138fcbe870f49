"""Hidden states from GPU to GPU: one NCCL communicator per pair of neighbouring stages.

    header, verify tokens, sampled tokens    gloo, between hosts: whoever receives must read them
    hidden states                            NCCL, from device to device, on streams of their own

A send waits on the device for the step that makes its tensor, a receive makes the device wait for
what arrives: no host waits for either, and both overlap with the layers of other micro-batches.

Every pair is tried at start-up, within a deadline. If one fails, all stages fall back to gloo, so
that both ends of every link agree.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from llmpq.runtime.message import StepMessage
from llmpq.runtime.request import StepKind
from llmpq.runtime.transport import GlooTransport

_log = logging.getLogger("llmpq.links")

TRIAL_LIMIT_S = 20.0
"""Making two communicators and one exchange takes 1-6 s on one host."""
_TRIAL_SIZE = 1 << 10
_MAX_PENDING = 8


class DeviceLinks:
    """The links of one stage to its neighbours' devices."""

    def __init__(
        self, device: torch.device, *, backend: str = "nccl", limit_s: float = TRIAL_LIMIT_S
    ) -> None:
        """Make the communicators; every stage calls this at the same time."""
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._limit_s, limit = limit_s, timedelta(seconds=limit_s)
        groups = [
            dist.new_group([first, first + 1], backend=backend, timeout=limit)
            for first in range(self._world - 1)
        ]
        self._forward = groups[self._rank] if self._rank + 1 < self._world else None
        self._backward = groups[self._rank - 1] if self._rank > 0 else None
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send to the next stage; the tensor is kept until it is known to have left."""
        work = dist.isend(tensor, self._rank + 1, group=self._forward)
        assert work is not None
        self._sent.append((work, tensor))
        # NCCL's wait does not hold the host; gloo's does, but older sends have long arrived.
        while len(self._sent) > _MAX_PENDING:
            self._sent.popleft()[0].wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return what the previous stage sends, ready once the device gets to it."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(tensor, self._rank - 1, group=self._backward)
        assert work is not None
        work.wait()
        return tensor

    def close(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def trial(self) -> str | None:
        """Exchange a tensor with both neighbours; return what went wrong, None if nothing did."""
        end_s = time.monotonic() + self._limit_s
        sent = torch.full((_TRIAL_SIZE,), float(self._rank), device=self.device)
        got = torch.full((_TRIAL_SIZE,), -1.0, device=self.device)
        try:
            works = []
            if self._backward is not None:
                works.append(dist.irecv(got, self._rank - 1, group=self._backward))
            if self._forward is not None:
                works.append(dist.isend(sent, self._rank + 1, group=self._forward))
            for work in works:
                assert work is not None
                if not self._arrives(work, end_s):
                    return f"no answer from a neighbour within {self._limit_s:.0f} s"
        except RuntimeError as error:
            return str(error).splitlines()[0]
        expected = float(self._rank - 1)
        if self._backward is not None and not bool((got == expected).all()):
            return f"stage {self._rank - 1} sent {expected}, got {float(got[0])}"
        return None

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


def connect_devices(
    device: torch.device, *, backend: str = "nccl", limit_s: float = TRIAL_LIMIT_S
) -> DeviceLinks | None:
    """Make and try the links of all stages; None, for every stage alike, if one pair fails.

    The verdict travels over the stages' gloo group, which is joined already.
    """
    links: DeviceLinks | None = None
    try:
        links = DeviceLinks(device, backend=backend, limit_s=limit_s)
        problem = links.trial()
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    verdict = torch.tensor([0 if problem else 1])
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    if problem is not None:
        _log.warning("stage %d: %s link failed: %s", dist.get_rank(), backend, problem)
    if int(verdict) == 1:
        return links
    _log.warning("hidden states travel over gloo, through the hosts")
    return None


class DeviceTransport(GlooTransport):
    """gloo for what hosts read, device links for hidden states."""

    def __init__(
        self,
        links: DeviceLinks,
        *,
        hidden: int,
        dtype: torch.dtype,
        max_rows: int,
        max_tokens: int,
        max_pending: int,
    ) -> None:
        """As `GlooTransport`; gloo messages carry no hidden states, hence no hidden size."""
        super().__init__(
            hidden=0,
            dtype=dtype,
            max_rows=max_rows,
            max_tokens=max_tokens,
            max_pending=max_pending,
        )
        self._links, self._size = links, hidden

    def send_step(self, message: StepMessage, hidden_BQH: Tensor | None) -> None:
        """Send a micro-batch to the next stage; a STOP has no hidden states."""
        # The header first: the receiver posts its receive while this stage still computes.
        nothing = None if hidden_BQH is None else hidden_BQH.new_empty(0, device="cpu")
        super().send_step(message, nothing)
        if hidden_BQH is not None:
            self._links.send(hidden_BQH.to(self._links.device).contiguous())

    def receive_step(self) -> tuple[StepMessage, Tensor | None]:
        """Wait for the next micro-batch's header; its hidden states are on their way."""
        message, _ = super().receive_step()
        if message.kind is StepKind.STOP:
            return message, None
        shape = (message.num_rows, message.q_len, self._size)
        return message, self._links.receive(shape, self._dtype)

    def close(self) -> None:
        """Wait until everything sent has arrived, then leave."""
        super().close()
        self._links.close()
