"""Copies host values to a device without waiting for the work that it still has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def upload(values: Values, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a tensor of `values` that the device's current stream finds there.

    From pageable memory torch would wait until the stream has got so far.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
