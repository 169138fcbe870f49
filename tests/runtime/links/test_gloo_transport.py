"""gloo asks a receiver before every message: the next receive is posted while a stage computes."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmpq.runtime.links.message import pack_header, pack_paging
from llmpq.runtime.links.transport import GlooTransport, MessageSizes, join_gloo, more_connections
from llmpq.runtime.requests.request import STOP, StepKind, StepMessage
from llmpq.runtime.steps.step import message_of_rows

pytestmark = pytest.mark.cpu

HIDDEN, MAX_ROWS = 4, 2


class Wire:
    """Messages on their way to rank 1, and the rooms it offered for them."""

    def __init__(self) -> None:
        self.messages: deque[Tensor] = deque()
        self.rooms: deque[Tensor] = deque()

    def put(self, message: StepMessage, hidden_BQH: Tensor | None) -> None:
        parts = [pack_header(message, MAX_ROWS), pack_paging(message.news)]
        parts += [] if hidden_BQH is None else [hidden_BQH]
        self.messages.append(torch.cat([part.view(-1).view(torch.uint8) for part in parts]))

    def irecv(self, room: Tensor, source: int) -> Wire:
        assert source == 0
        self.rooms.append(room)
        return self

    def wait(self, limit: timedelta) -> None:
        message = self.messages.popleft()
        self.rooms.popleft()[: len(message)] = message


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    found = Wire()
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "irecv", found.irecv)
    return found


def _step(seq: int) -> StepMessage:
    return replace(message_of_rows(StepKind.DECODE, [0], [3], [1]), seq=seq)


def test_the_next_receive_is_posted_while_the_last_message_is_in_use(wire: Wire) -> None:
    sizes = MessageSizes(
        hidden=HIDDEN, dtype=torch.float32, max_rows=MAX_ROWS, max_tokens=2, max_pending=2
    )
    transport = GlooTransport(sizes)
    for seq in range(3):
        wire.put(_step(seq), torch.full((1, 1, HIDDEN), float(seq)))
    wire.put(STOP, None)
    for seq in range(3):
        message, hidden_BQH = transport.receive_step()
        assert hidden_BQH is not None and message.seq == seq
        assert len(wire.rooms) == 2, "as many as may be on their way"
        for room in wire.rooms:
            room.fill_(255)  # What arrives early must not lie over what is in use.
        assert hidden_BQH.tolist() == [[[float(seq)] * HIDDEN]]
    message, _ = transport.receive_step()
    assert message.kind is StepKind.STOP


SHAPES = ((1, 4), (2, 131_072), (1, 262_140), (2, 1), (2, 262_144), (1, 65_537), (1, 65_536))
"""Rows and tokens of messages of 4 floats a token, from 64 bytes to 8 MiB, about the limit, too."""


def _prefill(rows: int, tokens: int) -> StepMessage:
    return message_of_rows(StepKind.PREFILL, range(rows), [0] * rows, [tokens] * rows)


def _exchange(rank: int, path: str) -> None:
    join_gloo(dist.FileStore(path, 2), rank, 2)
    sizes = MessageSizes(
        hidden=HIDDEN, dtype=torch.float32, max_rows=2, max_tokens=2 * 262_144, max_pending=2
    )
    transport = GlooTransport(sizes, more=more_connections())
    for number, (rows, tokens) in enumerate(SHAPES):
        torch.manual_seed(number)
        expected = torch.randn(1, rows * tokens, HIDDEN)
        if rank == 0:
            transport.send_step(_prefill(rows, tokens), expected)
            transport.receive_tokens(rows, 1)
        else:
            _, found = transport.receive_step()
            assert found is not None and torch.equal(found, expected), (rows, tokens)
            transport.send_tokens(torch.zeros(rows, 1, dtype=torch.long))
    if rank == 0:
        transport.send_step(STOP, None)
    else:
        assert transport.receive_step()[0].kind is StepKind.STOP
    transport.close()
    dist.barrier()
    dist.destroy_process_group()


def test_large_messages_come_over_several_connections_as_they_were_sent(
    tmp_path, in_processes
) -> None:
    in_processes(_exchange, (f"{tmp_path}/store",), count=2)
