"""Latency and bandwidth of the runtime's own transport between two processes.

Rank 0 plays the first stage: it sends a micro-batch of hidden states to rank 1, which answers with
one token a row, as the last stage does. A round of the smallest message, halved, is the one-way
time alpha; larger ones add their bytes. What the ends do to pack and unpack is part of it.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from llmpq.profiler.messages import LinkJob, LinkTimings
from llmpq.runtime.message import StepMessage
from llmpq.runtime.request import StepKind
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.runtime.transport import GlooTransport, join_gloo

ROWS = 8
TOKENS = (1, 4, 16, 64, 256)
"""Tokens per row of the messages: from a decode step's to a prefill's."""
BLOCKS = 5
"""Blocks of rounds per size; the fastest counts, since others only add time."""
JOIN_LIMIT = timedelta(seconds=60)


def run_link(job: LinkJob) -> LinkTimings:
    """Exchange messages with the other child; both return the one-way seconds by size."""
    store = dist.TCPStore(
        "127.0.0.1", job.port, world_size=2, is_master=job.rank == 0, timeout=JOIN_LIMIT
    )
    join_gloo(store, job.rank, 2)
    transport = GlooTransport(hidden=job.hidden, dtype=torch.float32, max_rows=ROWS, max_pending=8)
    try:
        rounds = [
            min(_round_seconds(transport, job, tokens) for _ in range(BLOCKS)) for tokens in TOKENS
        ]
    finally:
        transport.close()
        dist.destroy_process_group()
    sizes = [ROWS * tokens * job.hidden * 4 for tokens in TOKENS]
    back = rounds[0] / 2
    return LinkTimings(
        sizes=tuple(sizes),
        seconds=(back, *(max(seconds - back, back) for seconds in rounds[1:])),
    )


def _round_seconds(transport: GlooTransport, job: LinkJob, tokens: int) -> float:
    """Return the lowest tenth of rounds of `tokens` a row; rank 0 decides how many rounds.

    Not the median: a wake-up that waits for another program's time slice takes milliseconds.
    """
    message = StepMessage(
        kind=StepKind.PREFILL,
        slots=range(ROWS),
        starts=[0] * ROWS,
        num_new=[tokens] * ROWS,
        sample_steps=[0] * ROWS,
        sampling=[SamplingParams()] * ROWS,
    )
    last = StepMessage(
        kind=StepKind.DECODE,
        slots=message.slots,
        starts=message.starts,
        num_new=message.num_new,
        sample_steps=message.sample_steps,
        sampling=message.sampling,
    )
    hidden = torch.zeros(ROWS, tokens, job.hidden)
    if job.rank == 1:
        return _echo(transport)
    samples: list[float] = []
    begin = time.perf_counter()
    done = False
    while not done:
        done = (
            time.perf_counter() - begin > job.seconds / len(TOKENS) / BLOCKS and len(samples) >= 5
        )
        start = time.perf_counter()
        transport.send_step(last if done else message, hidden)
        transport.receive_tokens(ROWS, 1)
        samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 10]


def _echo(transport: GlooTransport) -> float:
    """Answer every message with its rows' tokens; a DECODE message is the last of its size."""
    times = [time.perf_counter()]
    answer = torch.zeros(ROWS, 1, dtype=torch.long)
    while True:
        message, _ = transport.receive_step()
        transport.send_tokens(answer)
        times.append(time.perf_counter())
        if message.kind is StepKind.DECODE:
            return min(b - a for a, b in pairwise(times))
