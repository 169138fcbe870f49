"""Sums over peer memory: two processes, on one GPU or one each, alone and in a graph."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from llmpq.runtime.links.peer_total import PeerSum
from llmpq.runtime.links.transport import join_gloo
from reference.fused_twins import rms_norm_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
COLUMNS, REPLAYS = 1024, 5


def device_process(rank: int, path: str) -> None:
    """Sum tensors of many sizes with the other process and compare with sums of the host."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    join_gloo(dist.FileStore(path, 2), rank, 2)
    group = dist.new_group([0, 1], backend="gloo")
    dtype = torch.bfloat16
    summed = PeerSum(device, group, dtype, columns=COLUMNS, member=rank, members=2)
    assert summed.problem is None and summed.trial() is None
    generator = torch.Generator().manual_seed(rank)
    shared = torch.Generator().manual_seed(7)
    for count in (8, COLUMNS, 8192, 65_536, 3_000_000):
        part = torch.randn(count, generator=generator).to(dtype)
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part, group=group)
        exact = (parts[0].float() + parts[1].float()).to(dtype)
        own = part.to(device)
        got = summed(own) if summed.takes(own, None) else summed.in_pieces(own)
        assert torch.equal(got.cpu(), exact), count
    weight, residual = (torch.randn(COLUMNS, generator=shared).to(dtype) for _ in range(2))
    part = torch.randn(1, COLUMNS, generator=generator).to(dtype)
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part, group=group)
    exact = (parts[0].float() + parts[1].float() + residual.float()).to(dtype)
    given = (residual.to(device)[None], weight.to(device), 1e-6)
    total, normed = summed.normed(part.to(device), *given)
    assert torch.equal(total.cpu(), exact)
    wanted = rms_norm_reference(exact, weight, 1e-6)
    torch.testing.assert_close(normed.cpu(), wanted, rtol=1e-2, atol=1e-2)
    static, stream = part.to(device), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        again = summed(static.clone())
        again = summed(again)  # of two sums: twice the first
    for _ in range(REPLAYS):
        graph.replay()
        first = (parts[0].float() + parts[1].float()).to(dtype)
        assert torch.equal(again.cpu(), (2 * first.float()).to(dtype))
    dist.barrier()
    dist.destroy_process_group()


def test_sums_are_those_of_hosts():
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(device_process, (f"{folder}/store",), nprocs=2)
