"""Which dtype is computed in where nobody says: by what the machine's CPU can."""

from __future__ import annotations

from dataclasses import replace

import pytest

import llmpq
from llmpq.devices import default_dtype as module
from llmpq.devices.cluster import Cluster
from llmpq.devices.default_dtype import default_dtype, dtype_note, quick_by_flags, require_dtype
from llmpq.devices.this_machine import NAME
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main as planner_main

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


@pytest.mark.parametrize(
    ("kinds", "model", "dtype", "note"),
    [
        (["V100", "T4"], "qwen3-8b", "float16", "V100-32GB, T4 have no bfloat16"),
        (["GTX-1080-Ti"], "llama-3.1-8b", "float16", "GTX-1080-Ti has no bfloat16"),
        (["P40", "RTX-3090"], "qwen3-8b", "float16", "(bfloat16 without P40)"),
        (["RTX-2080-Ti", "CPU"], "qwen3-8b", "float16", "all stages compute in float16"),
        (["T4", "A100"], "gemma-2-9b", "float32", "leave float16's range"),
        (["V100"], "glm-4-9b", "float32", "leave float16's range"),
        (["V100"], "gpt-oss-120b", "float32", "leave float16's range"),
        (["V100"], "opt-13b", "float16", None),
        (["A100", "RTX-3090"], "gemma-2-9b", "bfloat16", None),
        (["RX-7900-XTX"], "qwen3-8b", "bfloat16", None),
        (["M4-Max"], "qwen3-8b", "bfloat16", None),
    ],
)
def test_a_plan_has_a_dtype_that_every_gpu_computes_in(kinds, model, dtype, note):
    spec = ModelSpec.by_name(model)
    groups = [{"kind": kind, "memory": "40 GiB"} for kind in kinds]
    data = {"schema": 1, "name": "lab", "nodes": [{"name": "n", "devices": groups}]}
    lab = Cluster.parse_data(data, where="a test")
    assert default_dtype(spec, lab) == dtype
    said = dtype_note(spec, lab, dtype)
    assert (said is None) == (note is None) and (note or "") in (said or "")


def test_a_dtype_that_a_gpu_lacks_is_refused():
    with pytest.raises(
        ValueError, match="^--dtype bfloat16: T4 has no bfloat16; leave --dtype out"
    ):
        require_dtype(cluster("T4", "A100"), "bfloat16")
    require_dtype(cluster("T4", "A100"), "float16")
    require_dtype(cluster("A100", "CPU"), "bfloat16")
    gemma = ModelSpec.by_name("gemma-2-9b")
    assert "answers may be wrong" in (dtype_note(gemma, cluster("A100"), "float16") or "")


def test_the_refusal_of_a_dtype_has_the_words_that_were_typed(capsys):
    typed = ["--model", "opt-1.3b", "--devices", "t4", "--dtype", "bfloat16"]
    assert planner_main(typed) == 2
    assert "llmpq-algo: --dtype bfloat16: T4 has no bfloat16; leave --dtype out" in (
        capsys.readouterr().err
    )
    with pytest.raises(ValueError, match="^dtype bfloat16: T4 has no bfloat16; leave dtype out"):
        llmpq.make_plan("opt-1.3b", devices="t4", dtype="bfloat16")


def test_float32_of_a_config_is_said_where_a_gpu_would_take_half() -> None:
    spec = replace(ModelSpec.by_name("opt-1.3b"), dtype="float32")
    assert "--dtype bfloat16 takes half" in (dtype_note(spec, cluster("A100"), "float32") or "")
    assert "--dtype float16 takes half" in (dtype_note(spec, cluster("T4"), "float32") or "")
    assert dtype_note(spec, cluster("CPU"), "float32") is None
    assert dtype_note(ModelSpec.by_name("opt-1.3b"), cluster("A100"), "float32") is None
