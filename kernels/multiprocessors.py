"""Facts of a device for those who launch on it: how many multiprocessors, and how old."""

from __future__ import annotations

import functools

import torch

from llmpq.kernels.kernel_table import INTERPRETED, Device, gpu


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return a device's multiprocessors; 2 where there is no GPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return what the table of kernels calls a GPU; without one Triton's interpreter runs."""
    if device.type != "cuda":
        return INTERPRETED
    return gpu(torch.cuda.get_device_capability(device))


def older_than(device: torch.device, capability: tuple[int, int]) -> bool:
    """Whether a device is a CUDA GPU of less than a compute capability."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) < capability
