"""What sums over the devices of a shared stage take, between processes of one host.

The children of a `SumJob` connect as a stage's devices do (runtime/links/member_links.py) and sum
hidden states of a few tokens up to those of the largest step. Where a graph can hold the sums, the
device's time is that of a graph of several, as in a captured step; else each sum waits for its
host, and the fastest block counts, since others only add time.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from llmpq.profiler.timing.cases import SumJob, SumTimings
from llmpq.runtime.launch.stages.stage_host import talk_over
from llmpq.runtime.links.member_links import AllReduce
from llmpq.runtime.links.transport import join_gloo
from llmpq.runtime.models.stage_model import DTYPES

TOKENS = (1, 4, 16, 64, 256, 1024)
"""Of sums, up to the largest step's: a factor of four apart, as they are rates of a few kinds."""
BLOCKS, SUMS = 7, 16
"""Sums that follow each other, and how often."""
LONG_TOKENS = 256
"""Tokens from which a block is of a quarter as many sums."""
STORE_LIMIT = timedelta(seconds=120)


def run_sums(job: SumJob, device: torch.device) -> SumTimings:
    """Sum with the other children; return the seconds of a sum by its bytes."""
    talk_over("127.0.0.1", None)
    store = dist.TCPStore(
        "127.0.0.1", job.port, job.count, is_master=job.rank == 0, timeout=STORE_LIMIT
    )
    join_gloo(dist.PrefixStore("sums", store), job.rank, job.count)
    reduce, dtype = AllReduce(), DTYPES[job.dtype]
    gpu = device if device.type == "cuda" else None
    try:
        reduce.join_ranks(
            range(job.count),
            job.rank,
            on_gpu=gpu is not None,
            device=gpu,
            dtype=dtype,
            columns=job.hidden,
        )
        counts = (*(n for n in TOKENS if n < job.most_tokens), max(job.most_tokens, 4))
        parts = [torch.zeros(1, n, job.hidden, dtype=dtype, device=device) for n in counts]
        return SumTimings(
            sizes=tuple(part.nbytes for part in parts),
            seconds=tuple(_seconds(reduce, part) for part in parts),
        )
    finally:
        reduce.disconnect()
        dist.destroy_process_group()


def _seconds(reduce: AllReduce, part: Tensor) -> float:
    """Return what a sum takes among others."""
    sums = SUMS if part.shape[1] < LONG_TOKENS else SUMS // 4
    reduce(part)  # what the first one sets up
    if reduce.captures:
        return _captured_s(reduce, part, sums)
    blocks = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(sums):
            reduce(part)
        if part.is_cuda:
            torch.cuda.synchronize(part.device)
        blocks.append((time.perf_counter() - start) / sums)
    return min(blocks)


def _captured_s(reduce: AllReduce, part: Tensor, sums: int) -> float:
    """Return the device's seconds of a sum in a graph of several; the fastest replay counts."""
    torch.cuda.synchronize(part.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(sums):
            reduce(part)
    found = []
    for _ in range(BLOCKS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / sums)
    return min(found)
