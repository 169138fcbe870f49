"""Stages that several devices share, as processes over gloo: runs, servers' plans, and deaths."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from llmpq.errors import ExitCode, StageLostError
from llmpq.runtime.__main__ import main as dist
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import Request

pytestmark = pytest.mark.cpu
NAMED_WITHIN_S = 10.0


def test_a_run_of_a_shared_plan_gives_what_one_device_gives(
    demo_model, make_plan, tmp_path, capsys
):
    rows = tmp_path / "in.jsonl"
    prompts = ("import os\n", "def main(", "class A:")
    rows.write_text("".join(json.dumps({"prompt": p, "max_tokens": 12}) + "\n" for p in prompts))
    texts = []
    for name, splits, shares in (
        ("one", (), ()),
        ("shared", (2, 5), [(1,), (3, 1), (1,)]),
    ):
        plan = make_plan(demo_model, splits, shares=shares, kv="kv8", bits="w4a16")
        path = tmp_path / f"{name}.json"
        path.write_text(plan.dump_json())
        out, report = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-report.json"
        words = [
            "run",
            "--plan",
            path,
            "-i",
            rows,
            "-o",
            out,
            "--report",
            report,
            "--temperature",
            "0",
            *([] if shares else ["--backend", "threads"]),
        ]
        assert dist([str(word) for word in words]) == ExitCode.DONE, capsys.readouterr().err
        texts.append([json.loads(line)["text"] for line in out.read_text().splitlines()])
        stages = json.loads(report.read_text())["stages"]
        assert [s["device"] for s in stages] == [p.device for p in plan.places]
    assert texts[0] == texts[1]
    capsys.readouterr()
    assert dist(["check", "--json", str(tmp_path / "shared.json")]) == ExitCode.DONE
    assert len(json.loads(capsys.readouterr().out)["places"]) == 4


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.seldom), 2])
def test_a_killed_device_is_named(demo_model, make_plan, victim):
    plan = make_plan(demo_model, (4,), shares=[(1, 1), (2, 1)], prompt_len=8, gen_len=900)
    requests = [Request(id=i, prompt=tuple(range(3, 11)), max_new=900) for i in range(4)]
    settings = StageSettings(model_dir=str(demo_model), options=EngineOptions(backend="processes"))
    killed_s = 0.0
    with (
        pytest.raises(StageLostError) as lost,
        PipelineClient.start(plan, settings) as pipeline,
    ):
        pids = pipeline.stage_pids()
        pipeline.submit(requests)
        for update in pipeline.updates():
            if not killed_s and update.progress.phase == "decode":
                killed_s = time.monotonic()
                os.kill(pids[victim], signal.SIGKILL)
    assert killed_s and time.monotonic() - killed_s < NAMED_WITHIN_S
    of = f"device {victim % 2} of stage {victim // 2}"
    where = f"{of} (CPU-{victim} on local, pid {pids[victim]})"
    assert re.search(rf"{re.escape(where)} was lost during decode.*SIGKILL", str(lost.value))
