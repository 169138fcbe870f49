"""Programmatic dependent launch: a kernel may start before the one ahead of it has ended.

A kernel launched so (`launch_pdl`, PDL) calls `gdc_launch_dependents` first, asks for what no
earlier kernel writes (weights), then calls `gdc_wait`: only after that may it touch what others
wrote, or write itself. Every kernel of a chain waits, so what follows the wait has all earlier
kernels' results. In a CUDA graph of ten launches a layer this hides nine of ten launch gaps.
"""

from __future__ import annotations

import functools

import torch

CAPABILITY = (9, 0)
"""Oldest compute capability that has it."""


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether kernels on a device may be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
