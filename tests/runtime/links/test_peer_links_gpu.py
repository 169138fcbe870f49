"""Links that write into another process's GPU memory: two processes on one GPU."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from llmpq.runtime.links.device_links import connect_devices
from llmpq.runtime.links.peer_links import BufferSizes, PeerLinks
from llmpq.runtime.links.transport import join_gloo
from llmpq.runtime.steps.device_copies import arrived

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MESSAGES, SHAPE = 12, (4, 32, 256)
SLOW = 20_000_000
"""Clock cycles the receiver computes for: about 10 ms, far longer than a copy."""


def stage(rank: int, path: str, careless: bool) -> None:
    """Send numbered messages to a slow receiver, which answers each with its number."""
    device = torch.device("cuda", 0)
    join_gloo(dist.FileStore(path, 2), rank, 2)
    room = BufferSizes(hidden_bytes=4 * 4 * 32 * 256, max_rows=4, tickets=MESSAGES + 2)
    links = connect_devices(device, room, kinds=["peer"])
    assert isinstance(links, PeerLinks)
    ok = True
    if rank == 0:
        tickets = [links.expect_tokens(4) for _ in range(MESSAGES)]
        for number in range(MESSAGES):
            links.send(torch.full(SHAPE, float(number), device=device))
        for number, ticket in enumerate(tickets):
            ok &= arrived(links.fetch_tokens(ticket, 4)).tolist() == [[number]] * 4
    else:
        for number in range(MESSAGES):
            got = links.receive(SHAPE, torch.float32)
            if careless:
                links.release()
            torch.cuda._sleep(SLOW)
            wanted = torch.full((), float(number), device=device)
            seen = torch.where((got == wanted).all(), number, -1)
            links.send_tokens(seen.long().expand(4, 1).contiguous())
            links.release()
    dist.barrier()
    links.close()
    dist.barrier()
    dist.destroy_process_group()
    assert ok, "a message was overwritten before it was read"


@pytest.mark.parametrize("careless", [False, True])
def test_a_message_stays_until_it_is_released(careless):
    with tempfile.TemporaryDirectory() as folder:
        if not careless:
            processes.spawn(stage, (f"{folder}/store", False), nprocs=2)
            return
        with pytest.raises(processes.ProcessRaisedException, match="overwritten"):
            processes.spawn(stage, (f"{folder}/store", True), nprocs=2)
