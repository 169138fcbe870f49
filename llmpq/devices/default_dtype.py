"""The default compute dtype: on GPUs the checkpoint's own, on CPUs the quickest.

All stages of a plan compute in one dtype, which every GPU of it must have: a model stored in
bfloat16 is computed in float16 where a GPU has no bfloat16 (older than Ampere), or in float32 where
its values leave float16's range.

A CPU's instructions decide. Without those for a 16-bit dtype its products are made of float32 ones
and conversions. CPU time of one product 2048 x 2048 by torch 2.13 on an Intel
Xeon with AMX and AVX512-FP16, one thread (busy), ms:

    rows        1       8       32      128
    float32     0.62    1.91    3.00    7.39
    bfloat16    0.71    0.68    0.81    1.66
    float16     0.62    1.38    2.64    7.79    (and half of float32's bytes to read)
"""

from __future__ import annotations

import functools
from pathlib import Path

from llmpq.devices.cluster import Cluster
from llmpq.devices.this_machine import is_this_machine
from llmpq.models.model_spec import ModelSpec
from llmpq.workload import Dtype

_INSTRUCTIONS = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
"""What /proc/cpuinfo calls the products of a dtype; one of them suffices."""


def default_dtype(spec: ModelSpec, cluster: Cluster) -> Dtype:
    """Return the checkpoint's dtype if the devices have it, else the next that they have.

    Where only CPUs compute, none known to be quick in 16 bits, it is float32. Only this machine's
    CPU is looked at; those of a cluster file may be anywhere.
    """
    if all(device.spec.is_cpu for device in cluster.devices):
        quick = is_this_machine(cluster) and spec.dtype in quick_dtypes()
        return spec.dtype if quick else "float32"
    if spec.dtype == "float32":
        return "float32"
    if not without_bfloat16(cluster):
        return "bfloat16" if spec.overflows_float16 else spec.dtype
    return "float32" if spec.overflows_float16 else "float16"


def without_bfloat16(cluster: Cluster) -> list[str]:
    """Return the kinds of GPUs that have no bfloat16."""
    gpus = [device for device in cluster.devices if not device.spec.is_cpu]
    return list(dict.fromkeys(d.kind for d in gpus if not d.spec.has_bfloat16))


def require_dtype(cluster: Cluster, dtype: str) -> None:
    """Raise `ValueError` for a dtype that a GPU does not have."""
    lacking = without_bfloat16(cluster) if dtype == "bfloat16" else []
    if lacking:
        raise ValueError(
            f"--dtype bfloat16: {', '.join(lacking)} {_has(lacking)} no bfloat16; leave --dtype "
            "out or give float16 or float32"
        )


def dtype_note(spec: ModelSpec, cluster: Cluster, dtype: Dtype) -> str | None:
    """Say why a plan's dtype is not the checkpoint's, or that it is a bad one; None if neither."""
    lacking = without_bfloat16(cluster)
    if dtype == "float16" and spec.overflows_float16:
        return (
            f"{spec.name}'s values leave the range of float16: answers may be wrong; leave --dtype "
            "out, or give bfloat16 or float32"
        )
    if dtype == spec.dtype == "float32" and any(not d.spec.is_cpu for d in cluster.devices):
        half = "float16" if lacking else "bfloat16"
        return f"float32, as the model's config states or leaves open; --dtype {half} takes half"
    if dtype == spec.dtype or not lacking:
        return None
    range_of = f", since {spec.name}'s values leave float16's range" if dtype == "float32" else ""
    others = any(d.kind not in lacking and not d.spec.is_cpu for d in cluster.devices)
    without = f" (bfloat16 without {', '.join(lacking)})" if others else ""
    return (
        f"{', '.join(lacking)} {_has(lacking)} no bfloat16, the checkpoint's dtype: all stages "
        f"compute in {dtype}{range_of}{without}"
    )


def _has(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


@functools.cache
def quick_dtypes() -> frozenset[str]:
    """Return the 16-bit dtypes that this machine's CPU has products for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return quick_by_flags(lines)


def quick_by_flags(cpuinfo: list[str]) -> frozenset[str]:
    """Return the 16-bit dtypes that a CPU has products for, by the lines of its /proc/cpuinfo."""
    line = next((line for line in cpuinfo if line.startswith("flags")), "")
    present = set(line.partition(":")[2].split())
    return frozenset(d for d, names in _INSTRUCTIONS.items() if present.intersection(names))
