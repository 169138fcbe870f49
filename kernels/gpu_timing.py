"""GPU timings: CUDA graphs of many launches, inputs rotated past the L2, samples per launch.

A graph holds `launches` calls; call i uses input set i % copies, and `copies` sets together exceed
the L2 several times, so that each call finds its weights (or its KV) in device memory, as a layer
of a model does.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

COLD_BYTES = 200_000_000
"""Unique bytes touched between two uses of the same line; an H200's L2 holds 60 MB."""


def copies_for(nbytes: int) -> int:
    """How many input sets of `nbytes` to rotate so that none is found in the L2."""
    return COLD_BYTES // max(1, nbytes) + 2


def time_launches(
    call: Callable[[int], object], copies: int, *, launches: int = 0, repeats: int = 20
) -> list[float]:
    """Return `repeats` samples, each the mean microseconds of one launch of a replayed graph."""
    launches = launches or max(20, copies)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for i in range(min(copies, 3)):  # compile, load modules and set attributes outside capture
            call(i)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                call(i % copies)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]
    return [ms * 1e3 / launches for ms in times]


def write_row(
    path: Path,
    *,
    bench: str,
    case: Mapping[str, Any],
    unit: str,
    samples: Sequence[float],
    floor: float | None = None,
    baselines: Mapping[str, float] | None = None,
    commit: str | None = None,
    predicted: float | None = None,
    program: str = "python benchmarks/kernel_bench.py",
    device: str | None = None,
) -> None:
    """Append one result row (a JSON line, as in benchmarks/results/) to `path`.

    The package writes its own rows because it is benchmarked on machines that hold nothing else.
    """
    row = {
        "bench": bench,
        "case": dict(case),
        "value": statistics.median(samples),
        "unit": unit,
        "n": len(samples),
        "spread": [min(samples), max(samples)],
        "floor": floor,
        "baselines": dict(baselines or {}),
        "predicted": predicted,
        "noisy": False,
        "device": device or _device_name(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "commit": commit or _commit(),
        "command": f"{program} {shlex.join(sys.argv[1:])}",
        "date": datetime.date.today().isoformat(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return done.stdout.strip() or "unknown"
