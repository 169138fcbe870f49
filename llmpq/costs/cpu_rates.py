"""How quick this machine's CPU is, measured in two seconds: its memory, and products of few bits.

    $XDG_CACHE_HOME/llmpq/cpu/HASH-THREADS-DTYPE.json      HASH: of the processor's name

A plan for a CPU without a profile is estimated from these rates, if there are any, instead of
 the table's placeholder. They hold for every model; a profile of the model itself is closer.
Rates of other kernels than these are not taken.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from llmpq.costs.costs_cache import cache_folder
from llmpq.costs.kernel_sources import kernels_mark
from llmpq.devices.this_machine import processor_name, usable_cores
from llmpq.file_form import FileForm
from llmpq.sizes.memory import CpuActivations
from llmpq.workload import Dtype

PROBE_S = 120.0
"""What a probe may take, compiling included; two seconds is what it does."""
_PROBE = "llmpq.profiler.timing.cpu_probe"
_LEAVE = "leave it out to plan by the table's placeholder"


class ProductRate(FileForm):
    """Seconds a weight of y = x w^T takes, by the rows of x."""

    bits: int = Field(ge=3, le=16)
    activations: CpuActivations = "exact"
    per_weight: tuple[tuple[int, float], ...] = Field(min_length=2)
    """(rows, seconds), ascending; none of the seconds is zero."""

    @model_validator(mode="after")
    def _rows_ascend(self) -> Self:
        if any(a[0] >= b[0] for a, b in pairwise(self.per_weight)):
            raise ValueError("per_weight must be of ascending rows")
        if any(rows < 1 or not 0 < seconds < 1 for rows, seconds in self.per_weight):
            raise ValueError("per_weight must be rows from 1 on and seconds between 0 and 1")
        return self

    def seconds(self, rows: float) -> float:
        """Return a weight's seconds: straight between rows measured, in proportion beyond them."""
        points = self.per_weight
        if rows <= points[0][0]:
            return points[0][1]
        for (low, least), (high, most) in pairwise(points):
            if rows <= high:
                return least + (most - least) * (rows - low) / (high - low)
        return points[-1][1] * rows / points[-1][0]


class CpuRates(FileForm):
    """What a probe found with a number of threads, in a dtype of activations."""

    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    processor: str
    threads: int = Field(ge=1)
    dtype: Dtype
    day: str
    """When it was measured, YYYY-MM-DD."""
    busy: bool
    """Whether other work had a share of the cores."""
    mem_gbps: float = Field(gt=0)
    """Reading, 1e9 bytes per second."""
    products: tuple[ProductRate, ...]
    kernels: str = ""
    """kernel_sources.py's mark of what was measured."""

    def product(self, bits: int, activations: CpuActivations) -> ProductRate | None:
        """Return the rate of a weight's bits; dense weights know one kind of activations."""
        wanted = "exact" if bits == 16 else activations
        same = (p for p in self.products if (p.bits, p.activations) == (bits, wanted))
        return next(same, None)

    def text(self) -> str:
        """Return what was measured, on one line."""
        each = []
        for product in self.products:
            (_, one), (rows, many) = product.per_weight[0], product.per_weight[-1]
            name = f"{product.bits} bits" + (" int8" if product.activations == "int8" else "")
            each.append(f"{name} {1e-9 / one:.3g} and {2e-9 * rows / many:.3g}")
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        beside = " beside other work" if self.busy else ""
        return (
            f"instead of the table's figures this CPU's ({self.processor}, {threads}, "
            f"{self.dtype}) as measured on {self.day}{beside}: {self.mem_gbps:.3g} GB/s; weights "
            f"met by one row, 1e9/s, and Gflop/s of many rows: {', '.join(each)}"
        )


def kept_rates(threads: int, dtype: Dtype) -> CpuRates | None:
    """Return what was measured here before with so many threads; None without a usable file."""
    found = _kept(threads, dtype)
    return None if found is None or found.kernels != kernels_mark(on_cpu=True) else found


def outdated(threads: int, dtype: Dtype) -> str | None:
    """Return that the rates kept for so many threads are not taken; None without such."""
    found = _kept(threads, dtype)
    if found is None or found.kernels == kernels_mark(on_cpu=True):
        return None
    return (
        f"this CPU's rates ({threads} threads, {dtype}) were measured on {found.day} with other "
        "kernels than these and are not taken; --probe-cpu measures them anew, in seconds"
    )


def _kept(threads: int, dtype: Dtype) -> CpuRates | None:
    try:
        found = CpuRates.load_json(_path(threads, dtype))
    except ValueError:
        return None
    asked = (processor_name(), threads, dtype)
    return found if (found.processor, found.threads, found.dtype) == asked else None


def probe(threads: int, dtype: Dtype) -> CpuRates:
    """Measure this machine's CPU and keep the rates; `ValueError` says why it cannot be."""
    cores = usable_cores()
    if threads > cores:
        raise ValueError(
            f"--probe-cpu: the plan's CPU has {threads} threads, this machine has {cores} cores; "
            f"say cpu=16GB+{cores}threads for this machine's, or plan where that CPU is"
        )
    command = [sys.executable, "-m", _PROBE, str(threads), dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"--probe-cpu: nothing measured in {PROBE_S:g} s; {_LEAVE}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(
            f"--probe-cpu: the probe ended with code {done.returncode}: {last}; {_LEAVE}"
        )
    rates = CpuRates.model_validate_json(done.stdout)
    path = _path(threads, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    rates.save_json(path)
    return rates


def rates_of(
    threads: int, dtype: Dtype, products: Sequence[ProductRate], mem_gbps: float
) -> CpuRates:
    """Return rates measured now on this machine."""
    return CpuRates(
        processor=processor_name(),
        threads=threads,
        dtype=dtype,
        day=datetime.date.today().isoformat(),
        busy=os.getloadavg()[0] > threads + 1,
        mem_gbps=mem_gbps,
        products=tuple(products),
        kernels=kernels_mark(on_cpu=True),
    )


def _path(threads: int, dtype: Dtype) -> Path:
    mark = hashlib.sha256(processor_name().encode()).hexdigest()[:12]
    return cache_folder().parent / "cpu" / f"{mark}-{threads}-{dtype}.json"
