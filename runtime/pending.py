"""A result that is still on its way from a device to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class CopyEvent(Protocol):
    """What tells that a copy has arrived (a `torch.cuda.Event`)."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


@dataclass(frozen=True)
class Pending:
    """A result in host memory, valid once its copy has arrived."""

    value: Tensor
    copied: CopyEvent

    def wait(self) -> Tensor:
        """Return the result once it has arrived."""
        self.copied.synchronize()
        return self.value


def arrived(result: Tensor | Pending) -> Tensor:
    """Return a result, waiting for it if need be."""
    return result.wait() if isinstance(result, Pending) else result


def on_its_way(result: Tensor) -> Tensor | Pending:
    """Return a result of a device that the host may wait for once it needs it."""
    if not result.is_cuda:
        return result.cpu()
    value = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    value.copy_(result, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Pending(value, copied)
