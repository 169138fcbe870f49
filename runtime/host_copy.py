"""Asynchronous copies of results from a device to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class CopyEvent(Protocol):
    """An event that is recorded behind a copy (a `torch.cuda.Event`)."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


@dataclass(frozen=True)
class HostCopy:
    """A result in host memory, valid once its copy has arrived."""

    value: Tensor
    copied: CopyEvent

    def wait(self) -> Tensor:
        """Return the result once it has arrived."""
        self.copied.synchronize()
        return self.value


def arrived(result: Tensor | HostCopy) -> Tensor:
    """Return a result, waiting for it if need be."""
    return result.wait() if isinstance(result, HostCopy) else result


def to_host_async(result: Tensor) -> Tensor | HostCopy:
    """Return a result of a device that the host may wait for once it needs it."""
    if not result.is_cuda:
        return result.cpu()
    value = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    value.copy_(result, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return HostCopy(value, copied)
