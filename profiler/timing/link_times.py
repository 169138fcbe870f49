"""Latency and bandwidth of the runtime's own transport between two processes.

Between two GPUs: gpu_link_times.py. Else, or where no such link works, over gloo:

Rank 0 plays the first stage: it sends a micro-batch of hidden states to rank 1, which answers with
one token a row, as the last stage does. Each computes for a moment before it sends, so that the
other one waits as a stage waits: long enough for its core to go to sleep. Half the rest of a round
of the smallest message is alpha; larger ones add their bytes. What the ends do to pack and unpack
is part of it, and measured by itself: a CPU does it with the core that computes.
"""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from llmpq.profiler.timing.cases import LinkJob, LinkTimings
from llmpq.profiler.timing.gpu_link_times import room, run_rounds
from llmpq.runtime.launch.stages.stage_host import talk_over
from llmpq.runtime.links.device_links import connect_devices
from llmpq.runtime.links.transport import GlooTransport, MessageSizes, join_gloo, more_connections
from llmpq.runtime.requests.request import StepKind, StepMessage
from llmpq.runtime.steps.device_copies import arrived
from llmpq.runtime.steps.step import message_of_rows

ROWS = 8
TOKENS = (1, 8, 64, 256)
"""Tokens per row of the messages: from a decode step's to a prefill's."""
COMPUTE_S = 5e-3
"""How long each end computes between messages."""
STREAMED = 4 << 20
"""Values that it reads for it: as a stage's weights, they leave the caches to nothing else."""
BLOCKS = 3
"""Blocks of rounds per size; the fastest counts, since others only add time."""
BURST = 8
"""Messages that follow each other at once: as many as a pipeline of two may have on their way."""
STORE_LIMIT = timedelta(seconds=60)


def run_link(job: LinkJob, device: torch.device) -> LinkTimings:
    """Exchange messages with the other child; return the one-way seconds by size (rank 0's)."""
    talk_over(job.host, job.own)
    store = dist.TCPStore(
        job.host, job.port, world_size=2, is_master=job.rank == 0, timeout=STORE_LIMIT
    )
    if job.on_device:
        found = _device_link(job, dist.PrefixStore("devices", store), device)
        if found is not None:
            return found
    join_gloo(dist.PrefixStore("hosts", store), job.rank, 2)
    most = MessageSizes(
        hidden=job.hidden,
        dtype=torch.float32,
        max_rows=ROWS,
        max_tokens=ROWS * max(TOKENS),
        max_pending=BURST,
    )
    transport = GlooTransport(
        most,
        more=more_connections() if job.own is not None else (),  # as stages of several hosts have
    )
    sizes = tuple(ROWS * tokens * job.hidden * 4 for tokens in TOKENS)
    try:
        if job.rank == 1:
            for _ in range(len(TOKENS) * BLOCKS):
                _echo(transport)
            for _ in range(BLOCKS):
                _answer_burst(transport)
            return LinkTimings(sizes=sizes, seconds=(0.0,) * len(sizes))
        budget_s, apart = job.seconds / len(TOKENS) / BLOCKS, job.own is not None
        blocks = [
            [
                _timed_rounds(transport, job.hidden, tokens, budget_s, least=apart)
                for _ in range(BLOCKS)
            ]
            for tokens in TOKENS
        ]
        bursts = min(_burst_seconds(transport, job.hidden) for _ in range(BLOCKS))
    finally:
        transport.close()
        dist.destroy_process_group()
    rounds = [min(seconds for seconds, _ in own) for own in blocks]
    back = rounds[0] / 2
    return LinkTimings(
        sizes=sizes,
        seconds=(back, *(max(seconds - back, back) for seconds in rounds[1:])),
        rounds_s=tuple(rounds),
        host_s=statistics.median(host_s for _, host_s in blocks[0]),
        burst_s=max(0.0, bursts - rounds[0]) / (BURST - 1),
    )


