"""--resume keeps answers that would be made alike now, and names what was otherwise."""

from __future__ import annotations

import json
import shutil

import pytest

from llmpq.runtime.cli.main import main
from llmpq.runtime.text.batch_rows import Defaults, text_row
from llmpq.runtime.text.made_with import (
    differences,
    digest,
    made_by,
    made_with,
    replaced,
)

pytestmark = pytest.mark.cpu


@pytest.fixture
def model(demo_model, tmp_path):
    """Return a copy of the model, to be changed."""
    return shutil.copytree(demo_model, tmp_path / "model")


def test_a_digest_sees_weights_and_configuration(model, demo_model):
    assert digest(model) == digest(demo_model), "not where the model lies"
    path = next(model.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    changed = digest(model)
    assert changed != digest(demo_model)
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    assert digest(model) != changed


def test_only_what_changes_tokens_counts(make_plan, demo_model):
    common = made_by(make_plan(demo_model, ()), demo_model)
    assert common == made_by(make_plan(demo_model, (3,)), demo_model), "not where stages are cut"
    assert common["weights"] == "w16a16 x8" and common["kv"] == "kv16"

    def of(**fields):
        return made_with(text_row(0, "a", Defaults(**fields)), common, 16)

    assert of() == of(seed=5), "greedy tokens have no seed"
    assert of(temperature=1.0) != of(temperature=1.0, seed=5)
    assert of(max_tokens=16) == of() != of(max_tokens=17)
    assert differences(of(), of()) == []


def test_differences_are_named():
    assert differences({"kv": "kv16", "top_k": 5}, {"kv": "kv8"}) == [
        "kv was 'kv16', now it is 'kv8'",
        "top_k was 5, now it is not given",
    ]
    assert differences({"model": "a 12"}, {"model": "b 12"}) == [], "another name of its folder"


def test_what_a_plan_after_a_loss_made_counts_as_planned(make_plan, demo_model):
    planned = made_by(make_plan(demo_model, ()), demo_model)
    lower = replaced(planned, made_by(make_plan(demo_model, (), bits="w4a16"), demo_model))
    assert lower["weights"].startswith("w4a16") and differences(lower, planned) == []
    assert lower["instead_of"] == {"weights": "w16a16 x8"}
    assert replaced(planned, planned) == planned, "other devices alone change nothing"
    other = made_by(make_plan(demo_model, (), bits="w8a16"), demo_model)
    assert [one.partition(" ")[0] for one in differences(lower, other)] == ["weights"]
    damaged = differences({**planned, "instead_of": "x"}, planned)
    assert [one.partition(" ")[0] for one in damaged] == ["instead_of"]


@pytest.fixture
def resume(model, make_plan, tmp_path):
    """Run a job, cut its output after one row, and return what resumes it with other flags."""
    make_plan(model, ()).save_json(tmp_path / "plan.json")
    make_plan(model, (), bits="w8a16").save_json(tmp_path / "other.json")
    lines = ['{"prompt": "import os"}\n', '{"custom_id": "b", "prompt": "def main"}\n']
    (tmp_path / "in.jsonl").write_text("".join(lines))
    out = tmp_path / "out.jsonl"

    def run(*flags: str, plan: str = "plan.json") -> int:
        files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(out)]
        return main(["run", "--plan", str(tmp_path / plan), *files, *flags])

    assert run("--max-tokens", "4") == 0
    whole = out.read_text()
    assert all("made_with" in json.loads(line) for line in whole.splitlines())
    out.write_text(whole.splitlines(keepends=True)[0])
    return run, out, whole, model


@pytest.mark.parametrize(
    ("flags", "plan", "named"),
    [
        (("--max-tokens", "5"), "plan.json", "max_tokens was 4"),
        (("--max-tokens", "4", "--temperature", "0.5"), "plan.json", "temperature was 0.0"),
        (("--max-tokens", "4", "--ignore-eos"), "plan.json", "ignore_eos was not given"),
        (("--max-tokens", "4", "--kv-cache-dtype", "kv8"), "plan.json", "kv was 'kv16'"),
        (("--max-tokens", "4"), "other.json", "weights was 'w16a16 x8'"),
    ],
)
def test_answers_made_otherwise_are_refused(resume, capsys, flags, plan, named):
    run, out, _, _ = resume
    before = out.read_text()
    assert run("--resume", *flags, plan=plan) == 2
    said = capsys.readouterr().err
    assert named in said and "another -o" in said
    assert out.read_text() == before, "what is there stays"


def test_answers_of_another_model_are_refused(resume, capsys):
    run, _, _, model = resume
    path = next(model.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert run("--resume", "--max-tokens", "4") == 2
    assert "model was 'model " in capsys.readouterr().err


def test_answers_made_alike_are_kept(resume):
    run, out, whole, _ = resume
    assert run("--resume", "--max-tokens", "4") == 0

    def texts(lines: str) -> list[object]:
        rows = [json.loads(line) for line in lines.splitlines()]
        return [r.get("tokens") or r["response"]["body"]["choices"] for r in rows]

    assert texts(out.read_text()) == texts(whole)


def test_answers_that_do_not_say_are_kept(resume):
    run, out, _, _ = resume
    line = json.loads(out.read_text())
    del line["made_with"]
    out.write_text(json.dumps(line) + "\n")
    assert run("--resume", "--max-tokens", "5") == 0
