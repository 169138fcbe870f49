"""Copies between host and device that wait for nothing: values up, results down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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


Values = (
    Sequence[int]
    | Sequence[float]
    | Sequence[Sequence[int]]
    | Sequence[Sequence[float]]
    | NDArray[np.int64]
    | NDArray[np.float64]
)


def upload(values: Values, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a tensor of `values` that the device's current stream finds there.

    From pageable memory torch would wait until the stream has got so far.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    if isinstance(values, np.ndarray):
        pinned = torch.empty(values.shape, dtype=dtype, pin_memory=True)
        return pinned.copy_(torch.from_numpy(values)).to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