def _device_link(job: LinkJob, store: dist.Store, device: torch.device) -> LinkTimings | None:
    """Measure the links from GPU to GPU; None, for both ends, where none works."""
    join_gloo(store, job.rank, 2)
    try:
        links = connect_devices(device, room(job.hidden))
        if links is None:
            return None
        found = run_rounds(links, job.rank, job.hidden)
        links.close()
        return found
    finally:
        dist.destroy_process_group()


def _timed_rounds(
    transport: GlooTransport, hidden_size: int, tokens: int, budget_s: float, *, least: bool
) -> tuple[float, float]:
    """Time rounds of `tokens` a row, computing left out: return their seconds, and those of a core.

    The lower quartile of the rounds, or the least: a wake-up that waits for another program's time
    slice takes milliseconds. `least` is for a network's own delay, which nothing makes shorter. Of
    a core, the median of what the thread that computes, at either end, takes to receive a message
    and to send one.
    """
    message = _message(tokens)
    hidden_1Th = torch.zeros(1, ROWS * tokens, hidden_size)
    samples: list[float] = []
    hosts_s: list[float] = []
    begin, done = time.perf_counter(), False
    while not done:
        done = time.perf_counter() - begin > budget_s and len(samples) >= 5
        _compute()
        start, core_s = time.perf_counter(), time.thread_time()
        # A DECODE message tells the other end that its size is done.
        transport.send_step(replace(message, kind=StepKind.DECODE) if done else message, hidden_1Th)
        spent_ns = arrived(transport.receive_tokens(ROWS, 1))[:, 0]
        samples.append(time.perf_counter() - start - int(spent_ns[0]) / 1e9)
        hosts_s.append((time.thread_time() - core_s + int(spent_ns[1]) / 1e9) / 2)
    del hosts_s[0]  # what the other end then tells is of the block before
    seconds = max(sorted(samples)[0 if least else len(samples) // 4], 1e-9)
    return seconds, statistics.median(hosts_s)


def _burst_seconds(transport: GlooTransport, hidden_size: int) -> float:
    """Return the time of `BURST` smallest messages at once and the answer to the last."""
    hidden_1Th = torch.zeros(1, ROWS, hidden_size)
    start = time.perf_counter()
    for _ in range(BURST):
        transport.send_step(_message(1), hidden_1Th)
    for _ in range(BURST):
        arrived(transport.receive_tokens(ROWS, 1))
    return time.perf_counter() - start


def _answer_burst(transport: GlooTransport) -> None:
    for _ in range(BURST):
        transport.receive_step()
        transport.send_tokens(torch.zeros(ROWS, 1, dtype=torch.long))


def _message(tokens: int) -> StepMessage:
    return message_of_rows(StepKind.PREFILL, range(ROWS), [0] * ROWS, [tokens] * ROWS)


def _echo(transport: GlooTransport) -> None:
    """Answer messages up to a DECODE message.

    With how long was computed, and what the last round's messages took of the core.
    """
    last, host_ns = False, 0
    while not last:
        begin_ns = time.thread_time_ns()
        message, _ = transport.receive_step()
        last = message.kind is StepKind.DECODE
        taken_ns = time.thread_time_ns()
        spent_ns = [_compute(), host_ns, *[0] * (ROWS - 2)]
        sending_ns = time.thread_time_ns()
        transport.send_tokens(torch.tensor(spent_ns)[:, None])
        host_ns = taken_ns - begin_ns + time.thread_time_ns() - sending_ns


def _compute() -> int:
    """Do what a stage does between messages; return the nanoseconds it took."""
    start, weights = time.perf_counter_ns(), _weights()
    while time.perf_counter_ns() - start < COMPUTE_S * 1e9:
        weights.sum()
    return time.perf_counter_ns() - start


@functools.cache
def _weights() -> torch.Tensor:
    return torch.ones(STREAMED)
