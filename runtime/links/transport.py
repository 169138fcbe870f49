"""How stages exchange messages; between processes by gloo, point-to-point.

Stage i sends headers and hidden states to stage i + 1, the last stage sends sampled tokens to the
first. Sends never wait for the receiver: gloo's do, and a ring of stages that all wait in a send
would stand still for ever, so a send keeps its tensors alive until it is known to be complete.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from llmpq.errors import DeadlineError
from llmpq.runtime.links.message import (
    header_size,
    max_paging_size,
    pack_header,
    pack_paging,
    paging_size,
    unpack_header,
    unpack_paging,
)
from llmpq.runtime.requests.request import StepKind, StepMessage
from llmpq.runtime.steps.device_copies import HostCopy
from llmpq.runtime.steps.step import result_width

IDLE_LIMIT = timedelta(hours=24)
"""A receive may wait this long for work; whether a stage still lives is the driver's to watch."""
_MOST_AHEAD = 4
"""Messages for which a receiver has room before it wants them: over a network as many may be on
their way at once, as each asks first."""
JOIN_LIMIT = timedelta(seconds=120)
"""How long the stages may take to find each other once all are loaded."""
CONNECTIONS = 4
"""Between hosts: one connection has at most one window of data on its way, whatever the link."""
_SHARED_BYTES = 1 << 20
"""Messages above this size are shared out among the connections."""


class Transport(Protocol):
    """The links of one stage."""

    tokens_on_device: bool
    """Whether tokens return from device to device, so that the first stage may run ahead."""

    def send_step(self, message: StepMessage, hidden_BQH: Tensor | None) -> None:
        """Send a micro-batch to the next stage; a STOP has no hidden states."""
        ...

    def receive_step(self) -> tuple[StepMessage, Tensor | None]:
        """Wait for the next micro-batch of the previous stage."""
        ...

    def send_tokens(self, tokens_BK: Tensor) -> None:
        """Send sampled tokens from the last stage to the first."""
        ...

    def receive_tokens(self, rows: int, width: int) -> Tensor | HostCopy:
        """Wait for the sampled tokens [rows, width] of the oldest micro-batch in flight."""
        ...

    def bring_tokens(self, place: int, rows: int) -> Tensor:
        """Return the tokens of the micro-batch at a place in flight, for the current stream."""
        ...

    def close(self) -> None:
        """Wait until everything sent has arrived, then leave."""
        ...


class HostTokens:
    """What transports have in common whose tokens pass through the hosts."""

    tokens_on_device = False

    def bring_tokens(self, place: int, rows: int) -> Tensor:
        """Not here: the host waits for its tokens."""
        raise RuntimeError(f"tokens of micro-batch {place} ({rows} rows) come through the host")


@dataclass(frozen=True, kw_only=True)
class MessageSizes:
    """How large the messages between two stages can be."""

    hidden: int
    """Values of a token's hidden state."""
    dtype: torch.dtype
    max_rows: int
    max_tokens: int
    """Rows times padded length of the largest micro-batch."""
    max_pending: int
    """Micro-batches under way."""
    max_blocks: int = 0
    """Of a request's block table."""


