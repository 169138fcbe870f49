"""The process that times: exactly the threads, GPU or share of a GPU a stage would have.

A child process (`llmpq.child`): its first line is a `SetUp`, its calls time a `TimedCase` or do a
part of a `LinkJob` or a `SumJob`.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from llmpq.child import serve_calls
from llmpq.profiler.timing.cases import LinkJob, Ready, SetUp, SumJob, TimedCase, model_spec
from llmpq.profiler.timing.timed_layers import TimedModel
from llmpq.sizes.memory import Quantization

CALLS = ("ready", "time", "link", "sums", "lost")


class TimedProcess:
    """What a child process of a `SetUp` answers; one call after the other, in its main thread."""

    def __init__(self, first: dict[str, Any]) -> None:
        set_up = SetUp.parse_data(first, where="set-up")
        self._device, self._alive = claim_device(set_up)
        self._effort = set_up.effort
        self._timed_model = TimedModel(
            model_spec(set_up.model),
            self._device,
            Quantization(cpu_activations=set_up.cpu_activations),
            set_up.sampling,
            share=_share(set_up, self._device),
        )

    def ready(self) -> dict[str, Any]:
        """Return what it runs on, `Ready`'s fields."""
        found = Ready(machine=machine(self._device), device_name=device_name(self._device))
        return found.model_dump(mode="json")

    def time(self, case: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Time a `TimedCase`; for so many `seconds`, at least, where they are given."""
        asked = TimedCase.parse_data(case, where="case")
        effort = self._effort
        if seconds is not None:
            effort = effort.model_copy(update={"seconds": seconds})
        return self._timed_model.time(asked, effort).model_dump(mode="json")

    def link(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do its part of a `LinkJob`."""
        from llmpq.profiler.timing.link_times import run_link

        asked = LinkJob.parse_data(job, where="link")
        return run_link(asked, self._device).model_dump(mode="json")

    def sums(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do its part of a `SumJob`."""
        from llmpq.profiler.timing.sum_timings import run_sums

        asked = SumJob.parse_data(job, where="sums")
        return run_sums(asked, self._device).model_dump(mode="json")

    def lost(self) -> bool:
        """Return whether its GPU refuses this process all further work."""
        return _is_lost(self._device)


def _is_lost(device: torch.device) -> bool:
    """Return whether the GPU refuses this process all further work, as after a bad address."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def claim_device(set_up: SetUp) -> tuple[torch.device, object]:
    """Set the threads, or take the GPU; return the device and what must stay alive with it.

    A share of a GPU's SMs is taken before any other CUDA work of the process.
    """
    torch.set_num_threads(set_up.threads)
    if not set_up.cuda:
        return torch.device("cpu"), None
    if set_up.sms is None:
        return torch.device("cuda", 0), None
    from torch.cuda.green_contexts import GreenContext

    context: Any = GreenContext.create(num_sms=set_up.sms, device_id=0)
    context.set_context()
    return torch.device("cuda", 0), context


def _share(set_up: SetUp, device: torch.device) -> float:
    """Return the share of the GPU's multiprocessors that the process has."""
    if set_up.sms is None:
        return 1.0
    return set_up.sms / torch.cuda.get_device_properties(device).multi_processor_count


def machine(device: torch.device) -> str:
    """Return what decides whether old samples still hold: processor or GPU, and torch."""
    return f"{device_name(device)}, torch {torch.__version__}"


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines() if _has_cpuinfo() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _has_cpuinfo() -> bool:
    return Path("/proc/cpuinfo").exists()


if __name__ == "__main__":
    serve_calls(TimedProcess, CALLS, threads=False)
