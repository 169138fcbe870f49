"""The dtype a model is computed in where nobody says: on GPUs its own, on CPUs what is quickest.

A CPU's instructions decide. Without those for a 16-bit dtype its products are
made of float32 ones and conversions. CPU time of one product 2048 x 2048 by torch 2.13 on an Intel
Xeon with AMX and AVX512-FP16, one thread (busy), ms:

    rows        1       8       32      128
    float32     0.62    1.91    3.00    7.39
    bfloat16    0.71    0.68    0.81    1.66
    float16     0.62    1.38    2.64    7.79    (and half of float32's bytes to read)
"""

from __future__ import annotations

import functools
from pathlib import Path

from llmpq.cluster import Cluster
from llmpq.devices.this_machine import is_this_machine
from llmpq.model_spec import ModelSpec
from llmpq.workload import Dtype

_INSTRUCTIONS = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
"""What /proc/cpuinfo calls the products of a dtype; one of them suffices."""


def default_dtype(spec: ModelSpec, cluster: Cluster) -> Dtype:
    """Return the checkpoint's dtype, or float32 where only CPUs compute, none known to be quick.

    Only this machine's CPU is looked at; those of a cluster file may be anywhere.
    """
    if not all(device.spec.is_cpu for device in cluster.devices):
        return spec.dtype
    quick = is_this_machine(cluster) and spec.dtype in quick_dtypes()
    return spec.dtype if quick else "float32"


@functools.cache
def quick_dtypes() -> frozenset[str]:
    """Return the 16-bit dtypes that this machine's CPU has products for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return quick_by_flags(lines)


def quick_by_flags(cpuinfo: list[str]) -> frozenset[str]:
    """Return the same for the lines of a /proc/cpuinfo."""
    line = next((line for line in cpuinfo if line.startswith("flags")), "")
    present = set(line.partition(":")[2].split())
    return frozenset(d for d, names in _INSTRUCTIONS.items() if present.intersection(names))