class GlooTransport(HostTokens):
    """torch.distributed point-to-point over gloo; the process group is joined already.

    One message per micro-batch: [header | news of rows | hidden states | tokens] as bytes (the
    first two: message.py; tokens where the last stage needs them). gloo asks the receiver before
    every message, so a second one costs a round trip (two processes on two busy cores: 0.1 ms with
    one message, 2 ms with two), and a receive is posted before its message is wanted: over a
    network of 3 ms one way, a receiver that computes loses 0.5 ms a message, else 6.5
    (d2231297:benchmarks/link_occupancy.py). A receive may offer more room than comes, so the
    receiver need not know the size. With `more` connections a large message comes in as many
    parts, each over one of its own: d2231297:benchmarks/slow_network.py says what that gains.
    """

    def __init__(
        self,
        sizes: MessageSizes,
        *,
        more: Sequence[dist.ProcessGroup] = (),
        ring: Sequence[int] = (),
        one_way: bool = False,
    ) -> None:
        """`more`: connections beside the first (`more_connections`).

        `ring`: processes of the group that exchange messages, in order; all of them by default.
        `one_way`: no tokens come back; every message has its own.
        """
        self._ring = tuple(ring) or tuple(range(dist.get_world_size()))
        self._rank, self._world = self._ring.index(dist.get_rank()), len(self._ring)
        self._one_way = one_way
        self._hidden, self._dtype = sizes.hidden, sizes.dtype
        self._max_rows, self._max_pending = sizes.max_rows, sizes.max_pending
        self._pending: deque[tuple[list[dist.Work], Tensor]] = deque()
        self._expected: deque[tuple[dist.Work, Tensor]] = deque()
        token_bytes = sizes.hidden * sizes.dtype.itemsize + torch.long.itemsize
        self._header_bytes = header_size(sizes.max_rows) * torch.long.itemsize
        paging_bytes = max_paging_size(sizes.max_rows, sizes.max_blocks) * torch.long.itemsize
        most_bytes = self._header_bytes + paging_bytes + sizes.max_tokens * token_bytes
        ahead = min(max(1, sizes.max_pending), _MOST_AHEAD)
        self._rooms = [torch.empty(most_bytes, dtype=torch.uint8) for _ in range(1 + ahead)]
        self._free = deque(self._rooms)
        self._coming: deque[tuple[dist.Work, Tensor]] = deque()
        self._read: Tensor | None = None
        part_bytes = max(math.ceil(most_bytes / (1 + len(more))), self._header_bytes)
        self._more = [
            _PartReader(group, self._ring[self._rank - 1], part_bytes, ahead)
            for group in (more if most_bytes > _SHARED_BYTES else ())
        ]

    def send_step(self, message: StepMessage, hidden_BQH: Tensor | None) -> None:
        """Send a micro-batch to the next stage; a STOP has no hidden states."""
        parts = [pack_header(message, self._max_rows), pack_paging(message.news)]
        if hidden_BQH is not None:
            parts.append(hidden_BQH.contiguous())
        if self._one_way or message.sends_tokens:
            # Stages behind the first have none to give their devices, which expect as many.
            known = len(message.tokens_T) > 0
            nothing = torch.zeros(message.num_tokens, dtype=torch.long)
            parts.append(torch.from_numpy(message.tokens_T) if known else nothing)
        if self._rank == 0 and hidden_BQH is not None and not self._one_way:
            self._expect_tokens(message)
        data = torch.cat([part.view(-1).view(torch.uint8) for part in parts])
        first, *others = self._shares(len(data))
        works = [
            dist.isend(data[share], self._ring[self._rank + 1], group=reader.group)
            for share, reader in zip(others, self._more, strict=False)
        ]
        self._send(data[first], self._rank + 1, works)

    def receive_step(self) -> tuple[StepMessage, Tensor | None]:
        """Wait for the next micro-batch of the previous stage.

        The hidden states are valid until the next call.
        """
        if self._read is not None:
            self._free.append(self._read)
        self._offer_rooms()
        work, room = self._coming.popleft()
        work.wait(IDLE_LIMIT)
        self._read = room
        header = room[: self._header_bytes].view(torch.long)
        message = unpack_header(header)
        if message.kind is StepKind.STOP:
            return message, None
        hidden_at = self._header_bytes + paging_size(header) * torch.long.itemsize
        paging = room[self._header_bytes : hidden_at].view(torch.long)
        message = unpack_paging(message, paging)
        shape = (*message.shape, self._hidden)
        end = tokens_at = hidden_at + math.prod(shape) * self._dtype.itemsize
        has_tokens = self._one_way or message.sends_tokens
        if has_tokens:
            end += math.prod(shape[:2]) * torch.long.itemsize
        for share, reader in zip(self._shares(end)[1:], self._more, strict=False):
            reader.read_into(room[share])
        hidden_BQH = room[hidden_at:tokens_at].view(self._dtype).view(shape)
        if has_tokens:
            tokens_T = room[tokens_at:end].clone().view(torch.long)
            message = replace(message, tokens_T=tokens_T.numpy())
        return message, hidden_BQH

    def send_tokens(self, tokens_BK: Tensor) -> None:
        """Send sampled tokens from the last stage to the first."""
        self._send(tokens_BK.contiguous(), 0)

    def receive_tokens(self, rows: int, width: int) -> Tensor | HostCopy:
        """Wait for the sampled tokens [rows, width] of the oldest micro-batch in flight."""
        work, tokens_BK = self._expected.popleft()
        assert tokens_BK.shape == (rows, width)
        work.wait(IDLE_LIMIT)
        return tokens_BK

    def close(self) -> None:
        """Wait until everything sent has arrived, then leave."""
        while self._pending:
            self._wait_for_oldest()

    def _shares(self, num_bytes: int) -> list[slice]:
        """Return what of a message goes over each connection; both ends know its size."""
        if not self._more or num_bytes <= _SHARED_BYTES:
            return [slice(0, num_bytes)]
        # The first part holds the header, which says how large the message is.
        part = max(math.ceil(num_bytes / (1 + len(self._more))), self._header_bytes)
        return [slice(at, min(at + part, num_bytes)) for at in range(0, num_bytes, part)]

    def _offer_rooms(self) -> None:
        """Post receives into all rooms that are free, so that messages arrive meanwhile."""
        for reader in self._more:
            reader.offer()
        while self._free:
            room = self._free.popleft()
            work = dist.irecv(room, self._ring[self._rank - 1])
            assert work is not None
            self._coming.append((work, room))

    def _expect_tokens(self, message: StepMessage) -> None:
        """Post the receive of a micro-batch's tokens, so that they need not wait for it."""
        shape = (message.num_rows, result_width(message.news))
        tokens_BK = torch.empty(shape, dtype=torch.long)
        work = dist.irecv(tokens_BK, self._ring[-1])
        assert work is not None
        self._expected.append((work, tokens_BK))

    def _send(self, tensor: Tensor, target: int, others: Sequence[dist.Work | None] = ()) -> None:
        sent = dist.isend(tensor, self._ring[target])
        works = [work for work in (*others, sent) if work is not None]
        self._pending.append((works, tensor))
        # Older sends have been received: no more micro-batches than this are in flight.
        while len(self._pending) > self._max_pending:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        works, _ = self._pending.popleft()
        for work in works:
            work.wait(IDLE_LIMIT)


