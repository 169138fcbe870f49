"""A sort of device: who computes its layers, and a stage's arithmetic. One file each.

A new sort is a file beside cpu.py and cuda.py and a line in `backend_of`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.models.layers import LayerRunner
from llmpq.runtime.models.stage_model import StageModel
from llmpq.sizes.pool_size import PoolSize


class Backend(Protocol):
    """One sort of device."""

    def layers(self) -> LayerRunner:
        """Return who computes decoder layers and norms."""
        ...

    def stage_runner(
        self,
        model: StageModel,
        kv: PagedKV,
        device: torch.device,
        dtype: torch.dtype,
        *,
        size: PoolSize,
        step_tokens: int,
        graphs: bool,
    ) -> StageRunner:
        """Return the arithmetic of a stage with a pool, whose steps have so many tokens at most."""
        ...


def usable_device(name: str) -> torch.device:
    """Return the torch device of that name; `ValueError` if this machine has none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device '{name}' is not a torch device; expected cpu or cuda") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"--device '{name}' is not supported; expected cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(
            f"--device '{name}': torch sees {count} CUDA devices here; leave --device out to use "
            "the CPU, or check nvidia-smi and that torch is built with CUDA"
        )
    return device


def backend_of(device: torch.device | str) -> Backend:
    """Return the backend of a device; what it needs is imported only then."""
    sort = torch.device(device).type
    if sort == "cpu":
        from llmpq.runtime.backends.cpu import CpuBackend

        return CpuBackend()
    if sort == "cuda":
        from llmpq.runtime.backends.cuda import CudaBackend

        return CudaBackend()
    raise ValueError(f"no stage runs on '{sort}' devices; expected cpu or cuda")
