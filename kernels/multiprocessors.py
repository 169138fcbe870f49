"""How many multiprocessors a device has: what launches are cut to."""

from __future__ import annotations

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return a device's multiprocessors; 2 where there is no GPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
