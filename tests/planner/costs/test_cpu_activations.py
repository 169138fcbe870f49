"""`--cpu-activations int8`: the plan and its table say so, and nothing else of them changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.devices.device_list import read_devices
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.costs.roofline import estimate_costs
from llmpq.plans.plan import Plan
from llmpq.precision import Precision
from llmpq.sizes.memory import Quantization

pytestmark = pytest.mark.pure


def planned(folder: Path, *how: str) -> Plan:
    path = folder / f"{len(how)}.json"
    job = ["--global-bz", "4", "--s", "128", "--n", "64", "--bits", "4", *how]
    assert (
        main(["--model", "llama-3.2-1b", "--devices", "cpu=16GB+8threads", *job, "-o", str(path)])
        == 0
    )
    return Plan.load(path)


def test_a_plan_names_its_rounding(tmp_path):
    exact, rounded = planned(tmp_path), planned(tmp_path, "--cpu-activations", "int8")
    assert exact.quantization.cpu_activations == "exact"
    assert rounded.quantization.cpu_activations == "int8"
    assert rounded.settings().cpu_activations == "int8"
    assert [stage.layers for stage in rounded.stages] == [stage.layers for stage in exact.stages]


def test_the_table_names_it_where_weights_have_few_bits(tmp_path, capsys):
    planned(tmp_path)
    assert "int8" not in capsys.readouterr().out
    planned(tmp_path, "--cpu-activations", "int8")
    assert "16 x w4a16, int8 activations" in " ".join(capsys.readouterr().out.split())
    planned(tmp_path, "--cpu-activations", "int8", "--bits", "16")
    assert "int8" not in capsys.readouterr().out


def test_measured_costs_say_that_they_are_of_exact_activations(tmp_path, capsys):
    spec, cluster = ModelSpec.by_name("llama-3.2-1b"), read_devices("cpu=16GB+8threads").cluster
    costs = estimate_costs(
        spec, cluster.devices, dtype="float32", precisions=[Precision.W4A16],
        quantization=Quantization(),
    )  # fmt: skip
    costs.save_json(tmp_path / "costs.json")
    planned(tmp_path, "--costs", str(tmp_path / "costs.json"))
    assert "exact activations" not in capsys.readouterr().out
    planned(tmp_path, "--costs", str(tmp_path / "costs.json"), "--cpu-activations", "int8")
    said = " ".join(capsys.readouterr().out.split())
    assert "the times of CPU@8t were measured with exact activations" in said
    rounded = costs.model_copy(update={"cpu_activations": "int8"})
    rounded.save_json(tmp_path / "int8.json")
    planned(tmp_path, "--costs", str(tmp_path / "int8.json"), "--cpu-activations", "int8")
    assert "were measured with" not in capsys.readouterr().out
    planned(tmp_path, "--costs", str(tmp_path / "int8.json"))
    said = " ".join(capsys.readouterr().out.split())
    assert "were measured with int8 activations, the plan's are exact" in said
    with pytest.raises(ValueError, match="cannot be merged"):
        costs.merged(rounded)
