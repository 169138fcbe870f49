"""What is forced on every device of a plan leaves out the devices that do not run it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.devices.device_spec import device_specs
from llmpq.kernels.kernel_table import TENSOR_CORES
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.plans.able_devices import Forced, NoDeviceRunsError
from llmpq.plans.capabilities import execution_modes, require
from llmpq.precision import KVPrecision, Precision

pytestmark = pytest.mark.pure

MODELS = ("llama-3.1-8b", "gemma-3-12b", "deepseek-v2-lite", "deepseek-v3.2", "mixtral-8x7b")
KINDS = [kind for kind, spec in device_specs().items() if not spec.sold_with]


def runs(spec: ModelSpec, kind: str, kv: KVPrecision, dtype: Any, precision: Precision) -> bool:
    """What a stage asks before it loads (runtime/backends/build_stage.py), and a dtype needs."""
    own = device_specs()[kind]
    if own.export_only is not None:
        return dtype != "bfloat16" or own.capability is None
    old = own.capability is not None and tuple(map(int, own.capability.split("."))) < TENSOR_CORES
    ways = execution_modes(
        gpu=not own.is_cpu, kv=kv, drafts=False, precisions=[precision], dtype=dtype
    )
    try:
        require(spec, ways, max_len=1024)
    except ValueError:
        return False
    return not old or (kv is KVPrecision.KV16 and dtype != "bfloat16")


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_device_is_left_out_where_a_stage_would_refuse(model: str) -> None:
    spec, seen = ModelSpec.by_name(model), set()
    nodes = [{"name": "n", "devices": [{"kind": kind} for kind in KINDS]}]
    devices = Cluster.parse_data({"name": "all", "nodes": nodes}, where="test").devices
    for kv, dtype, precision in itertools.product(
        KVPrecision,
        ("float16", "bfloat16", "float32"),
        (Precision.W16A16, Precision.W4A16, Precision.W8A8),
    ):
        forced = Forced(spec=spec, kvs=(kv,), dtype=dtype, layers=[(precision,)], max_len=1024)
        for device in devices:
            able = forced.lack(device) is None
            assert able == runs(spec, device.kind, kv, dtype, precision), (device.kind, forced)
            seen.add(able)
    assert seen == {True, False}


OPTIONS: list[tuple[str, dict[str, str], str, str, dict[str, str]]] = [
    ("llama-3.1-8b", {"kv": "8"}, "a100-40gb", "v100", {"kv": "16"}),
    ("llama-3.1-8b", {"kv": "4"}, "3090:2", "t4:2", {"kv": "16"}),
    ("llama-3.1-8b", {"kv": "8v4,4"}, "cpu=64GB+8threads", "2080-ti", {"kv": "16"}),
    ("llama-3.1-8b", {"dtype": "bfloat16"}, "4090", "1080-ti", {"dtype": "float16"}),
    ("qwen3-8b", {"dtype": "bfloat16", "kv": "8"}, "h100", "t4:2,v100", {"dtype": "auto"}),
    ("llama-3.1-8b", {"speculate": "kv4"}, "3090", "v100:2", {"speculate": "ngram"}),
    ("deepseek-v3.2", {"kv": "8"}, "cpu=1500GB+64threads", "h200:8", {"kv": "16"}),
    ("deepseek-v2-lite", {"kv": "8", "dtype": "float32"}, "cpu=64GB+8threads", "l4", {"kv": "16"}),
    ("gemma-3-12b", {"bits": "w8a8"}, "cpu=64GB+8threads", "4090", {"bits": "8"}),
    ("gemma-3-12b", {"bits": "w8a8,w4a4"}, "cpu=64GB+8threads", "a100", {"bits": "4"}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "option", "able", "unable", "remedy"), OPTIONS)
def test_devices_that_cannot_do_what_is_asked_are_in_no_plan(
    model: str, option: dict[str, str], able: str, unable: str, remedy: dict[str, str]
) -> None:
    def made(devices: str, **options: Any) -> tuple[set[str], list[str]]:
        problem, _, notes = make_problem(
            PlanRequest(model=model, devices=devices, batch=1, **options)
        )
        return {device.name for device in problem.cluster.devices}, notes

    alone, _ = made(able, **option)
    mixed, notes = made(f"{able},{unable}", **option)
    assert mixed == alone
    (line,) = [note for note in notes if " left out: " in note]
    others, plain = made(unable, **{**option, **remedy, **({"kv": "16"} if "kv" in option else {})})
    assert all(name.rpartition("-")[0] in line for name in others)
    assert not any(" left out: " in note for note in plain)
    with pytest.raises(ValueError) as refused:
        made(unable, **option)
    text = str(refused.value)
    assert any(name.rpartition("-")[0] in text for name in others), text
    assert any(f"--{name}" in text for name in remedy) or "weight-only" in text, text


def test_kv_bits_that_one_device_does_not_run_are_not_chosen_where_others_are_allowed() -> None:
    request = PlanRequest(model="llama-3.1-8b", devices="a100-40gb,v100", kv="8,16", batch=1)
    problem, _, notes = make_problem(request)
    assert len(problem.cluster.devices) == 2 and problem.kv is KVPrecision.KV16
    assert any("no plan has a KV cache of 8 bits" in note for note in notes)
    latents = PlanRequest(model="deepseek-v2-lite", devices="4090", kv="8v4,4", batch=1)
    problem, _, _ = make_problem(latents)
    assert problem.kv is KVPrecision.KV4


def test_rounded_activations_go_where_others_are_allowed() -> None:
    request = PlanRequest(model="gemma-3-12b", devices="4090", bits="8,w8a8,4", batch=1)
    problem, _, notes = make_problem(request)
    assert set(problem.choices) == {Precision.W8A16, Precision.W4A16}
    assert any(note.startswith("no plan has w8a8: gemma-3-12b") for note in notes)
    on_cpu = PlanRequest(model="gemma-3-12b", devices="cpu=64GB+8threads", bits="8,w8a8", batch=1)
    assert Precision.W8A8 in make_problem(on_cpu)[0].choices


def test_a_pinned_device_that_cannot_do_it_is_refused() -> None:
    request = PlanRequest(
        model="llama-3.1-8b", devices="a100-40gb,v100", kv="8", pin=["0-3=V100-32GB-0"], batch=1
    )
    with pytest.raises(NoDeviceRunsError, match="^--pin V100-32GB-0: llmpq has no kernels"):
        make_problem(request)


def test_the_command_plans_without_it_or_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-3.1-8b", "--kv", "8", "--batch", "1", "--gen-len", "10"]
    changes = ["--what-if", "+t4", "--what-if=-v100", "--what-if", "kv=16"]
    assert main(["--devices", "v100,a100-40gb,v100", *words, *changes]) == 0
    out = capsys.readouterr().out
    assert "A100-40GB-0" in out and "V100-32GB-" not in out
    assert "note: V100-32GB left out: llmpq has no kernels for a KV cache of 8" in out
    assert out.count("what if ") == 3
    assert main(["--devices", "v100:2", *words]) == 2
    assert "plan with --kv 16" in capsys.readouterr().err
