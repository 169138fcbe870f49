"""What a sort of device brings: who computes layers, and a stage's arithmetic. One file each.

A new sort is a file beside cpu.py and cuda.py and a line in `backend_of`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from llmpq.plan import Plan
from llmpq.runtime.backends.stage_compute import StageCompute
from llmpq.runtime.cache.plain_kv import KVCache
from llmpq.runtime.models.layers import LayerRunner
from llmpq.runtime.models.stage_model import StageModel


class Backend(Protocol):
    """One sort of device."""

    def layers(self) -> LayerRunner:
        """Return who computes decoder layers and norms."""
        ...

    def compute(
        self,
        model: StageModel,
        kv: KVCache,
        device: torch.device,
        dtype: torch.dtype,
        *,
        plan: Plan,
        graphs: bool,
    ) -> StageCompute:
        """Return the arithmetic of a loaded stage; `graphs`: with captured steps, if it has any."""
        ...


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
