"""Which errors mean that a device, or the host, has no memory left."""

from __future__ import annotations

import torch


def first_line(error: BaseException) -> str:
    """Return what an error says first: a native stack may follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"


def out_of_memory(error: BaseException) -> bool:
    """Whether it is a GPU's OutOfMemoryError or what stands for it on a CPU.

    Torch raises a plain RuntimeError where the host has no memory.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