class _PartReader:
    """Parts of large messages that come over a connection of their own, in order."""

    def __init__(
        self, group: dist.ProcessGroup, source: int, part_bytes: int, num_ahead: int
    ) -> None:
        self.group, self._source = group, source
        self._part_bytes, self._num_ahead = part_bytes, num_ahead
        self._coming: deque[tuple[dist.Work, Tensor]] = deque()

    def offer(self) -> None:
        """Post receives, so that parts arrive before they are wanted."""
        while len(self._coming) < self._num_ahead:
            self._post(torch.empty(self._part_bytes, dtype=torch.uint8))

    def read_into(self, target: Tensor) -> None:
        """Wait for the next part."""
        work, room = self._coming.popleft()
        work.wait(IDLE_LIMIT)
        target.copy_(room[: len(target)])
        self._post(room)

    def _post(self, room: Tensor) -> None:
        work = dist.irecv(room, self._source, group=self.group)
        assert work is not None
        self._coming.append((work, room))


def join_gloo(
    store: dist.Store, rank: int, num_stages: int, *, limit: timedelta = JOIN_LIMIT
) -> None:
    """Join the stages' process group; returns when all have joined.

    The group's limit also bounds how long gloo looks for its neighbours, so that waits for work,
    which may take longer, name their own (`IDLE_LIMIT`): gloo heeds no later change of it.
    """
    begun_s = time.monotonic()
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_stages, timeout=limit
        )
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if "timeout" not in text.lower() and "timed out" not in text.lower():
            raise
        passed_s = time.monotonic() - begun_s
        raise DeadlineError(
            f"the {num_stages} stages have not found each other within {passed_s:.0f} s ({text}); "
            "look at their hosts and the network between them (all ports must be open; hosts with "
            "several networks: --network-interface), and run it again"
        ) from None


def more_connections() -> list[dist.ProcessGroup]:
    """Open the connections beside the first; every stage calls it, after `join_gloo`."""
    return [dist.new_group(backend="gloo", timeout=JOIN_LIMIT) for _ in range(CONNECTIONS - 1)]
