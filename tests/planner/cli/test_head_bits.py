"""`--head-bits 8`: the plan says so, and memory, times and the check all count it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.planner.__main__ import main
from llmpq.plans.plan import Plan

pytestmark = pytest.mark.pure


def planned(folder: Path, bits: int, model: str, devices: str) -> Plan:
    path = folder / f"head-{bits}.json"
    job = ["--global-bz", "4", "--s", "128", "--n", "64", "--bits", "4", "--head-bits", str(bits)]
    job += ["--engines", "1"]
    assert main(["--model", model, "--devices", devices, *job, "-o", str(path)]) == 0
    assert main(["check", str(path)]) == 0
    return Plan.load(path)


@pytest.mark.parametrize(
    "model, devices",
    [("llama-3.1-8b", "3060"), ("llama-3.2-1b", "3060,3060"), ("qwen3-8b", "cpu=64GB+16threads")],
)
def test_it_is_read_in_half_the_time_and_held_in_half_the_bytes(tmp_path, model, devices):
    wide, narrow = (planned(tmp_path, bits, model, devices) for bits in (16, 8))
    assert (wide.quantization.head_bits, narrow.quantization.head_bits) == (16, 8)
    assert wide.predicted is not None and narrow.predicted is not None
    assert narrow.predicted.decode_s < wide.predicted.decode_s
    assert narrow.predicted.sum_omega == wide.predicted.sum_omega
    held = [plan.stages[-1].memory for plan in (wide, narrow)]
    assert held[0] is not None and held[1] is not None
    spec = narrow.inputs.model if narrow.inputs is not None else None
    assert spec is not None
    saved = held[0].embedding_bytes - held[1].embedding_bytes
    both = len(narrow.stages) == 1 and spec.tied_embeddings
    fewer = -1 if both else narrow.workload.dtype_bytes - 1  # tied: held a second time, in 8 bits
    assert saved == pytest.approx(fewer * spec.vocab * spec.hidden, rel=0.05)


def by_default(folder: Path, *words: str) -> Plan:
    path = folder / "plan.json"
    job = ["--model", "llama-3.2-1b", "--global-bz", "2", "--s", "64", "--n", "32"]
    assert main([*job, *words, "-o", str(path)]) == 0
    assert main(["check", str(path)]) == 0
    return Plan.load(path)


@pytest.mark.parametrize(
    "words, bits",
    [
        (["--devices", "cpu", "--bits", "4"], 8),
        (["--devices", "cpu", "--bits", "8"], 8),
        (["--devices", "cpu"], 8),
        (["--devices", "cpu", "--bits", "4", "--head-bits", "16"], 16),
        (["--devices", "cpu", "--bits", "16"], 16),
        (["--devices", "cpu", "--quality-budget", "0"], 16),
        (["--devices", "3060", "--bits", "4"], 16),
        (["--devices", "3060", "--bits", "4", "--head-bits", "8"], 8),
    ],
)
def test_cpus_have_it_in_eight_bits_where_layers_are_rounded(tmp_path, capsys, words, bits):
    plan = by_default(tmp_path, *words)
    assert plan.quantization.head_bits == bits
    assert ("output matrix w8a16" in capsys.readouterr().out) == (bits == 8)
    if "--quality-budget" in words:
        assert {p.weight_bits for p in plan.precisions} == {16}


@pytest.mark.parametrize("ends, bits", [("0=RTX-3060-0", 8), ("0=CPU-0", 16)])
def test_the_last_stage_decides(tmp_path, ends, bits):
    plan = by_default(tmp_path, "--devices", "3060,cpu", "--bits", "4", "--pin", ends, "--pin",
                      "15=CPU-0" if ends == "0=RTX-3060-0" else "15=RTX-3060-0")  # fmt: skip
    assert plan.stages[-1].is_cpu == (bits == 8)
    assert plan.quantization.head_bits == bits
    memory = plan.stages[-1].memory
    assert memory is not None
    matrix = 128256 * 2048
    assert memory.embedding_bytes == pytest.approx(matrix * bits / 8, rel=0.05)


def test_a_plan_that_says_nothing_has_the_same(tmp_path):
    plan = by_default(tmp_path, "--devices", "cpu", "--bits", "4")
    silent = plan.quantization.model_copy(update={"head_bits": None})
    assert plan.model_copy(update={"quantization": silent}).settings() == plan.settings()


@pytest.mark.parametrize("theta", ["1", "1e4", "1e9"])
def test_the_bound_holds_of_plans_with_either_output_matrix(tmp_path, theta):
    words = ["--devices", "cpu", "--bits", "8,16", "--theta", theta]
    plan = by_default(tmp_path, *words)
    rounded = by_default(tmp_path, *words, "--head-bits", "8")
    solved, other = plan.solver, rounded.solver
    assert solved is not None and other is not None and solved.bound is not None
    if any(p.weight_bits == 8 for p in plan.precisions):
        assert solved.value == pytest.approx(other.value)
    elif any(p.weight_bits == 8 for p in rounded.precisions):
        assert solved.bound <= other.value
    else:  # nobody has shown that no mix lies between the two
        assert plan.quantization.head_bits == 16
        assert solved.bound <= other.value < solved.value
        assert solved.status == "feasible"
