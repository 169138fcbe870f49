"""The process that times: exactly the threads, GPU or share of a GPU a stage would have.

Reads one JSON message a line from stdin (`SetUp` first, then `TimedCase` or `LinkJob`) and answers
each with one line. `python -m llmpq.profiler.timing.timed_process`; ends with its parent's pipe.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from llmpq.commands.child_lines import read_lines, take_answers, write_line
from llmpq.file_form import FileForm
from llmpq.memory import Quantization
from llmpq.profiler.timing.cases import Failed, LinkJob, Ready, SetUp, TimedCase, model_spec
from llmpq.profiler.timing.timed_layers import TimedModel


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until the pipe closes."""
    messages = read_lines(requests)
    set_up = SetUp.parse_data(next(messages), where="set-up")
    device, _alive = claim_device(set_up)
    timed_model = TimedModel(
        model_spec(set_up.model),
        device,
        Quantization(cpu_activations=set_up.cpu_activations),
        set_up.sampling,
        share=_share(set_up, device),
    )
    _answer(answers, Ready(machine=machine(device), device_name=device_name(device)))
    for data in messages:
        try:
            if "rank" in data:
                from llmpq.profiler.timing.link_times import run_link

                _answer(answers, run_link(LinkJob.parse_data(data, where="link"), device))
            else:
                _answer(
                    answers,
                    timed_model.time(TimedCase.parse_data(data, where="case"), set_up.effort),
                )
        except (RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            _answer(answers, Failed(error=reason, lost=_is_lost(device)))


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


def _answer(answers: TextIO, message: FileForm) -> None:
    write_line(answers, message.model_dump(mode="json"))


if __name__ == "__main__":
    serve(sys.stdin, take_answers())
