"""What the planner refuses or warns of: files of another model, jobs longer than its positions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.problem.limits import positions_note
from llmpq.planner.problem.outcome import Unfinished
from llmpq.plans.plan import Plan
from llmpq.workload import Workload

pytestmark = pytest.mark.pure

PAPER = Path(__file__).resolve().parents[3] / "clusters" / "paper"
TINY = ["--device-names", "V100", "--device-numbers", "1", "--global-bz", "2"]
JOB = ["--s", "64", "--n", "8"]
REMEDY = "make one for this model with llmpq-profile indicator --model"


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def _omega(path: Path, model: str, fingerprint: str | None) -> Path:
    layers = ModelSpec.by_name("opt-1.3b").num_layers
    data = {"indicator": "variance", "model": model, "num_layers": layers}
    data["weights"] = {p: [1.0] * layers for p in ("w4a16", "w8a16")}
    path.write_text(json.dumps({**data, "model_fingerprint": fingerprint}))
    return path


def test_omega_of_another_model_of_as_many_layers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    here = ModelSpec.by_name("opt-1.3b").fingerprint()
    words = [*TINY, *JOB, "--model", "opt-1.3b", "--omega-file"]
    for model, fingerprint, got in (
        ("qwen3-2b", None, f"model qwen3-2b, got opt-1.3b; {REMEDY}\n"),
        ("opt-1.3b", "beef", f"model opt-1.3b (beef), got opt-1.3b ({here}); {REMEDY}\n"),
    ):
        path = _omega(tmp_path / "omega.json", model, fingerprint)
        code, _, err = _run(capsys, *words, str(path))
        assert (code, err) == (2, f"llmpq-algo: '{path}' was made for {got}")
    for model, fingerprint in (("OPT-1.3b", None), ("a-folder-renamed", here)):
        path = _omega(tmp_path / "omega.json", model, fingerprint)
        assert _run(capsys, *words, str(path))[0] == 0


def test_omega_of_another_number_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    path = PAPER / "omega-opt-13b.json"
    words = [*TINY, *JOB, "--model", "opt-1.3b", "--omega-file", str(path)]
    code, _, err = _run(capsys, *words)
    text = f"'{path}' was made for 40 layers (opt-13b), the model has 24; {REMEDY}\n"
    assert (code, err) == (2, f"llmpq-algo: {text}")


def test_a_job_beyond_the_models_positions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    long = [*TINY, "--s", "4000", "--n", "98", "-o", str(out)]
    code, text, _ = _run(capsys, *long, "--model", "llama-2-7b")
    beyond = "prompts of 4000 and answers of 98 tokens are beyond the 4096 positions of llama-2-7b"
    assert code == 0 and text.startswith(f"warning: {beyond}; text past what rotary")
    assert f"warning: {beyond}" in Plan.load(out).solver.note
    code, text, _ = _run(capsys, *long[:-3], "97", *long[-2:], "--model", "llama-2-7b")
    assert code == 0 and "beyond the" not in text and not Plan.load(out).solver.note
    code, _, err = _run(capsys, *long, "--model", "opt-1.3b")
    assert code == 2 and err.endswith("2048 positions of opt-1.3b; give a smaller --s or --n\n")
    code, _, err = _run(
        capsys, *TINY, "--s", "2000", "--n", "8", "--model", "opt-1.3b", "--what-if", "n=80"
    )
    assert (
        code == 2
        and "prompts of 2000 and answers of 80 tokens are beyond the 2048 positions" in err
    )
    long = [*TINY, "--context", "3k", "--model", "opt-1.3b"]
    assert _run(capsys, *long)[2].endswith("2048 positions of opt-1.3b; give a smaller --context\n")


def test_alibi_may_extrapolate() -> None:
    bloom = ModelSpec.by_name("bloom-176b")
    note = positions_note(bloom, Workload(batch=1, prompt_len=2048, gen_len=100))
    assert "ALiBi extrapolates" in note and not note.startswith("warning")


CLUSTERS = {
    "name: x\nnodes: [\n  - {name: a\n": (
        "'{path}' is not valid YAML at line 3, column 3: expected the node content, but found '-'"
    ),
    "schema: 2\nname: x\nnodes:\n  - {name: a, accelerators: T4}\n": (
        "{path}: this llmpq reads schema 1, got schema 2; make the file anew, or update llmpq"
    ),
    "name: x\nnodes:\n  - {name: a, accelerators: T4}\n  - {name: b, accelerators: V10}\n": (
        "{path}: node 'b': unknown device 'V10': nearest: V100-16GB"
    ),
}


@pytest.mark.parametrize("text", CLUSTERS, ids=["yaml", "schema", "device"])
def test_a_bad_cluster_file_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    code, _, err = _run(capsys, *JOB, "--model", "opt-1.3b", "--cluster", str(path))
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("llmpq-algo: " + CLUSTERS[text].format(path=path))


def test_folders_in_the_place_of_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*JOB, "--model", "opt-1.3b", "--cluster"]
    code, _, err = _run(capsys, *words, str(tmp_path))
    assert code == 2
    assert err == f"llmpq-algo: '{tmp_path}' is a directory, expected a cluster YAML\n"
    monkeypatch.setattr("llmpq.planner.cli.show_plan.answer", None)  # refused before planning
    file = tmp_path / "file"
    file.write_text("")
    below = file / "plan.json"
    for place, why in (
        (tmp_path, "it is a directory; give a file's name in it"),
        (below, f"'{file}' is not a directory"),
    ):
        code, _, err = _run(capsys, *TINY, *JOB, "--model", "opt-1.3b", "-o", str(place))
        assert (code, err) == (2, f"llmpq-algo: cannot write '{place}': {why}\n")
    code, _, err = _run(capsys, *TINY, *JOB, "--model", "opt-1.3b", "--what-if", "banana")
    assert code == 2 and err.startswith(
        "llmpq-algo: --what-if banana: expected +KIND, +KIND:2, -KIND, -DEVICE"
    )


def test_notes_keep_their_brackets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    words = [*TINY, *JOB, "--model", "opt-1.3b", "--method", "ilp", "--solver", "gurobi"]
    code, text, _ = _run(capsys, *words)
    assert code == 0 and "(pip install llmpq[gurobi]); HiGHS was used" in text


def test_no_time_is_not_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, *JOB, "--model", "opt-1.3b", "--method", "ilp", "--time-limit"]
    code, _, err = _run(capsys, *words, "0")
    assert code == 5
    assert err == "llmpq-algo: no plan found within 0 s; give a longer --time-limit\n"
    code, _, err = _run(capsys, *words, "-1")
    assert (code, err) == (2, "llmpq-algo: --time-limit must be a number >= 0, got -1\n")


DROPPED = {
    "--json --explain": ("--explain", "--json"),
    "--json --what-if batch=1": ("--what-if", "--json"),
    "--pareto --explain --what-if batch=1": ("--explain, --what-if", "--pareto"),
    "--pareto --speculate auto": ("--speculate", "--pareto"),
}
"""Flags -> what has no effect, and what to leave out."""


@pytest.mark.parametrize("flags", DROPPED)
def test_flags_that_would_be_dropped_are_refused(
    capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    code, text, err = _run(capsys, *TINY, *JOB, "--model", "opt-1.3b", *flags.split())
    idle, mode = DROPPED[flags]
    assert (code, text) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"llmpq-algo: {idle} ha") and f"no effect with {mode}" in err
    assert f"leave {mode} out" in err


GROUP_SIZES = {
    ("48", "w4a4"): "expected 128, 64, 32, or 0 for a channel",
    ("-1", "4"): "expected 128, 64, 32, or 0 for a channel",
}


@pytest.mark.parametrize("size, bits", GROUP_SIZES)
def test_groups_that_cannot_run_are_refused(
    capsys: pytest.CaptureFixture[str], size: str, bits: str
) -> None:
    words = [*TINY, *JOB, "--model", "opt-1.3b", "--bits", bits, "--weight-group-size", size]
    code, text, err = _run(capsys, *words)
    text_wanted = GROUP_SIZES[size, bits]
    said = f"llmpq-algo: --weight-group-size {size}: {text_wanted}\n"
    assert (code, text, err) == (2, "", said)


@pytest.mark.parametrize(
    "size, bits, stored", [("64", "w4a4,16", 64), ("32", "4,8", 32), ("0", "4,8", None)]
)
def test_groups_that_run_are_planned(
    capsys: pytest.CaptureFixture[str], size: str, bits: str, stored: int | None
) -> None:
    words = [*TINY, *JOB, "--model", "opt-1.3b", "--bits", bits, "--weight-group-size", size]
    code, text, _ = _run(capsys, *words, "--json")
    assert code == 0 and json.loads(text)["quantization"]["group_size"] == stored


def test_no_method_in_time_is_not_no_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        raise Unfinished("no plan found within 1 s; give a longer --time-limit")

    monkeypatch.setattr("llmpq.planner.solving.answer.plan_in_child", late)
    code, _, err = _run(capsys, *TINY, *JOB, "--model", "opt-1.3b", "--method", "all")
    assert code == 5
    *methods, last = err.splitlines()
    assert last == "llmpq-algo: no plan found within 1 s; give a longer --time-limit"
    assert all(line.startswith("llmpq-algo: --method ") for line in methods)


def test_uniform_names_the_short_device(capsys: pytest.CaptureFixture[str]) -> None:
    unequal = ["--device-names", "T4", "H200", "--device-numbers", "1", "1"]
    job = ["--model", "opt-30b", "--bits", "8", "--global-bz", "8", "--s", "512", "--n", "100"]
    assert _run(capsys, *unequal, *job)[0] == 0
    code, _, err = _run(capsys, *unequal, *job, "--method", "uniform")
    assert code == 5
    assert err.startswith(
        "llmpq-algo: uniform: an even split of 48 layers over 2 devices does not fit at w8a16: "
        "T4-0 is short by "
    )
    assert err.endswith(" GiB; use --method exact\n")


def test_check_of_a_plan_too_big_for_its_device(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    devices = [*TINY[:4], "--model", "opt-1.3b"]
    assert _run(capsys, *TINY, *JOB, "--model", "opt-1.3b", "-o", str(out))[0] == 0
    data = json.loads(out.read_text())
    data["workload"]["batch"] = 100_000
    out.write_text(json.dumps(data))
    code, _, err = _run(capsys, "check", str(out), *devices)
    assert code == 3 and "states a KV pool of 2 blocks (256 tokens; " in err
    assert "its workload needs 100000 blocks" in err
    del data["pool"]
    out.write_text(json.dumps(data))
    code, _, err = _run(capsys, "check", str(out), *devices)
    assert code == 5 and "the device has 31.7 GiB; short by " in err
