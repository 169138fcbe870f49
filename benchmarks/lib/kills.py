"""What benchmarks that kill stages share: three stages of unequal memory, signals, quantiles."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.precision import Precision
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.workload import Workload

DEMO = Path(__file__).parents[2] / "examples" / "demo-7m"


def unequal_plan(directory: Path, *, batch: int, prompt_len: int, gen_len: int) -> Plan:
    """Return a plan of a model in float32 over three CPU stages, the middle one the largest."""
    spec = ModelSpec.from_directory(directory)
    first = spec.num_layers // 4
    job = {"batch": batch, "prompt_len": prompt_len, "gen_len": gen_len, "dtype": "float32"}
    return manual_plan(
        spec,
        Workload.parse_data(job, where="the job"),
        splits=(first, spec.num_layers - first),
        precision=Precision.W16A16,
        prefill_microbatch=batch // 2,
        decode_microbatch=batch // 2,
        model_dir=str(directory),
    )


def strike(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process, which may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, how)


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the least value that a share of sorted values does not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def stage_pids(command: psutil.Process) -> list[int]:
    """Return the stage processes of a command, in the order in which they were started."""
    found, children = [], []
    with suppress(psutil.Error):
        children = command.children(recursive=True)
    for child in children:
        with suppress(psutil.Error):
            if any("stage_process" in word for word in child.cmdline()):
                found.append(child.pid)
    return sorted(found)
