"""`llmpq-algo --engines`: several pipelines that share a job, and the file of such a plan."""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmpq.errors import DoesNotFitError
from llmpq.planner.__main__ import main
from llmpq.planner.cli import show_plan
from llmpq.planner.cli.show_plan import best_answer
from llmpq.planner.cli.what_if import compared, made_possible
from llmpq.planner.export import request_shares
from llmpq.planner.make import make_plan
from llmpq.planner.problem.limits import MOST_WAVES
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.answer import Answer, TopologyAnswer, answer, answer_topology
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.topology_search import KnownPipeline
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology, read_plan
from llmpq.units import shown
from reference.all_topologies import best_topology_of_all, shared_problem

pytestmark = pytest.mark.pure

JOB = ["--prompt-len", "512", "--gen-len", "256"]
ETHERNET = {"between_nodes": {"gbps": 1, "latency_us": 100}}


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Plan; return the plan and the lines that were printed."""

    def plan(*words: str) -> tuple[Plan | Topology, list[str]]:
        out = tmp_path / "plan.json"
        assert main([*words, "-o", str(out)]) == 0
        assert main(["check", str(out)]) == 0
        return read_plan(out), capsys.readouterr().out.splitlines()

    return plan


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plan.json, of two engines of one card each, and its page plan.html."""
    folder = tmp_path_factory.mktemp("two")
    words = ["--devices", "3090:2", "--model", "opt-1.3b", "--batch", "16", *JOB]
    files = ["-o", str(folder / "plan.json"), "--report", str(folder / "plan.html")]
    assert main([*words, "--engines", "2", *files]) == 0
    return folder


def _nodes(tmp_path: Path, *kinds: str) -> str:
    nodes = [{"name": f"n{i}", "accelerators": kind} for i, kind in enumerate(kinds)]
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"name": "boxes", "nodes": nodes, "links": ETHERNET}))
    return str(path)


