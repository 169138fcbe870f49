"""Which dtype is computed in where nobody says: by what the machine's CPU can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmpq import default_dtype as module
from llmpq.cluster import Cluster
from llmpq.default_dtype import default_dtype, quick_by_flags
from llmpq.devices.this_machine import NAME
from llmpq.model_spec import ModelSpec

pytestmark = pytest.mark.pure


def cluster(*kinds: str, name: str = NAME) -> Cluster:
    nodes = [{"name": "n", "devices": [{"kind": kind} for kind in kinds]}]
    return Cluster.parse_data({"schema": 1, "name": name, "nodes": nodes}, where="a test")


def spec_of(dtype: str) -> ModelSpec:
    return replace(ModelSpec.by_name("llama-3.2-1b"), dtype=dtype)


@pytest.mark.parametrize(
    "flags, found",
    [
        ("fpu avx2 fma f16c", set()),
        ("avx2 avx512f avx512_vnni", set()),
        ("avx2 avx512f avx512_bf16", {"bfloat16"}),
        ("amx_bf16 avx512_fp16", {"bfloat16", "float16"}),
        ("avx512_bf16x", set()),
    ],
)
def test_instructions_say_what_is_quick(flags, found):
    cpuinfo = ["processor : 0", f"flags\t\t: {flags}", "bogomips : 1"]
    assert quick_by_flags(cpuinfo) == found
    assert quick_by_flags([]) == frozenset()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("quick", [set(), {"bfloat16"}, {"bfloat16", "float16"}])
def test_this_machines_cpu_keeps_the_dtypes_it_is_quick_in(dtype, quick, monkeypatch):
    monkeypatch.setattr(module, "quick_dtypes", lambda: frozenset(quick))
    spec = spec_of(dtype)
    assert default_dtype(spec, cluster("CPU")) == (dtype if dtype in quick else "float32")
    assert default_dtype(spec, cluster("CPU", name="elsewhere")) == "float32"
    assert default_dtype(spec, cluster("CPU", "A100-40GB", name="mixed")) == dtype
