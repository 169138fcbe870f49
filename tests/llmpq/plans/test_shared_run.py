"""What is shared of a run: kinds and numbers, nothing of its owner; wrong sums are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.make import make_plan
from llmpq.plans.plan import Plan
from llmpq.plans.shared_run import shared_run

pytestmark = pytest.mark.pure

SECRET = ("quokka", "10.1.2.3", "GPU-77-88", "/home/wombat/models/mine")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return a plan for cards of two machines with names, one of which its owner described."""
    folder = tmp_path_factory.mktemp("own")
    nodes = [
        {"name": "quokka", "host": "10.1.2.3", "devices": [{"kind": "RTX-4090", "count": 1}]},
        {"name": "wombat", "devices": [{"kind": "RTX-3090", "count": 1}]},
    ]
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({"schema": 1, "name": "wombats den", "nodes": nodes}))
    made = make_plan("qwen3-32b", cluster=path, batch=2, prompt_len=64, gen_len=16, bits="8")
    assert len(made.stages) == 2
    model = made.model.model_copy(update={"path": "/home/wombat/models/mine"})
    return made.model_copy(update={"model": model})


def report_of(plan: Plan) -> dict[str, Any]:
    """Return a report as `llmpq-dist run --report` writes it, as far as it is shared."""
    steps = {kind: {"count": 1, "rows": 1, "busy_s": 1.0, "mean_s": 0.1} for kind in ("decode",)}
    stages = [
        {
            "device": stage.device,
            "node": stage.node,
            "memory": {"weights_bytes": 10**9, "kv_bytes": 10**6},
            "busy_share": 0.5,
            "steps": steps,
            "host": "quokka",
            "address": "10.1.2.3",
            "device_name": "NVIDIA GeForce RTX 4090",
            "device_uuid": "GPU-77-88",
        }
        for stage in plan.stages
    ]
    return {
        "schema": 1,
        "plan": plan.model_dump(mode="json", by_alias=True),
        "versions": {"llmpq": "0.1.0"},
        "completed": 2,
        "failed": 0,
        "total_input_tokens": 100,
        "total_output_tokens": 32,
        "measured": {"prefill_s": 0.5, "decode_s": 1.5, "total_s": 2.0},
        "output_throughput": 16.0,
        "speculation": None,
        "stages": stages,
    }


@pytest.fixture
def shared(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    shared_run(report_of(plan), where="report.json").save_json(path)
    return path


def test_nothing_of_the_owner_is_left_and_it_checks(
    shared: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shared.read_text()
    assert not [secret for secret in (*SECRET, "wombat") if f'"{secret}' in text]
    assert "wombat" not in text and "RTX-4090" in text and "qwen3-32b" in text
    assert len(text) < 60_000, "it can be pasted into a thread"
    assert main(["check", str(shared)]) == 0
    out = capsys.readouterr().out
    assert "a run of qwen3-32b on RTX-3090,RTX-4090" in out and "recomputed" in out
    kept = json.loads(text)["plan"]
    assert [s["layers"] for s in kept["stages"]] == [list(s.layers) for s in plan.stages]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("output_throughput",), 99.0, "output_throughput is 99"),
        (("predicted_s",), 0.001, "predicted_s is 0.001"),
        (("total_s",), 1.0, "output_throughput is 16"),
        (("plan", "predicted", "total_s"), 0.001, "re-plan"),
        (("stages", 0, "busy_share"), 1.5, "busy_share"),
        (("stages",), [], "stages"),
        (("prompt",), "secret", "prompt"),
    ],
)
def test_a_number_that_does_not_follow_is_found(
    shared: Path,
    capsys: pytest.CaptureFixture[str],
    place: tuple[str | int, ...],
    value: object,
    said: str,
) -> None:
    data = json.loads(shared.read_text())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    shared.write_text(json.dumps(data))
    assert main(["check", str(shared)]) == 3
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_what_cannot_be_shared_is_one_sentence(plan: Plan) -> None:
    report = report_of(plan)
    with pytest.raises(ValueError, match="has no plan"):
        shared_run({**report, "plan": None}, where="r.json")
    with pytest.raises(ValueError, match="answered no request"):
        shared_run({**report, "completed": 0}, where="r.json")
