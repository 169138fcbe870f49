"""The links between devices, over gloo's CPU backend: three processes, one message each way."""

import inspect
import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from llmpq.runtime.links import peer_links
from llmpq.runtime.links.device_links import KINDS, DeviceTransport, connect_devices
from llmpq.runtime.links.peer_links import BufferSizes
from llmpq.runtime.links.transport import IDLE_LIMIT, GlooTransport, MessageSizes, join_gloo
from llmpq.runtime.options.engine_options import choices
from llmpq.runtime.requests.request import STOP, PagedRow, StepKind, StepMessage
from llmpq.runtime.steps.device_copies import arrived
from llmpq.runtime.steps.step import message_of_rows

pytestmark = pytest.mark.cluster
STAGES, HIDDEN = 3, 24
PREFILL = replace(
    message_of_rows(StepKind.PREFILL, [0, 3], [0, 0], [5, 4], tokens=[1] * 5 + [2] * 4), seq=1
)
VERIFY = replace(
    message_of_rows(
        *(StepKind.VERIFY, [0, 3], [5, 4], [2, 1]),
        tokens=[7, 8, 9],
        rows=[PagedRow(slot=0, drafts=(8,), drafts_wanted=0), PagedRow(slot=3, drafts_wanted=0)],
    ),
    seq=2,
)


DECODE = replace(message_of_rows(StepKind.DECODE, [0, 3], [7, 5], [1, 1], tokens=[3, 4]), seq=3)


def test_what_may_be_asked_for_is_what_there_is() -> None:
    assert set(choices()["links"]) == {"auto", *KINDS, "gloo"}


def states(message: StepMessage, rank: int) -> torch.Tensor:
    shape = (*message.shape, HIDDEN)
    return torch.arange(torch.Size(shape).numel()).view(shape).float() + 1000 * rank


def stage(rank: int, path: str, broken: bool, on_device: bool) -> None:
    torch.set_num_threads(1)
    join_gloo(dist.FileStore(path, STAGES), rank, STAGES)
    # A pair that cannot be made: one stage asks for links its device does not have.
    backend = "nccl" if broken and rank == 1 else "gloo"
    limit_s = 3 if broken else 20
    room = BufferSizes(hidden_bytes=10 * HIDDEN * 4, max_rows=4, tickets=6)
    links = connect_devices(torch.device("cpu"), room, kinds=[backend], limit_s=limit_s)
    if broken:
        assert links is None
        dist.barrier()  # gloo still works for everyone; nobody leaves before the others agree
        dist.destroy_process_group()
        return
    assert links is not None
    # A message may wait longer for the steps before it than a trial for its answer.
    for group in links.groups:
        assert group._get_backend(torch.device("cpu")).options._timeout == IDLE_LIMIT
    sizes = MessageSizes(
        hidden=HIDDEN, dtype=torch.float32, max_rows=4, max_tokens=20, max_pending=4
    )
    transport = DeviceTransport(links, sizes, tokens_on_device=on_device)
    for message in (PREFILL, VERIFY, DECODE):
        if rank > 0:
            got, hidden = transport.receive_step()
            assert (got.kind, got.seq) == (message.kind, message.seq)
            assert got.num_new_B.tolist() == message.num_new_B.tolist()
            assert hidden is not None and torch.equal(hidden, states(message, rank - 1))
            if message.kind is StepKind.VERIFY:
                assert got.tokens_T.tolist() == message.tokens_T.tolist()
        else:
            got = message
        if rank + 1 < STAGES:
            transport.send_step(got, states(message, rank))
        else:
            width = 3 if message.kind is StepKind.VERIFY else 1
            transport.send_tokens(torch.full((2, width), 10 * message.seq))
        if rank == 0:
            width = 3 if message.kind is StepKind.VERIFY else 1
            # Tables of drafts are read by hosts, whatever brings the tokens of other steps.
            by_links = on_device and message.kind is not StepKind.VERIFY
            if by_links:
                assert transport.bring_tokens(0, 2).tolist() == [[10 * message.seq]] * 2
            elif on_device:
                with pytest.raises(RuntimeError, match="through the host"):
                    transport.bring_tokens(0, 2)
            tokens = arrived(transport.receive_tokens(2, width))
            assert tokens.tolist() == [[10 * message.seq] * width] * 2
    if rank + 1 < STAGES:
        transport.send_step(STOP, None)
    if rank > 0:
        assert transport.receive_step()[0].kind is StepKind.STOP
    transport.close()


@pytest.mark.parametrize("on_device", [False, True], ids=["by hosts", "by links"])
def test_hidden_states_travel_apart_from_headers(on_device, in_processes):
    with tempfile.TemporaryDirectory() as folder:
        in_processes(stage, (f"{folder}/store", False, on_device), count=STAGES)


def test_one_broken_pair_sends_all_stages_back_to_gloo(in_processes):
    with tempfile.TemporaryDirectory() as folder:
        in_processes(stage, (f"{folder}/store", True, False), count=STAGES)


def test_a_gpu_without_room_for_its_inbox_tells_the_others(monkeypatch):
    """The stage fails before the handles are exchanged, and must take part in that all the same."""
    monkeypatch.setattr(peer_links, "CudaDriver", lambda: None)
    with tempfile.TemporaryDirectory() as folder:
        join_gloo(dist.FileStore(f"{folder}/store", 1), 0, 1)
        try:
            links = peer_links.PeerLinks.__new__(peer_links.PeerLinks)
            links._rank, links._world, links._problem = 0, 1, None
            links.device = torch.device("cpu")
            links._sizes = BufferSizes(hidden_bytes=8, max_rows=1 << 40, tickets=1 << 10)
            links._open_neighbours()
        finally:
            dist.destroy_process_group()
    assert "memory" in (links.trial() or "")


def test_device_links_take_all_that_a_stage_says_of_its_messages():
    hosts = {"more", "ring", "one_way"}  # connections of gloo; of devices that share a stage
    sizes = set(inspect.signature(GlooTransport).parameters) - hosts
    assert sizes <= set(inspect.signature(DeviceTransport).parameters)