@pytest.mark.parametrize(
    ("devices", "model", "batch", "engines", "each"),
    [
        pytest.param("3090:4", "gemma-3-12b", 256, 4, "3090", marks=pytest.mark.seldom),
        ("t4:3", "opt-1.3b", 96, 3, "t4"),
    ],
)
def test_equal_cards_that_hold_the_model_are_engines(
    planned: Any, devices: str, model: str, batch: int, engines: int, each: str
) -> None:
    words = ["--model", model, "--bits", "4", "--batch", str(batch), "--prompt-len", "256"]
    words += ["--gen-len", "128"]
    plan, lines = planned("--devices", devices, *words)
    assert isinstance(plan, Topology) and len(plan.engines) == engines
    assert [engine.rows for engine in plan.engines] == [batch // engines] * engines
    assert all(len(engine.plan.stages) == 1 for engine in plan.engines)
    rates = {}
    for name in ("best single card", "best pipeline", "equal replicas", "even tensor parallel"):
        (line,) = [line for line in lines if line.startswith(f"{name}: ")]
        rates[name] = float(line.split(": ")[-1].split()[0].replace(",", ""))
    alone = make_plan(
        model, devices=each, batch=batch // engines, prompt_len=256, gen_len=128, bits="4"
    )
    assert alone.predicted is not None and plan.predicted is not None
    rate = engines * alone.predicted.output_tokens_per_s
    assert plan.predicted.output_tokens_per_s == pytest.approx(rate, rel=1e-3)
    assert rates["equal replicas"] == pytest.approx(rate, rel=0.01)
    assert rates["best single card"] < rates["best pipeline"] < rate
    assert rates["even tensor parallel"] < 0.55 * rate  # published of four 3090: 0.29 (planner.md)
    assert any(line.startswith(f"engines: {engines} engines (") for line in lines)


def test_one_request_leaves_the_slower_card_out_and_says_so(planned: Any) -> None:
    plan, lines = planned("--devices", "5090,3090", "--model", "qwen3-8b", "--batch", "1", *JOB)
    assert isinstance(plan, Plan) and [s.device for s in plan.stages] == ["RTX-5090-0"]
    assert "left out, faster without: RTX-3090-0" in lines
    assert plan.workload.requests == "1 request" and ": 1 request of 512 + " in lines[0]


def test_one_engine_is_the_plan_of_make_plan(planned: Any, tmp_path: Path) -> None:
    words = ["--devices", "3090:2", "--model", "opt-1.3b", "--batch", "8", *JOB]
    plan, lines = planned(*words, "--engines", "1")
    assert isinstance(plan, Plan)
    alone = make_plan("opt-1.3b", devices="3090:2", batch=8, prompt_len=512, gen_len=256)
    assert plan == alone
    assert any(line.startswith("engines: one engine (") for line in lines)
    assert not any(line.startswith(("one engine a card", "equal replicas")) for line in lines)
    _, lines = planned(*words, "--engines", "1", "--tensor-parallel", "1")
    assert not any(line.startswith(("engines:", "best pipeline")) for line in lines)


@pytest.mark.parametrize("batch", [pytest.param("1", marks=pytest.mark.seldom), "8"])
def test_a_pipeline_leaves_time_for_what_is_looked_for_behind_it(
    batch: str, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmpq.planner.cli import show_plan

    real, limits = show_plan.answer, list[float]()

    def noted(problem: Any, options: Any, path: Any) -> Any:
        limits.append(options.time_limit_s)
        return real(problem, options, path)

    monkeypatch.setattr(show_plan, "answer", noted)
    words = ["--devices", "4090,3090", "--model", "opt-1.3b", "--batch", batch, *JOB]
    planned(*words, "--time-limit", "100")
    assert limits and max(limits) < 100


def test_devices_shared_by_a_flag_make_engines(planned: Any) -> None:
    words = ["--devices", "3090:4", "--model", "gemma-3-12b", "--batch", "8", *JOB]
    plan, lines = planned(*words, "--tensor-parallel", "2")
    assert isinstance(plan, Topology) and len(plan.engines) == 2
    assert all(stage.shares == (1, 1) for stage in plan.stages)
    assert any(line.startswith("best single group: 2 x RTX-3090") for line in lines)


def test_slow_links_between_nodes_are_not_crossed(
    planned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = _nodes(tmp_path, "3090:2", "3090:2")
    words = ["--cluster", cluster, "--model", "qwen3-14b", "--bits", "8", "--batch", "16", *JOB]
    plan, _ = planned(*words)
    assert isinstance(plan, Topology) and len(plan.engines) >= 2
    for engine in plan.engines:
        assert len({stage.node for stage in engine.plan.stages}) == 1
    assert any(stage.shares for stage in plan.stages)  # the devices of a node, each layer
    assert main(["export", str(tmp_path / "plan.json"), "--to", "accelerate"]) == 2
    assert "--tensor-parallel 1" in capsys.readouterr().err
    plan, _ = planned(*words, "--tensor-parallel", "1")
    assert isinstance(plan, Topology)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "plan.json"), "--to", "vllm"]) == 0
    assert "vllm serve" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "plan.json"), "--to", "llamacpp"]) == 0
    script = capsys.readouterr().out
    assert script.count("llama-server -m model-plan.gguf ") == len(plan.engines)
    for node in ("n0)", "n1)"):  # each makes the file that its engines serve
        own = script[script.index(node) : script.index("wait ;;", script.index(node))]
        assert own.count("convert_hf_to_gguf.py") == own.count("llama-quantize ") == 1
        assert own.index("llama-quantize ") < own.index("llama-server ")


@pytest.mark.parametrize(
    "engines", [(), pytest.param(("--engines", "2"), marks=pytest.mark.seldom)]
)
def test_nodes_of_which_no_card_holds_the_model_are_engines(
    planned: Any, tmp_path: Path, engines: tuple[str, ...]
) -> None:
    """A pipeline over both nodes waits for 1 Gb/s, and no card has room for many requests."""
    cluster = _nodes(tmp_path, "A100-40GB:2", "L40S:2")
    job = ["--model", "qwen3-32b", "--bits", "8", "--batch", "256", *JOB, "--tensor-parallel", "1"]
    plan, lines = planned("--cluster", cluster, *job, *engines)
    assert isinstance(plan, Topology)
    for engine in plan.engines:
        assert len({stage.node for stage in engine.plan.stages}) == 1
    assert max(len(engine.plan.stages) for engine in plan.engines) > 1
    beside = [line for line in lines if line.startswith("one engine a node: ")]
    assert len(beside) == 1 and " engines" in beside[0]


