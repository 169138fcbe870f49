"""How the devices of a stage in tensor parallel work on one step: its message, and their sums.

The first device receives and sends as a stage of one does, and gives every message to the others,
with the hidden states that came or, on the first stage, tokens. Sums are all-reduces over the
stage's devices:

    CPUs     gloo
    GPUs     one launch over peer memory (peer_total.py) for as many values as that takes, NCCL for
             more; without NCCL piece by piece over peer memory; gloo, through the hosts, where GPUs
             are no peers and there is no NCCL

Every kind is tried when the devices are connected, and all of them take the first that works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from llmpq.out_of_memory import first_line
from llmpq.plans.plan import Worker
from llmpq.runtime.links.transport import Transport
from llmpq.runtime.requests.request import STOP, StepMessage

SUM_LIMIT = timedelta(hours=1)
"""How long a device may wait in a sum for the others, which began the same step: whether they live
is the driver's to watch."""
KINDS = ("peer", "nccl")
"""Between GPUs, what is tried; gloo needs neither."""
_log = logging.getLogger("llmpq.links")


class Total(Protocol):
    """A sum over connected devices."""

    captures: bool
    """Whether a graph can hold it."""

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """As of `Reduce`."""
        ...

    def normed(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        """As of `Reduce`."""
        ...


class HostTotal:
    """A sum that hosts wait for, of a function that sums in a tensor's place."""

    captures = False

    def __init__(self, in_place: Callable[[Tensor], Tensor]) -> None:
        self._in_place = in_place

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of all devices' parts, plus the residual."""
        total = self._in_place(part)
        return total if residual is None else total.add_(residual)

    def normed(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum plus the residual, which the caller is to norm."""
        return self(part, residual), None


class AllReduce:
    """The sum over a stage's devices; until they are connected, each has its own part alone.

    So a stage can warm up while others of its devices still load.
    """

    def __init__(self) -> None:
        self._total: Total | None = None
        self._is_apart = False
        self.kinds: tuple[str, ...] = ()
        """What sums go over, by their size, the smallest first; empty until connected."""
        self._hosts: dist.ProcessGroup | None = None

    def connect(self, total: Total, *kinds: str) -> None:
        """Sum by a function from now on."""
        self._total, self.kinds = total, kinds

    def disconnect(self) -> None:
        """Leave the others: they, or others in their places, connect anew."""
        self._total = self._hosts = None
        self.kinds = ()

    @property
    def captures(self) -> bool:
        """Whether the devices are connected, by sums that a graph can hold."""
        return self._total is not None and self._total.captures

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave the others out meanwhile: of steps that not all devices run."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    def join(
        self,
        workers: Sequence[Worker],
        index: int,
        *,
        device: torch.device | None,
        dtype: torch.dtype,
        columns: int,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        """Connect the devices of every stage; each process of the plan calls it, in one order.

        `device`: this one's GPU, None of a CPU; `dtype` and `columns`: of hidden states.
        """
        for stage in sorted({worker.stage for worker in workers if worker.shares}):
            ranks = [rank for rank, worker in enumerate(workers) if worker.stage == stage]
            self.join_ranks(
                ranks,
                index,
                on_gpu=not workers[ranks[0]].place.is_cpu,
                device=device,
                dtype=dtype,
                columns=columns,
                kinds=kinds,
            )
            if index == ranks[0] and device is not None:
                _log.info("sums over the devices of stage %d: %s", stage, ", ".join(self.kinds))

    def join_ranks(
        self,
        ranks: Sequence[int],
        index: int,
        *,
        on_gpu: bool,
        device: torch.device | None,
        dtype: torch.dtype,
        columns: int,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        """Connect the processes of these numbers, which are `on_gpu`; all processes call it."""
        group = dist.new_group(list(ranks), backend="gloo", timeout=SUM_LIMIT)
        nccl = None
        if on_gpu and "nccl" in kinds and dist.is_nccl_available():
            nccl = dist.new_group(list(ranks), backend="nccl", timeout=SUM_LIMIT)
        if index not in ranks:
            return
        assert isinstance(group, dist.ProcessGroup)
        self._hosts = group
        if device is None:
            self.connect(HostTotal(partial(_all_reduced, group)), "gloo")
            return
        peer = None
        if "peer" in kinds:
            peer = _peer_sum(device, group, dtype, columns, ranks.index(index))
        large = None
        if isinstance(nccl, dist.ProcessGroup):
            large = nccl if _agreed("NCCL", group, _nccl_trial(nccl, device)) else None
        names = (("peer", peer), ("nccl", large))
        found = [name for name, link in names if link is not None] or ["gloo"]
        self.connect(GpuTotal(peer, large, group), *found)

    def all_have(self, own: object) -> bool:
        """Whether all devices have something that this one may have; each asks it once."""
        if self._hosts is None:
            return False
        verdict = torch.tensor([int(own is not None)])
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=self._hosts)
        return int(verdict) == 1

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of all devices' tensors, plus the residual, in place of this one's."""
        if self._total is None or self._is_apart:
            return part if residual is None else part.add_(residual)
        return self._total(part, residual)

    def normed(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum plus the residual, and that by an RMSNorm if it costs no further pass."""
        if self._total is None or self._is_apart:
            return self(part, residual), None
        return self._total.normed(part, residual, weight, eps)


class GpuTotal:
    """The sum over GPUs, by what works between them."""

    def __init__(
        self,
        peer: PeerTotal | None,
        nccl: dist.ProcessGroup | None,
        hosts: dist.ProcessGroup,
    ) -> None:
        self._peer, self._nccl, self._hosts = peer, nccl, hosts
        self.captures = peer is not None or nccl is not None

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of all devices' parts, plus the residual, in the part's place."""
        if self._peer is not None and self._peer.takes(part, residual):
            return self._peer(part, residual)
        part = part.contiguous()
        if self._nccl is not None:
            dist.all_reduce(part, group=self._nccl)
        elif self._peer is not None:
            self._peer.in_pieces(part)
        else:
            part.copy_(_all_reduced(self._hosts, part.cpu()))
        return part if residual is None else part.add_(residual)

    def normed(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum plus the residual, and of few rows that by an RMSNorm."""
        if self._peer is not None and self._peer.takes_rows(part, residual, weight):
            return self._peer.normed(part, residual, weight, eps)
        return self(part, residual), None


class PeerTotal(Protocol):
    """What `PeerSum` does."""

    def takes(self, part: Tensor, residual: Tensor | None) -> bool:
        """Whether a tensor is summed in one launch."""
        ...

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum, plus the residual."""
        ...

    def takes_rows(self, part: Tensor, residual: Tensor, weight: Tensor) -> bool:
        """Whether rows are summed and normed in one launch."""
        ...

    def normed(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of rows plus the residual, and that by an RMSNorm."""
        ...

    def in_pieces(self, part: Tensor) -> Tensor:
        """Return the sum of a tensor of any size."""
        ...


def _peer_sum(
    device: torch.device, group: dist.ProcessGroup, dtype: torch.dtype, columns: int, member: int
) -> PeerTotal | None:
    """Return the sum over peer memory; None, on every device, where it does not work."""
    from llmpq.runtime.links.peer_total import PeerSum  # Triton: half a second

    members = dist.get_world_size(group)
    made = PeerSum(device, group, dtype, columns=columns, member=member, members=members)
    if not _agreed("peer memory", group, made.problem):
        return None
    return made if _agreed("peer memory", group, made.trial()) else None


def _all_reduced(group: dist.ProcessGroup, part: Tensor) -> Tensor:
    dist.all_reduce(part, group=group)
    return part


def _agreed(name: str, group: dist.ProcessGroup, problem: str | None) -> bool:
    """Whether all devices of a stage have no problem; says which one this has."""
    verdict = torch.tensor([0 if problem else 1])
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
    if problem is not None:
        _log.warning("sums over %s failed: %s", name, problem)
    return int(verdict) == 1


def _nccl_trial(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Sum ones; return what went wrong."""
    try:
        ones = torch.ones(1, device=device)
        dist.all_reduce(ones, group=group)
        count = dist.get_world_size(group)
        return None if float(ones) == count else f"the sum of {count} ones was {float(ones)}"
    except RuntimeError as error:
        return first_line(error)


class Followers:
    """The other devices of a stage, as its first one gives them what it computes."""

    def __init__(self, links: Sequence[Transport]) -> None:
        """`links`: one to each."""
        self._links = links

    def give(self, message: StepMessage, hidden_BQH: Tensor | None) -> None:
        """Send a step, before this device computes it."""
        if hidden_BQH is None:
            hidden_BQH = torch.empty(*message.shape, 0)
        for link in self._links:
            link.send_step(message, hidden_BQH)

    def close(self) -> None:
        """End their loops."""
        for link in self._links:
            link.send_step(STOP, None)
        for link in self._links:
            link.close()
