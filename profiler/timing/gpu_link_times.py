"""Latency and bandwidth of the runtime's own links between two GPUs.

Rank 0 plays the first stage, rank 1 the last: hidden states go one way, a token a row comes back,
and the next message waits for it. Only the devices wait, as in a run, so a burst of rounds between
two events is a chain of hops. Half of the smallest message's round is alpha.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.profiler.timing.cases import LinkTimings
from llmpq.runtime.links.device_links import StageLinks
from llmpq.runtime.links.peer_links import BufferSizes
from llmpq.runtime.steps.device_copies import arrived

ROWS = 8
TOKENS = (1, 16, 256, 2048)
"""Tokens per row of the messages: from a decode step's to a large prefill's."""
ROUNDS = 8
BURSTS = 6
"""The first one warms up; the fastest of the others counts."""
DTYPE = torch.bfloat16


def room(hidden: int) -> BufferSizes:
    """Return the largest messages of the measurement."""
    return BufferSizes(
        hidden_bytes=ROWS * max(TOKENS) * hidden * DTYPE.itemsize, max_rows=ROWS, tickets=2 * ROUNDS
    )


def run_rounds(links: StageLinks, rank: int, hidden: int) -> LinkTimings:
    """Exchange messages with the other child; return the one-way seconds by size (rank 0's)."""
    rounds = []
    for tokens in TOKENS:
        x_BQh = torch.zeros(ROWS, tokens, hidden, dtype=DTYPE, device=links.device)
        if rank == 1:
            _answer(links, x_BQh.shape)
        else:
            bursts = [_burst_s(links, x_BQh) for _ in range(BURSTS)]
            rounds.append(min(bursts[1:]) / ROUNDS)
    sizes = tuple(ROWS * tokens * hidden * DTYPE.itemsize for tokens in TOKENS)
    if rank == 1:
        return LinkTimings(sizes=sizes, seconds=(0.0,) * len(sizes))
    back = rounds[0] / 2
    return LinkTimings(
        sizes=sizes, seconds=(back, *(max(seconds - back, back) for seconds in rounds[1:]))
    )


def _burst_s(links: StageLinks, x_BQh: Tensor) -> float:
    """Send and wait for tokens `ROUNDS` times; return the device's seconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(ROUNDS):
        ticket = links.expect_tokens(ROWS)
        links.send(x_BQh)
        links.tokens(ticket, ROWS)
        answer = links.fetch_tokens(ticket, ROWS)
    end.record()
    arrived(answer)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _answer(links: StageLinks, shape: torch.Size) -> None:
    """Return a token a row for every message, once it is there."""
    tokens_B1 = torch.zeros(ROWS, 1, dtype=torch.long, device=links.device)
    for _ in range(BURSTS * ROUNDS):
        links.receive(tuple(shape), DTYPE)
        links.send_tokens(tokens_B1)
        links.release()
    torch.cuda.synchronize()
