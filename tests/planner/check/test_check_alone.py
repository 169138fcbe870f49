"""A plan file is enough to check the plan: its own entries give its memory and its times again."""

from __future__ import annotations

import ast
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from llmpq.errors import BadPlanError, LlmpqError, PlanMismatchError
from llmpq.planner.__main__ import main
from llmpq.planner.check.build_plan import build_plan
from llmpq.planner.check.check import check_alone
from llmpq.planner.problem.outcome import Infeasible
from llmpq.planner.solving.methods import SolveOptions, solve
from llmpq.plans.plan import Plan
from reference.random_problems import random_problem

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]


def _plan_of(seed: int) -> Plan | None:
    p = random_problem(random.Random(seed), layers=(3, 8), kinds=(1, 3), devices=(1, 2), batch=3)
    try:
        return build_plan(p, solve(p, SolveOptions(method="heuristic")))
    except Infeasible:
        return None


def _read(data: dict[str, Any]) -> Plan:
    return Plan.parse_data(json.loads(json.dumps(data)), where="test")


def test_a_plan_written_and_read_gives_its_own_times_again() -> None:
    checked = 0
    for seed in range(24):
        plan = _plan_of(seed)
        if plan is None:
            continue
        again = _read(json.loads(plan.dump_json()))
        assert again == plan
        times = check_alone(again)
        assert times is not None and plan.predicted is not None
        assert times.total_s == pytest.approx(plan.predicted.total_s, rel=1e-9)
        assert times.prefill_s == pytest.approx(plan.predicted.prefill_s, rel=1e-9)
        checked += 1
    assert checked >= 12


def _several_stages() -> dict[str, Any]:
    for seed in range(200):
        plan = _plan_of(seed)
        if plan is not None and len(plan.stages) >= 2:
            data: dict[str, Any] = json.loads(plan.dump_json())
            if len(set(data["stages"][0]["precisions"])) == 1:
                return data
    raise AssertionError("no seed gives a plan of two stages")


def _slower(data: dict[str, Any], *path: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] *= 1.01


CHANGES = {
    "total": lambda d: _slower(d, "predicted", "total_s"),
    "prefill": lambda d: _slower(d, "predicted", "prefill_s"),
    "decode": lambda d: _slower(d, "predicted", "decode_s"),
    "rate": lambda d: _slower(d, "predicted", "output_tokens_per_s"),
    "stage prefill": lambda d: _slower(d, "stages", 0, "prefill_s"),
    "stage decode": lambda d: _slower(d, "stages", 1, "decode_s"),
    "bytes": lambda d: d["stages"][1]["memory"].update(
        total_bytes=d["stages"][1]["memory"]["total_bytes"] - 1
    ),
    "limit": lambda d: d["stages"][0]["memory"].update(
        limit_bytes=d["stages"][0]["memory"]["limit_bytes"] + 1
    ),
    "a smaller device": lambda d: d["inputs"]["devices"][0].update(memory_bytes=1000),
    "another device": lambda d: d["inputs"]["devices"].reverse(),
    "no device": lambda d: d["inputs"].update(devices=[]),
    "no link": lambda d: d["inputs"].update(links=[]),
    "no cost": lambda d: d["inputs"].update(costs=[]),
    "a slower link": lambda d: d["inputs"]["links"][0].update(delay_s=1.0),
    "slower costs": lambda d: [
        _slower(r["terms"], term)
        for entry in d["inputs"]["costs"]
        for r in entry["regimes"]
        for term in r["terms"]
    ],
    "another batch": lambda d: d["workload"].update(batch=d["workload"]["batch"] + 1),
    "a slower device": lambda d: d["inputs"]["devices"][0].update(time_factor=1.1),
    "another model": lambda d: d["inputs"]["model"].update(
        hidden=d["inputs"]["model"]["hidden"] * 2
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_plan_is_refused(name: str) -> None:
    data = _several_stages()
    check_alone(_read(data))
    changed = copy.deepcopy(data)
    CHANGES[name](changed)
    assert changed != data
    with pytest.raises(PlanMismatchError if name == "another model" else LlmpqError):
        check_alone(_read(changed))


def test_the_command_needs_the_plan_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--devices t4:2,cpu --model opt-1.3b --global_bz 4 --s 64 --n 8 --tensor-parallel 1"
    words += " --engines 1"
    assert main([*words.split(), "-o", str(tmp_path / "plan.json")]) == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert main(["check", "plan.json"]) == 0
    plan = Plan.load("plan.json")
    assert plan.predicted is not None
    assert capsys.readouterr().out == (
        f"plan.json: {len(plan.stages)} stages, complete, fits\n"
        f"recomputed from its own entries: {plan.predicted.total_s:.3f} s (prefill "
        f"{plan.predicted.prefill_s:.3f}, decode {plan.predicted.decode_s:.3f})\n"
    )
    assert main(["check", "plan.json", "--devices", "t4:2,cpu"]) == 0
    assert main(["check", "plan.json", "--devices", "t4:3"]) == 4
    assert main(["check", "plan.json", "--model", "opt-125m"]) == 4
    data = json.loads(Path("plan.json").read_text())
    data["predicted"]["total_s"] /= 2
    Path("quick.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["check", "quick.json"]) == 3
    assert "its own stages take" in capsys.readouterr().err


def test_a_plan_of_before_asks_for_the_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = "--devices t4 --model opt-125m --global_bz 4 --s 64 --n 8"
    path = tmp_path / "plan.json"
    assert main([*words.split(), "-o", str(path)]) == 0
    data = json.loads(path.read_text())
    del data["inputs"]
    path.write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"llmpq-algo: '{path}' carries no device, link and cost entries (an older llmpq made it, "
        "or a hand): name the devices it should fit with --cluster or --devices\n"
    )
    assert main(["check", str(path), "--devices", "t4"]) == 0
    with pytest.raises(BadPlanError, match="carries no device, link and cost entries"):
        check_alone(Plan.load(path))


def test_the_check_shares_nothing_with_the_search() -> None:
    """Neither the checker nor what it imports of the planner knows problems or solvers."""
    searched = {"problem", "objective", "outcome", "methods", "exact", "solving"}
    seen: set[str] = set()
    waiting = ["check.check"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = ROOT.joinpath("planner", *name.split("."))
        tree = ast.parse(path.with_suffix(".py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("llmpq.planner."):
                waiting.append(str(node.module).removeprefix("llmpq.planner."))
    assert "costs.cost_book" in seen, "the sub-rooms were not followed"
    assert not {word for name in seen for word in name.split(".")} & searched, seen
