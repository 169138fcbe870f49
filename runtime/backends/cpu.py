"""CPUs: our own code (kernels/cpu/) and torch's operators, step by step."""

from __future__ import annotations

import torch

from llmpq.runtime.backends.native_layers import NativeLayers
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.models.stage_model import StageModel
from llmpq.sizes.pool_size import PoolSize


class CpuBackend:
    """A stage on its host's cores."""

    def layers(self) -> NativeLayers:
        """Return layers of one call for few rows, of torch's operators for many."""
        return NativeLayers()

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
        """Return the plain arithmetic; nothing is captured."""
        return StageRunner(model, kv, device, dtype)
