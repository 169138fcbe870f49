"""A GPU made to behave as a smaller one: a green context of some SMs, and a cap on memory.

A green context belongs to the thread that enters it, so every thread that computes must `enter`
before its first kernel; one per process, because libraries keep handles into it.
"""

from __future__ import annotations

import threading

import torch

from llmpq.plan import StagePlan


class Emulation:
    """The share of a GPU a stage may use."""

    def __init__(self, stage: StagePlan, device: torch.device) -> None:
        """Cap the memory at once; SMs are taken when a thread enters."""
        self._stage, self._device = stage, device
        self._entered = threading.local()
        self._context: object | None = None
        self._lock = threading.Lock()
        if device.type == "cuda" and stage.memory is not None:
            total, memory = torch.cuda.get_device_properties(device).total_memory, stage.memory
            # The card that is emulated has its reserve too: what a plan errs by may take from it.
            limit = memory.limit_bytes + memory.reserve_bytes - memory.context_bytes
            share = memory_share(limit, total, stage.device)
            torch.cuda.set_per_process_memory_fraction(share, device)

    def enter(self) -> None:
        """Let this thread compute on the stage's SMs only; nothing to do for a whole GPU."""
        if self._stage.sms is None or self._device.type != "cuda":
            return
        if getattr(self._entered, "done", False):
            return
        with self._lock:
            if self._context is None:
                self._context = _green_context(self._stage.sms, self._device)
        self._context.set_context()  # type: ignore[attr-defined]
        self._entered.done = True


def memory_share(limit_bytes: int, total_bytes: int, name: str) -> float:
    """Return the share of a GPU's memory that tensors may take."""
    if limit_bytes <= 0:
        raise ValueError(
            f"stage {name}: its memory limit leaves nothing beside the framework's context; "
            "raise the device's memory or lower its reserve, then re-plan"
        )
    return min(1.0, limit_bytes / total_bytes)


def _green_context(sms: int, device: torch.device) -> object:
    """Make the context; the driver rounds SMs up to its own granularity (8 on Hopper)."""
    try:
        from torch.cuda.green_contexts import GreenContext

        return GreenContext.create(num_sms=sms, device_id=device.index or 0)
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"this machine cannot emulate a GPU of {sms} SMs: {error}; it needs torch 2.10 and "
            "CUDA 12.4 or newer. Remove 'emulate' from the cluster file and re-plan"
        ) from None
