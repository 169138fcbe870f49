"""A GPU made to behave as a smaller one: a stream on some SMs, and a cap on memory.

What a stage computes runs on its own stream, and graphs are captured on that, so a stream of a
green context keeps all of it on that context's SMs. The context is not made any thread's current
one: setting the thread's device would leave it.
"""

from __future__ import annotations

import torch

from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.plans.plan import StagePlan
from llmpq.runtime.links.cuda_driver import CudaDriver


class Emulation:
    """The share of a GPU a stage may use."""

    def __init__(self, stage: StagePlan, device: torch.device) -> None:
        """Cap the memory at once."""
        self._sms, self._device = stage.sms, device
        if device.type == "cuda" and stage.memory is not None:
            total, memory = torch.cuda.get_device_properties(device).total_memory, stage.memory
            # The card that is emulated has its reserve too: what a plan errs by may take from it.
            limit = memory.limit_bytes + memory.reserve_bytes - memory.context_bytes
            share = memory_share(limit, total, stage.device)
            torch.cuda.set_per_process_memory_fraction(share, device)

    def stream(self) -> torch.cuda.Stream:
        """Return a new stream on the stage's SMs; the device is the thread's current one."""
        if self._sms is None or self._sms >= multiprocessors(self._device):
            return torch.cuda.Stream(self._device)
        torch.cuda.synchronize(self._device)  # there is a primary context from here on
        try:
            stream, _ = CudaDriver().stream_on(self._device.index or 0, self._sms)
        except (AttributeError, RuntimeError) as error:
            raise ValueError(
                f"this machine cannot emulate a GPU of {self._sms} SMs: {error}; it needs a driver "
                "of CUDA 12.4 or newer. Remove 'emulate' from the cluster file and re-plan"
            ) from None
        return torch.cuda.ExternalStream(stream, self._device)


def memory_share(limit_bytes: int, total_bytes: int, name: str) -> float:
    """Return the share of a GPU's memory that tensors may take."""
    if limit_bytes <= 0:
        raise ValueError(
            f"stage {name}: its memory limit leaves nothing beside the framework's context; "
            "raise the device's memory or lower its reserve, then re-plan"
        )
    return min(1.0, limit_bytes / total_bytes)