def test_unequal_cards_have_rows_by_their_speed(planned: Any) -> None:
    words = ["--devices", "5090,3090", "--model", "qwen3-8b", "--bits", "8", "--batch", "64"]
    plan, _ = planned(*words, *JOB, "--prefer", "speed")
    assert isinstance(plan, Topology)
    seconds = [engine.predicted_s for engine in plan.engines]
    assert len(seconds) == 2 and min(seconds) > 0.85 * max(seconds)
    rows = {engine.plan.stages[0].kind: engine.rows for engine in plan.engines}
    assert rows["RTX-5090"] > 1.5 * rows["RTX-3090"]


def test_so_many_engines_as_are_asked_for(planned: Any) -> None:
    words = ["--devices", "3090:4", "--model", "qwen3-8b", "--batch", "16", *JOB]
    plan, lines = planned(*words, "--engines", "2")
    (verdict,) = [line for line in lines if line.startswith("engines: 2 engines (")]
    assert "topology" not in verdict  # of two engines alone
    assert any(line.startswith("one engine a card: ") for line in lines)
    assert isinstance(plan, Topology) and len(plan.engines) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--engines 0", 2, "--engines must be auto, 1 or another number of engines, got 0"),
        ("--engines many", 2, "--engines must be auto, 1 or another number of engines, got many"),
        ("--engines 5", 2, "--engines 5 needs as many devices and rows, got 2 devices"),
        ("--engines 2 --pareto", 2, "--engines has no effect with --pareto"),
        ("--engines 2 --method ilp", 2, "--engines 2 needs --method exact"),
        ("--engines 2 --model llama-3.1-70b", 5, "no 2 engines have room for the job"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, code: int, said: str
) -> None:
    model = [] if "--model" in words else ["--model", "opt-1.3b"]
    words = f"--devices 3090:2 --bits 4 --batch 4 {words}"
    assert main([*words.split(), *model]) == code
    assert said in capsys.readouterr().err


