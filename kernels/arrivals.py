"""Counters by which programs of one launch find out which of them is the last.

Each adds one when its share is written; the last sums or merges all shares, in their order, so that
results do not depend on the timing, and sets its counter to zero for the next launch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def arrivals(device: torch.device, tiles: int) -> Tensor:
    """Counters of arrived shares, one a tile, zero between launches.

    Launches on one stream take turns; two streams must not share counters, so each has its own.
    A captured graph runs on whatever stream replays it and takes the default stream's, which must
    be zeroed outside the capture: every eager launch sees to that.
    """
    size = 1 << max(12, (tiles - 1).bit_length())
    default = _counters(device, 0, size)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return default
    return _counters(device, torch.cuda.current_stream(device).cuda_stream, size)


@functools.cache
def _counters(device: torch.device, stream: int, size: int) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a kernel whose programs count their arrivals was captured before any ran: its "
            "counters would not be zero. Call it once with these shapes before capturing a graph."
        )
    return torch.zeros(size, dtype=torch.int32, device=device)
