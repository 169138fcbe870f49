"""The preflight: what it finds on a host, and how it judges what other hosts would show."""

import json
from pathlib import Path

import pytest

from llmpq.errors import ExitCode
from llmpq.plans.plan import MemoryForm
from llmpq.plans.topology import EngineShare, Topology
from llmpq.runtime.cli.main import main
from llmpq.runtime.tools.check import judge, judge_engines

pytestmark = pytest.mark.cluster


@pytest.fixture
def plan_file(make_plan, tmp_path):
    def write(model: Path, **options) -> Path:
        path = tmp_path / "plan.json"
        path.write_text(make_plan(model, **options).dump_json())
        return path

    return write


def place(plan, **changes):
    values = {
        "host": "here",
        "packages": {"llmpq": "1", "torch": "2.11"},
        "nccl": None,
        "gpu": None,
        "kind": "CPU",
        "free_bytes": 1 << 40,
        "model_problem": None,
        "model_fingerprint": plan.model.fingerprint,
    }
    return values | changes


def test_two_stages_here(demo_model, plan_file, ray_session, capsys):
    path = plan_file(demo_model, splits=(4,))
    assert main(["check", str(path), "--ray-address", ray_session, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [p["kind"] for p in found["places"]] == ["CPU", "CPU"]
    assert all(0 < link["gloo_us"] < 1e6 and link["problem"] is None for link in found["links"])


@pytest.mark.parametrize(
    ("flag", "seconds"),
    [("--timeout", "-1"), ("--timeout", "nan"), ("--timeout", "0")],
)
def test_seconds_that_nothing_can_wait(flag, seconds, capsys):
    assert main(["check", "plan", flag, seconds]) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{flag} must be a positive number of seconds, at most 10000000, got {seconds};" in line


def test_a_model_that_is_not_the_plans(demo_model, tiny_models, plan_file, capsys):
    path, other = plan_file(demo_model), tiny_models.directory("llama")
    code = main(["check", str(path), "--model", str(other)])
    assert code == ExitCode.MISMATCH
    assert "copy the right one there" in capsys.readouterr().err


def needing_7_gib(plan):
    """Return a plan whose stages need that each."""
    memory = MemoryForm(
        weights_bytes=7 << 30,
        embedding_bytes=0,
        kv_bytes=0,
        workspace_bytes=0,
        context_bytes=0,
        total_bytes=7 << 30,
        limit_bytes=8 << 30,
    )
    stages = tuple(stage.model_copy(update={"memory": memory}) for stage in plan.stages)
    return plan.model_copy(update={"stages": stages})


def test_cpu_stages_share_their_hosts_memory(demo_model, make_plan):
    plan = needing_7_gib(make_plan(demo_model, splits=(4,)))
    places = [place(plan, free_bytes=10 << 30), place(plan, free_bytes=10 << 30)]
    ((code, text),) = judge(plan, places, [])
    assert code == ExitCode.DOES_NOT_FIT
    assert "10.0 GiB free, the plan needs 14.0 GiB there" in text
    assert judge(plan, [places[0], {**places[1], "host": "another"}], []) == []


def test_engines_share_their_hosts_memory_and_each_is_looked_at(
    demo_model, make_plan, tmp_path, capsys
):
    own = make_plan(demo_model)
    (stage,) = own.stages
    other = own.model_copy(update={"stages": (stage.model_copy(update={"device": "other"}),)})
    topology = Topology(
        engines=(EngineShare(rows=8, plan=own), EngineShare(rows=4, plan=other)),
        workload=own.workload.model_copy(update={"batch": 12}),
    )
    path = tmp_path / "plan.json"
    topology.save_json(path)
    assert main(["check", str(path), "--model", str(demo_model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["engine"] for one in found["engines"]] == [0, 1] and not found["problems"]
    assert [len(one["places"]) for one in found["engines"]] == [1, 1]
    assert main(["check", str(path), "--model", str(demo_model)]) == 0
    assert "engine 1, 1 stage" in capsys.readouterr().out
    plans = [needing_7_gib(plan) for plan in topology.plans]
    for free_gib, codes in ((14, []), (13, [ExitCode.DOES_NOT_FIT])):
        looks = [([place(plan, free_bytes=free_gib << 30)], []) for plan in plans]
        assert [code for code, _ in judge_engines(plans, looks)] == codes


def test_judgements(demo_model, make_plan):
    plan = make_plan(demo_model, splits=(4,))
    fine = [place(plan), place(plan)]
    assert judge(plan, fine, []) == []
    gpu = plan.stages[1].model_copy(update={"kind": "H200", "threads": None})
    on_gpu = plan.model_copy(update={"stages": (plan.stages[0], gpu)})
    links = [{"problem": None}, {"problem": "timed out"}]
    for subject, places, ring, code, words in (
        (
            on_gpu,
            [fine[0], place(plan, kind="A100", gpu="NVIDIA A100")],
            [],
            4,
            "found NVIDIA A100",
        ),
        (on_gpu, [fine[0], place(plan, kind="no GPU")], [], 4, "found no GPU"),
        (plan, [fine[0], place(plan, packages={"torch": "2.12"})], [], 4, "torch 2.12"),
        (
            plan,
            [fine[0], place(plan, model_problem="no such directory")],
            [],
            2,
            "no such directory",
        ),
        (plan, fine, links, 6, "CPU-1 -> CPU-0: timed out"),
    ):
        problems = judge(subject, places, ring)
        assert problems and problems[0][0] == code
        assert any(words in text for _, text in problems)
