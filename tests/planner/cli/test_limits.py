"""Numbers no plan can be made for, and flags without an effect: one sentence, exit 2, at once."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.check.refusal import too_big
from llmpq.planner.evaluate.fits import fits
from llmpq.plans.plan import Plan
from reference.brute_force import assignments
from reference.random_problems import random_problem

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]
HUGE = "9" * 20
SMALL = ["--device-names", "T4", "V100", "--device-numbers", "1", "1", "--model", "opt-1.3b"]
JOB = ["--global-bz", "4", "--s", "64", "--n", "8"]
TOKENS = "must be between 1 and 1,048,576, got"
THETA = "must be between 0 and 1e+15 seconds per unit of omega, got"


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


NUMBERS = {
    f"--global-bz {HUGE}": f"--global-bz must be between 1 and 10,000, got {HUGE}; it counts the "
    "requests in flight, and a plan runs any number of them",
    "--global-bz -1": "--global-bz must be between 1 and 10,000, got -1; it counts the requests in "
    "flight, and a plan runs any number of them",
    f"--s {HUGE}": f"--s {TOKENS} {HUGE}",
    f"--n {HUGE}": f"--n {TOKENS} {HUGE}",
    "--n 0": f"--n {TOKENS} 0",
    "--theta inf": f"--theta {THETA} inf",
    "--theta nan": f"--theta {THETA} nan",
    "--theta -1": f"--theta {THETA} -1",
    "--theta 1e308": f"--theta {THETA} 1e+308",
    "--quality-budget inf": "--quality-budget must be between 0 and 1e+09, got inf",
    "--quality-budget nan": "--quality-budget must be between 0 and 1e+09, got nan",
    "--quality-budget -1": "--quality-budget must be between 0 and 1e+09, got -1",
    "--max-devices 0": "--max-devices must be a positive number, got 0",
    "--max-devices -1": "--max-devices must be a positive number, got -1",
    "--group -1": "--group must be a positive number, got -1",
    "--gap inf": "--gap must be between 0 and 1, got inf",
    "--gap nan": "--gap must be between 0 and 1, got nan",
    "--gap 2": "--gap must be between 0 and 1, got 2",
    "--time-limit nan": "--time-limit must be a number >= 0, got nan",
    "--pareto --pareto-points 1": "--pareto-points must be at least 2, got 1",
    f"--prefill-microbatch {HUGE}": "--prefill-microbatch must be between 1 and the batch of 4, "
    f"got {HUGE}",
    "--decode-microbatch 0": "--decode-microbatch must be between 1 and the batch of 4, got 0",
    f"--device-numbers {HUGE} 1": "--device-numbers: T4 must be between 1 and 1,000, got " + HUGE,
    "--device-numbers 0 1": "--device-numbers: T4 must be between 1 and 1,000, got 0",
    "--costs=": "the name of a JSON file is empty",
    "--output=": "--output is empty, expected a file's name; give one or leave it out",
    "--pareto -o README.md/plan.json": "cannot write 'README.md/plan.json': 'README.md' is not a "
    "directory",
    "--reserve nan": "--reserve: expected a size such as '14.8 GiB', got 'nan'",
    "--reserve=-1GiB": "--reserve: a size cannot be negative, got '-1GiB'",
    "--reserve=": "--reserve: expected a size such as '14.8 GiB', got ''",
    f"--what-if batch={HUGE}": f"--what-if batch must be between 1 and 10,000, got {HUGE}",
    f"--what-if s={HUGE}": f"--what-if s {TOKENS} {HUGE}",
    "--what-if batch=\u00b2": "--what-if batch=\u00b2: argument --global-bz: expected a whole "
    "number, got '\u00b2'; see llmpq-algo plan --help",
    "--pin \u00b2=T4-0": "--pin \u00b2=T4-0: expected LAYERS=DEVICE, such as 0-3=T4-0",
    "--pin 5-3=T4-0": "--pin 5-3=T4-0: expected the first layer before the last",
    "--pin 0-3=T4-0 --pin 3=V100-32GB-0": "--pin gives layers 0-3 to T4-0 and 3-3 to V100-32GB-0, "
    "a device's pins joined; give each layer to one device",
    "--bits=": "--bits is empty; expected bits such as 4 or 3,4,8, or leave it out",
}


@pytest.mark.parametrize("flags", NUMBERS)
def test_a_number_out_of_range_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setattr(
        "llmpq.planner.solving.answer.plan_in_child", None
    )  # refused before planning
    monkeypatch.setattr("llmpq.planner.cli.show_front.front_in_child", None)
    monkeypatch.chdir(ROOT)
    code, text, err = _run(capsys, *SMALL, *JOB, *flags.split())
    assert (code, text, err) == (2, "", f"llmpq-algo: {NUMBERS[flags]}\n")


def test_theta_of_a_cluster_file_is_checked_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: x\nnodes:\n  - {name: a, accelerators: T4}\nplanning: {theta: .inf}\n")
    code, _, err = _run(capsys, "--cluster", str(path), "--model", "opt-1.3b", *JOB)
    assert (code, err) == (2, f"llmpq-algo: '{path}': planning.theta {THETA} inf\n")


@pytest.mark.parametrize("flags", ["", "--method uniform", "--pareto", "--quality-budget 1"])
def test_a_batch_beyond_all_memory_is_refused_before_any_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setattr("llmpq.planner.solving.answer.plan_in_child", None)
    monkeypatch.setattr("llmpq.planner.cli.show_front.front_in_child", None)
    start = time.thread_time()
    words = ["--global-bz", "10000", "--s", "512", "--n", "100", "--kv", "16,8", *flags.split()]
    code, _, err = _run(capsys, *SMALL, *words)
    assert code == 5 and time.thread_time() - start < 5
    assert err.startswith("llmpq-algo: opt-1.3b does not fit T4x1-V100x1: even at w4a16 and kv16, ")


def test_a_thousand_devices_are_refused_as_fast(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.planner.solving.answer.plan_in_child", None)
    start = time.thread_time()
    words = ["--device-names", "T4", "V100", "--device-numbers", "1000", "1000", *JOB]
    code, _, err = _run(capsys, *words, "--model", "llama-3.1-405b", "--max-devices", "2")
    assert code == 5 and time.thread_time() - start < 5
    assert "does not fit T4x1000-V100x1000: even at w4a16 and kv16, V100-32GB-" in err


IDLE = {
    "--pareto-points 5": ("--pareto-points has no effect without --pareto", "add --pareto"),
    "--solver cbc": ("--solver has no effect without --method ilp (or all)", "add it"),
    "--method uniform --solver highs": ("--solver has no effect without --method ilp", "add it"),
    "--bits 4,8 --outliers 8": ("--outliers does nothing without w4a4 among the --bits", "add it"),
    "--shaq-efficient --method exact": (
        "--shaq-efficient is --method heuristic, got --method exact",
        "leave one out",
    ),
}
"""Flags -> what is said, and what to do."""


@pytest.mark.parametrize("flags", IDLE)
def test_flags_without_an_effect_are_refused(
    capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    code, text, err = _run(capsys, *SMALL, *JOB, *flags.split())
    said, remedy = IDLE[flags]
    assert (code, text) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"llmpq-algo: {said}") and remedy in err and "out" in err


def test_numbers_of_devices_without_names(capsys: pytest.CaptureFixture[str]) -> None:
    paper = ROOT / "clusters" / "paper" / "02.yaml"
    words = ["--cluster", str(paper), "--device-numbers", "3", "--model", "opt-13b"]
    code, _, err = _run(capsys, *words, *JOB)
    assert code == 2 and err.startswith("llmpq-algo: --device-numbers does nothing without")


def test_an_unknown_draft_is_refused_before_planning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.planner.solving.answer.plan_in_child", None)
    code, _, err = _run(capsys, *SMALL, *JOB, "--speculate", "medusa")
    known = "auto, qspec, w4kv4, kv4, ngram, mtp"
    assert (code, err) == (2, f"llmpq-algo: --speculate medusa: expected one of {known}\n")


def _but_methods(err: str) -> list[str]:
    """Return what is said on stderr beside which method runs."""
    return [line for line in err.splitlines() if not line.startswith("llmpq-algo: --method ")]


@pytest.mark.parametrize("bits, label", [("4,8", "8 bits"), ("4,16", "16 bits"), ("w8a8", "w8a8")])
def test_offloading_is_estimated_at_what_is_offered(
    capsys: pytest.CaptureFixture[str], bits: str, label: str
) -> None:
    code, text, err = _run(capsys, *SMALL, *JOB, "--method", "all", "--bits", bits)
    assert code == 0 and _but_methods(err) == []
    line = next(line for line in text.splitlines() if "flexgen" in line)
    loss = "0" if "16" in bits.split(",") else "0.003461"
    assert loss in line.split() and f"(estimate)   {label}  " in line


DEVICES = {
    "--known --from-ray": "--known does not go with --from-ray",
    "--known --yaml": "--known does not go with --yaml",
    "--from-ray auto --yaml": "--from-ray does not go with --yaml",
    "--yaml --json": "--json does not go with --yaml",
}


@pytest.mark.parametrize("flags", DEVICES)
def test_lists_of_devices_in_one_form(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    code, text, err = _run(capsys, "devices", *flags.split())
    said = f"llmpq-algo: {DEVICES[flags]}; leave one of them out\n"
    assert (code, text, err) == (2, "", said)


def test_what_if_of_all_methods_goes_by_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, *JOB, "--method", "all", "--what-if", "-T4-0"]
    code, text, err = _run(capsys, *words)
    assert code == 0 and _but_methods(err) == [] and "what if -T4-0: " in text


def test_offloading_is_no_plan_of_a_model_too_big_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--device-names", "T4", "--device-numbers", "1", *JOB, "--model", "opt-66b"]
    code, _, err = _run(capsys, *words, "--method", "flexgen")
    assert code == 2 and err.startswith("llmpq-algo: --method flexgen is an estimate of offloading")


def test_too_big_is_never_said_of_what_fits() -> None:
    said = 0
    for seed in range(60):
        p = random_problem(
            random.Random(seed), layers=(3, 5), kinds=(1, 2), devices=(1, 2), precisions=2, batch=2
        )
        if too_big(p):
            said += 1
            assert not any(fits(p, a) for a in assignments(p))
    assert 3 <= said <= 57


def test_a_device_that_holds_the_model_alone_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """A first stage that is also the last keeps no outputs on their way to another."""
    words = ["--device-names", "T4", "--device-numbers", "2", "--model", "opt-1.3b", "--bits", "16"]
    job = ["--global_bz", "4", "--s", "1900", "--n", "100", "--reserve", "10757000000"]
    sizes = ["--max-devices", "1", "--prefill-microbatch", "1", "--decode-microbatch", "1"]
    code, text, err = _run(capsys, *words, *job, *sizes)
    assert (code, err) == (0, "") and "0-23" in text
    code, _, err = _run(capsys, *words, *job[:-1], "10980000000", *sizes)
    assert code == 5 and "does not fit" in err


def test_the_largest_theta_makes_a_plan_that_can_be_read(tmp_path: Path) -> None:
    words = ["--device-names", "T4", "--device-numbers", "1", *JOB, "--model", "opt-1.3b"]
    path = tmp_path / "plan.json"
    assert main([*words, "--theta", "1e15", "--bits", "3", "-o", str(path)]) == 0
    assert Plan.load(path).solver.value > 1e15


def test_a_profile_in_which_layers_take_no_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = json.loads((ROOT / "benchmarks" / "data" / "h200-opt-30b.costs.json").read_text())
    for entry in data["entries"]:
        for regime in entry["regimes"]:
            regime["terms"] = dict.fromkeys(regime["terms"], 0.0)
            regime["curve"] = []
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data))
    words = ["--cluster", str(ROOT / "clusters" / "h200x2.yaml"), "--model", "opt-30b"]
    code, _, err = _run(capsys, *words, *JOB, "--costs", str(path))
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"llmpq-algo: '{path}': a w16a16 layer takes no time in decode on H200, ")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_plan_is_in_the_dtype_in_which_its_costs_were_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: str
) -> None:
    """Where none is named: in another one these times would not be used."""
    data = json.loads((ROOT / "benchmarks" / "data" / "h200-opt-30b.costs.json").read_text())
    for entry in data["entries"]:
        entry["dtype"] = dtype
    path, out = tmp_path / "costs.json", tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    words = ["--cluster", str(ROOT / "clusters" / "h200x2.yaml"), "--model", "opt-30b", "-o", out]
    words += ["--bits", "16", "--engines", "1", "--costs", path]
    code, text, err = _run(capsys, *map(str, words), *JOB)
    assert code == 0, err
    assert Plan.load(out).workload.dtype == dtype and "not profiled" not in text
    code, _, _ = _run(capsys, *map(str, words), *JOB, "--dtype", "float16")
    assert code == 0 and Plan.load(out).workload.dtype == "float16"


def test_a_card_that_lacks_the_measured_dtype_decides(tmp_path: Path) -> None:
    costs = ROOT / "benchmarks" / "data" / "h200-opt-30b.costs.json"
    data = json.loads(costs.read_text())
    for entry in data["entries"]:
        entry["dtype"] = "bfloat16"
    path, out = tmp_path / "costs.json", tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    words = ["--devices", "t4:8", "--model", "opt-30b", "--bits", "16", "--engines", "1"]
    assert main([*words, *JOB, "--costs", str(path), "-o", str(out)]) == 0
    assert Plan.load(out).workload.dtype == "float16"
