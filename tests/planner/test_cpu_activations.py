"""`--cpu-activations int8`: the plan says so, and nothing else of it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.plan import Plan
from llmpq.planner.__main__ import main

pytestmark = pytest.mark.pure


def planned(folder: Path, *how: str) -> Plan:
    path = folder / f"{len(how)}.json"
    job = ["--global-bz", "4", "--s", "128", "--n", "64", "--bits", "4", *how]
    assert main(["--model", "llama-3.2-1b", "--devices", "cpu", *job, "-o", str(path)]) == 0
    return Plan.load(path)


def test_a_plan_names_its_rounding(tmp_path):
    exact, rounded = planned(tmp_path), planned(tmp_path, "--cpu-activations", "int8")
    assert exact.quantization.cpu_activations == "exact"
    assert rounded.quantization.cpu_activations == "int8"
    assert rounded.quantization.settings().cpu_activations == "int8"
    assert [stage.layers for stage in rounded.stages] == [stage.layers for stage in exact.stages]
