"""GPU timings: CUDA graphs of many launches, inputs rotated past the L2, samples per launch.

A graph holds `launches` calls; call i uses input set i % copies, and `copies` sets together exceed
the L2 several times, so that each call finds its weights (or its KV) in device memory, as a layer
of a model does.
"""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmpq.result_rows import append_row, commit_of, versions_of

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
    program: str = "python benchmarks/kernel_bench.py",
    device: str | None = None,
    commit: str | None = None,
    **row: Any,
) -> None:
    """Append a result row, as `append_row` does, of this process: `row` is the rest of its fields.

    `program`: the command that was typed, without its words; `commit`: where git is not at hand.
    """
    append_row(
        path,
        device=device or _device_name(),
        versions=versions_of("torch", "triton"),
        commit=commit or commit_of(Path(__file__).parent),
        command=f"{program} {shlex.join(sys.argv[1:])}",
        **row,
    )


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