def test_a_page_and_exports_have_every_engine(
    two_engines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, out = two_engines / "plan.html", two_engines / "plan.json"
    capsys.readouterr()
    assert all(f"Engine {number}: 8 rows" in page.read_text() for number in range(2))
    assert main(["export", str(out), "--to", "vllm"]) == 0
    script = capsys.readouterr().out
    assert script.count("vllm serve ") == 2
    assert "--port 8000" in script and "--port 8001" in script
    assert main(["export", str(out), "--to", "accelerate"]) == 2
    assert "--to accelerate writes one engine's plan, this one has 2" in capsys.readouterr().err


def test_live_traffic_is_shared_by_speed_and_batches_by_rows(two_engines: Path) -> None:
    """Both run 8 requests at once: one 8 x 256 tokens in 3 s, the other in 1 s."""
    found = read_plan(two_engines / "plan.json")
    assert isinstance(found, Topology)
    engines = []
    for engine, total_s in zip(found.engines, (3.0, 1.0), strict=True):
        assert engine.plan.predicted is not None
        predicted = engine.plan.predicted.model_copy(update={"total_s": total_s})
        plan = engine.plan.model_copy(update={"predicted": predicted})
        engines.append(engine.model_copy(update={"plan": plan}))
    batch = found.model_copy(update={"engines": tuple(engines)})
    assert request_shares(batch) == [0.5, 0.5]
    traffic: Any = {"traffic": SimpleNamespace()}
    live = [one.model_copy(update={"plan": one.plan.model_copy(update=traffic)}) for one in engines]
    assert request_shares(batch.model_copy(update={"engines": tuple(live)})) == [0.25, 0.75]


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_engines_of_two_nodes_are_a_script_for_both(
    two_engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    data = json.loads((two_engines / "plan.json").read_text())
    nodes = ["a box", "b's"]
    for node, engine in zip(nodes, data["engines"], strict=True):
        for stage in engine["plan"]["stages"]:
            stage["node"] = node
    (tmp_path / "plan.json").write_text(json.dumps(data))
    script, words = tmp_path / "start.sh", tmp_path / "words"
    capsys.readouterr()
    plan = ["export", str(tmp_path / "plan.json"), "--to", to, "-o", str(script)]
    assert main(plan) == 0, capsys.readouterr().err
    for name in ("vllm", "python", "python3"):
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f'#!/bin/sh\necho "$@" >> {words}\n')
        stub.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    for number, node in enumerate(nodes):
        words.unlink(missing_ok=True)
        subprocess.run(["sh", script, node], env=env, check=True, timeout=60)
        (line,) = words.read_text().splitlines()
        assert line.endswith(f"--port {8000 + number}")
    done = subprocess.run(
        ["sh", script, "c"], env=env, check=False, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "expected one of the nodes a box, b's\n")


def test_the_engine_that_another_program_cannot_have_is_named(
    two_engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((two_engines / "plan.json").read_text())
    for stage in data["engines"][1]["plan"]["stages"]:
        stage |= {"kind": "M4-Max", "device": "M4-Max-0"}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["export", str(tmp_path / "plan.json"), "--to", "vllm"]) == 2
    said = "llmpq-algo: engine 1 of the plan: vLLM is exported for NVIDIA's and AMD's GPUs"
    assert capsys.readouterr().err.startswith(said)


def test_an_engine_over_two_nodes_beside_another_is_refused(
    two_engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((two_engines / "plan.json").read_text())
    stages = data["engines"][0]["plan"]["stages"]
    stage = stages[0]
    half = stage["layers"][1] // 2
    more = {"device": "X-0", "node": "far", "precisions": stage["precisions"][half:]}
    stages.append({**stage, **more, "layers": [half, stage["layers"][1]], "memory": None})
    stages[0] = {**stage, "layers": [0, half], "precisions": stage["precisions"][:half]}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert main(["export", str(tmp_path / "plan.json"), "--to", "vllm"]) == 2
    assert "the plan's engine 0 is on 2 nodes" in capsys.readouterr().err


def test_files_that_are_no_topology_are_refused(two_engines: Path, tmp_path: Path) -> None:
    plan = read_plan(two_engines / "plan.json")
    assert isinstance(plan, Topology)
    path = tmp_path / "plan.json"
    with pytest.raises(Exception, match="is a plan of 2 engines, expected one of a single engine"):
        Plan.load(two_engines / "plan.json")
    data = json.loads(plan.dump_json())
    path.write_text(json.dumps({"schema": 1, "plans": [data["engines"][0]["plan"]] * 3}))
    with pytest.raises(Exception, match="is a front of 3 plans .--pareto., expected one plan"):
        read_plan(path)
    for change, said in (
        (lambda d: d["engines"][0].update(rows=3), "the engines' rows are"),
        (lambda d: d["engines"].__setitem__(1, d["engines"][0]), "engines share a device"),
        (lambda d: d["engines"][0]["plan"]["model"].update(fingerprint="x"), "another model"),
        (lambda d: d.update(engines=[]), "engines"),
    ):
        broken = json.loads(json.dumps(data))
        change(broken)
        path.write_text(json.dumps(broken))
        with pytest.raises(Exception, match=said):
            read_plan(path)


def test_cards_without_bfloat16_that_no_engine_has_do_not_decide_the_dtype(planned: Any) -> None:
    words = ["--devices", "3090:2,t4", "--model", "qwen3-0.6b", "--batch", "16", *JOB]
    plan, lines = planned(*words, "--prefer", "speed")
    used = {stage.kind for stage in plan.stages}
    kept = plan.engines[0].plan if isinstance(plan, Topology) else plan
    assert kept.workload.dtype == ("float16" if "T4" in used else "bfloat16")
    assert any("T4" in line and "bfloat16" in line for line in lines)


@pytest.mark.parametrize(
    ("gap", "why"),
    [(0.0, "faster without"), pytest.param(0.5, "nothing faster with", marks=pytest.mark.seldom)],
)
def test_cards_are_called_slower_only_where_that_is_proven(
    gap: float, why: str, planned: Any
) -> None:
    from llmpq.planner.cli.show_topology import _unused

    words = ["--devices", "3090:2,t4", "--model", "opt-1.3b", "--batch", "8", *JOB]
    plan, _ = planned(*words, "--engines", "2")
    used = {stage.device for stage in plan.stages}
    names = [*used, "idle"]
    devices = [SimpleNamespace(name=name, joined=()) for name in names]
    best = SimpleNamespace(problem=SimpleNamespace(cluster=SimpleNamespace(devices=devices)))
    (line,) = _unused(cast(Any, SimpleNamespace(pipeline=best)), plan, gap)
    assert line.startswith(f"left out, {why}") and line.endswith(": idle")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--what-if", "batch=4"], ""),
        (["--max-devices", "2"], "note: --max-devices plans one pipeline; without it several"),
        (
            ["--pareto", "--pareto-points", "2"],
            "--engines 1 --tensor-parallel 1 instead of --pareto",
        ),
        (["--max-devices", "1", "--engines", "1"], "without it stages that devices share are"),
        (["--max-devices", "1", "--engines", "1", "--tensor-parallel", "1"], ""),
    ],
)
def test_flags_of_one_pipeline_say_that_they_are(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--devices", "4090,3090", "--model", "opt-1.3b", "--batch", "8", *JOB, *more]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert said in text if said else "one pipeline" not in text


def test_requests_of_engines_know_what_they_wait_and_get() -> None:
    from llmpq.planner.cli.show_topology import wait_line

    def engine(prefill_s: float, decode_s: float, waves: int) -> SimpleNamespace:
        predicted = SimpleNamespace(
            prefill_s=prefill_s, decode_s=decode_s, total_s=prefill_s + decode_s
        )
        plan = SimpleNamespace(predicted=predicted, workload=SimpleNamespace(batch=2, gen_len=11))
        return SimpleNamespace(plan=plan, waves=waves)

    def line(*engines: SimpleNamespace) -> str:
        work = SimpleNamespace(batch=6)
        return wait_line(cast(Any, SimpleNamespace(engines=engines, workload=work)))

    sent = "(all 6 sent at once), then"
    one, two = engine(1.0, 2.0, 2), engine(3.5, 4.0, 1)
    wait = "first token of the last request after"
    assert line(one, two) == f"{wait} 4.000 s {sent} 2.50 to 5.00 tokens/s a request"
    assert line(two, two) == f"{wait} 3.500 s {sent} 2.50 tokens/s a request"
    assert line(engine(1.0, 0.0, 1)) == f"{wait} 1.000 s (all 6 sent at once)"


def test_a_bad_engine_of_a_plan_is_named(
    two_engines: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    data = json.loads((two_engines / "plan.json").read_text())
    data["engines"][1]["plan"]["predicted"]["total_s"] *= 2
    out.write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["check", str(out)]) == 3
    said = capsys.readouterr()
    assert said.out.startswith("engine 0, 8 rows: ") and "engine 1" not in said.out
    assert "llmpq-algo: engine 1: the plan predicts " in said.err
    assert main(["check", str(out), "--devices", "3090", "--model", "opt-1.3b"]) == 4
    assert capsys.readouterr().err.startswith("llmpq-algo: the plan was made for cluster")


SLOW = {"between_nodes": {"gbps": 0.05, "latency_us": 1000}}


def test_several_engines_and_a_pipeline_are_compared_by_the_score(
    planned: Any, tmp_path: Path
) -> None:
    # A pipeline over a slow link keeps 8 bits; an engine a node loses more and is far quicker.
    cluster = tmp_path / "slow.json"
    nodes = [{"name": f"n{i}", "accelerators": "3090"} for i in range(2)]
    cluster.write_text(json.dumps({"name": "slow", "nodes": nodes, "links": SLOW}))
    words = ["--cluster", str(cluster), "--model", "gemma-3-27b", "--batch", "16"]
    words += ["--prompt-len", "512", "--gen-len", "64"]
    plan, _ = planned(*words)
    scores = {"default": _score(plan)}
    for flags in (["--bits", "4"], ["--engines", "1"]):
        other, _ = planned(*words, *flags)
        scores[" ".join(flags)] = _score(other)
    assert isinstance(plan, Topology) and len(plan.engines) == 2
    assert scores["default"] <= min(scores.values()) * 1.01
    assert scores["--engines 1"] > 1.1 * scores["default"]


def test_a_job_that_no_pipeline_has_room_for_at_once_is_shared(planned: Any) -> None:
    words = ["--devices", "t4:2", "--model", "opt-1.3b", "--batch", "300"]
    words += ["--prompt-len", "512", "--gen-len", "64"]
    assert main([*words, "--engines", "1"]) == 5
    plan, lines = planned(*words)
    assert isinstance(plan, Topology)
    assert [one.rows for one in plan.engines] == [150, 150]
    assert all(one.waves > 1 for one in plan.engines)
    (pipeline,) = [line for line in lines if line.startswith("best pipeline: ")]
    assert "T4-0, T4-1, rows in 2 waves: " in pipeline


def test_one_card_runs_in_waves_what_it_has_no_room_for_at_once(planned: Any) -> None:
    words = ["--devices", "t4", "--model", "opt-1.3b", "--batch", "200"]
    words += ["--prompt-len", "512", "--gen-len", "64"]
    assert main([*words, "--engines", "1"]) == 5
    plan, lines = planned(*words)
    assert isinstance(plan, Topology)
    (engine,) = plan.engines
    assert engine.rows == 200 and engine.waves > 1
    (card,) = [line for line in lines if line.startswith("best single card: ")]
    assert f"T4-0: {shown(engine.tokens_per_s)} tokens/s" in card


def test_rows_in_as_many_waves_as_there_are_may_do_better_with_fewer_at_once(planned: Any) -> None:
    """Half as many at once leave 16 bits room, and are as fast."""
    words = ["--devices", "t4", "--model", "opt-1.3b", "--prompt-len", "512", "--gen-len", "64"]
    _, lines = planned(*words, "--batch", "200")
    assert not any("--what-if" in line for line in lines)  # in two waves
    plan, lines = planned(*words, "--batch", "400", "--what-if", "batch=50")
    assert isinstance(plan, Topology) and plan.engines[0].waves == MOST_WAVES
    (said,) = [line for line in lines if line.startswith(f"rows in {MOST_WAVES} waves are the ")]
    assert said.endswith("--what-if batch=50 says what --batch 50 gives")
    (fewer,) = [line for line in lines if line.startswith("what if batch=50: ")]
    assert "16 bits, quality loss 0 instead of " in fewer


def test_engines_that_send_nothing_are_taken_where_a_pipeline_is_hardly_better(
    planned: Any,
) -> None:
    """A card alone has no room for 16 bits; four in a row run them as quickly as each 8 bits."""
    words = ["--devices", "3090:4", "--model", "gemma-3-12b", "--batch", "256"]
    words += ["--prompt-len", "512"]
    plan, lines = planned(*words, "--gen-len", "128")
    assert isinstance(plan, Topology)
    assert [one.rows for one in plan.engines] == [64] * 4
    assert all(len(one.plan.stages) == 1 for one in plan.engines)
    (why,) = [line for line in lines if line.startswith("one engine a card is taken, for ")]
    assert "quicker as the scheduler runs both" in why
    plan, lines = planned(*words, "--gen-len", "512")  # far more KV than one card has room for
    assert all(len(own.stages) > 1 for own in plan.plans)
    assert not any(line.startswith("one engine a card is taken") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [123, 4, pytest.param(13, marks=pytest.mark.seldom), 1454])
def test_with_more_allowed_the_answer_is_never_worse(seed: int) -> None:
    """Shared stages, several engines, more precisions. Of 123 no pipeline has room for all rows; of
    1454 one has for few bits, and in two waves for 16."""
    p = shared_problem(seed)
    options = SolveOptions(gap=1e-9, kvs=(p.kv,))
    most = _value(p, options, "auto")
    assert most == pytest.approx(best_topology_of_all(p), rel=1.1e-3)
    assert most <= _value(p, replace(options, groups=False), "auto") * 1.001
    assert most <= _value(p, options, "1") * 1.001
    for choice in p.choices:
        one = p.with_changes(offered=((choice,),) * p.num_layers)
        assert most <= _value(one, options, "auto") * 1.001


def _value(p: Problem, options: SolveOptions, engines: str) -> float:
    """Return the value of the command's answer, as answers are compared."""
    try:
        best, found = best_answer(PlanRequest(model=p.spec.name, engines=engines), p, options, None)
    except DoesNotFitError:
        return math.inf
    if found is None or found.topology is None:
        return best.outcome.value
    return found.found.value


def test_a_longer_search_that_found_less_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time ended it on another way than the short one before it went."""
    request = PlanRequest(model="opt-1.3b", devices="3090:2", batch=8)
    job, found = show_plan.read_job(request), list[Answer]()

    def worse_each_time(*args: Any) -> Answer:
        one, times = answer(*args), 1 + len(found)
        assert one.plan.predicted is not None
        slow = one.plan.predicted.model_copy(update={"total_s": times * one.time_s})
        outcome = replace(one.outcome, bound=0.0, value=times * one.outcome.value)
        plan = one.plan.model_copy(update={"predicted": slow})
        found.append(replace(one, outcome=outcome, plan=plan))
        return found[-1]

    monkeypatch.setattr(show_plan, "answer", worse_each_time)
    monkeypatch.setattr(show_plan, "answer_topology", _no_better)
    best, _ = best_answer(request, job.problem, job.options, job.path)
    assert len(found) == 2 and best is found[0]


def test_a_device_more_is_never_said_to_be_a_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan without it is one with it: a search among more devices may only miss it."""
    real = show_plan.best_answer

    def found_less(
        request: PlanRequest, problem: Problem, *args: Any
    ) -> tuple[Answer, TopologyAnswer | None]:
        best, several = real(request, problem, *args)
        times = {1: 2.0, 2: 3.0, 3: 4.0}[len(problem.cluster.devices)]
        assert best.plan.predicted is not None
        slow = best.plan.predicted.model_copy(update={"total_s": times * best.time_s})
        return replace(best, plan=best.plan.model_copy(update={"predicted": slow})), several

    monkeypatch.setattr(show_plan, "best_answer", found_less)
    words = ["--devices", "3090:2", "--model", "opt-1.3b", "--batch", "1", "--gen-len", "5"]
    words += ["--tensor-parallel", "1", "--max-devices", "1"]
    assert main([*words, "--what-if", "+3090", "--what-if", "batch=2,+3090"]) == 0
    lines = [one for one in capsys.readouterr().out.splitlines() if one.startswith("what if ")]
    assert lines[0].startswith("what if +3090: no better plan was found with it: first token after")
    assert "(+" in lines[1], "of another job nothing is known"


def _no_better(problem: Problem, best: Answer, *args: Any, **options: Any) -> Any:
    """Return that no topology betters a pipeline of which no bound is known."""
    return replace(
        answer_topology(problem, best, *args, **options),
        topology=None,
        plans=(),
        known=KnownPipeline(value=best.outcome.value, bound=0.0),
    )


def _score(plan: Plan | Topology) -> float:
    """Return what --prefer balanced makes smallest."""
    assert plan.predicted is not None
    return plan.predicted.total_s * math.exp(plan.predicted.sum_omega)  # 1: all at 4 bits


def test_other_bits_are_said_to_be_of_one_pipeline(planned: Any) -> None:
    words = ["--devices", "5090,3090", "--model", "qwen3-8b", "--batch", "1", *JOB]
    _, lines = planned(*words)
    (faster,) = [line for line in lines if line.startswith("faster: ")]
    assert " everywhere as one pipeline: " in faster
    _, lines = planned(*words, "--engines", "1", "--tensor-parallel", "1")
    (faster,) = [line for line in lines if line.startswith("faster: ")]
    assert " everywhere: " in faster


def test_a_what_if_is_of_the_plan_that_there_is_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two cards that share every layer read the weights in half the time."""
    words = ["--devices", "3090:2", "--model", "llama-3.1-8b", "--batch", "1", "--bits", "16"]
    words += ["--prompt-len", "32", "--gen-len", "256"]
    assert main(words) == 0
    alone = capsys.readouterr().out
    assert "2 x RTX-3090-0" in alone
    (line,) = (line for line in alone.splitlines() if line.startswith("predicted: "))
    assert main([*words, "--what-if", "-3090"]) == 0
    text = capsys.readouterr().out
    assert line in text
    (change,) = (line for line in text.splitlines() if line.startswith("what if "))
    assert float(change.split(": ")[1].split()[0]) > 1.5 * float(line.split()[1])


def test_what_is_said_of_groups_is_not_said_of_all_plans(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """8 bits fit these cards as a pipeline, not with the shares of the group that is quickest."""
    words = ["--devices", "5090,3080", "--model", "qwen3-32b", "--context", "4k"]
    words += ["--gen-len", "2k", "--batch", "1", "--prefer", "speed", "--engines", "1"]
    assert main([*words, "-o", str(tmp_path / "plan.json")]) == 0
    text = capsys.readouterr().out
    assert "RTX-5090 + RTX-3080-10GB" in text
    assert "better quality: 8 bits everywhere as one pipeline: first token after" in text
    assert "no plan of one engine whose devices share stages as here is better" in text
    (proof,) = [line for line in text.splitlines() if line.startswith("exact: ")]
    assert "proven" in proof or "above the best of pipelines with any of the groups" in proof


@pytest.mark.parametrize(
    ("devices", "job", "changes"),
    [
        (
            "4090:2,3090",
            "--model llama-3.1-8b --batch 64",
            {"+4090": "4090:3,3090", "-3090": "4090:2", "-4090:2": "3090"},
        ),
        ("3090", "--model llama-3.1-8b --batch 1 --bits 16", {"+3090": "3090:2"}),
        ("4090:2", "--model opt-1.3b --batch 8 --engines 2", {"+4090": "4090:3"}),
        ("4060", "--model qwen3-14b --batch 8 --bits 8", {"+4060:3": "4060:4"}),
        pytest.param(
            "3090:2,3060:2",
            "--model qwen3-14b --batch 32 --quality-budget 0.1",
            {"+3060": "3090:2,3060:3", "-3090": "3090,3060:2", "+3090:2": "3090:4,3060:2"},
            marks=pytest.mark.seldom,
        ),
    ],
)
def test_a_what_if_is_what_the_command_says_of_the_changed_devices(
    devices: str,
    job: str,
    changes: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Engines, shared stages and pipelines alike."""
    words = [*job.split(), "--prompt-len", "128", "--gen-len", "32"]

    def made(kinds: str) -> Plan | Topology | None:
        path = tmp_path / "plan.json"
        code = main(["--devices", kinds, *words, "-o", str(path)])
        capsys.readouterr()
        return read_plan(path) if code == 0 else None

    before = made(devices)
    asked = [f"--what-if={change}" for change in changes]
    code = main(["--devices", devices, *words, *asked])
    assert code == (0 if before is not None else 5)
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("what if ")]
    assert len(lines) == len(changes)
    for line, (change, kinds) in zip(lines, changes.items(), strict=True):
        after = made(kinds)
        assert after is not None
        said = made_possible(after) if before is None else compared(before, after)
        assert line.partition(": ")[0].startswith(f"what if {change}") and line.endswith(said)


def test_a_change_that_leaves_too_few_devices_for_the_engines_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--devices", "4090:2", "--model", "opt-1.3b", "--engines", "2", "--batch", "8"]
    assert main([*words, "--what-if", "-4090"]) == 2
    assert "--engines 2 needs as many devices and rows" in capsys.readouterr().err


def test_what_was_not_looked_at_in_time_is_not_said_to_have_no_room() -> None:
    from llmpq.planner.cli.show_topology import _simple_text

    assert _simple_text(None, 1, alone=False, cut=True) == "none was found in time"
    assert _simple_text(None, 1, alone=False, cut=False) == "none has room for the job"


def test_rows_run_in_waves_where_cards_may_share_stages_and_one_engine_has_room(
    planned: Any,
) -> None:
    words = ["--devices", "3090:2", "--model", "qwen3-14b", "--bits", "16", *JOB]
    found, lines = planned(*words, "--batch", "192")
    assert isinstance(found, Topology) and len(found.engines) == 1
    assert found.engines[0].waves > 1 and found.workload.batch == 192
    assert main([*words, "--batch", "192", "--engines", "1"]) == 5
