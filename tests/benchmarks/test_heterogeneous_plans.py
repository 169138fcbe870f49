"""benchmarks/heterogeneous*.py: plans of unequal GPUs that are fair to compare, and their sum."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llmpq.errors import StageLostError
from llmpq.plans.plan import Plan

pytestmark = [pytest.mark.pure, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def load_script() -> ModuleType:
    path = ROOT / "benchmarks" / "lib" / "heterogeneous_plans.py"
    spec = importlib.util.spec_from_file_location("heterogeneous_plans", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plans(cluster: str, bits: str) -> dict[str, Plan]:
    args = argparse.Namespace(
        costs=str(ROOT / "benchmarks" / "data" / "h200-opt-30b.costs.json"),
        batch=32,
        prompt=512,
        gen=100,
        bits=bits,
        kv="16",
        time_limit=20.0,
    )
    return dict(load_script().plans_of(ROOT / "clusters" / f"{cluster}.yaml", args))


@pytest.mark.parametrize("bits", ["16,8,4", "4"])
def test_the_exact_plan_keeps_pipeedges_quality_and_is_no_slower(bits: str) -> None:
    found = plans("emulated-2-weak-2-strong", bits)
    exact, rival = found["exact"].predicted, found["pipeedge"].predicted
    assert exact is not None and rival is not None
    assert exact.sum_omega <= rival.sum_omega
    assert exact.total_s <= rival.total_s


def row(plan: str, speed: float, **case: object) -> str:
    """Return a row of `heterogeneous.py run`."""
    case = {"model": "m", "cluster": "c", "plan": plan, "kv": "kv16", "stages": 2} | case
    case |= {"sum_omega": 1.0, "emulated": True}
    return json.dumps({"bench": "e2e", "case": case, "value": speed, "predicted": 1.0}) + "\n"


def test_the_sum_sets_both_exact_plans_beside_the_other_planners(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    measured = [row("exact", 9.0, kv="kv4"), row("pipeedge", 3.0), row("exact-kv16", 4.0)]
    path.write_text("".join([*measured, row("exact", 5.0, cluster="alone")]))
    script = ROOT / "benchmarks" / "heterogeneous.py"
    subprocess.run([sys.executable, script, "sum", path], check=True, capture_output=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    summed = [r for r in rows if r["bench"] == "heterogeneous"]
    assert [(r["case"]["plan"], r["case"]["kv"], r["value"]) for r in summed] == [
        ("exact", "kv4", 9.0),
        ("exact-kv16", "kv16", 4.0),
    ]
    assert all(r["baselines"] == {"pipeedge": 3.0} and r["predicted"] is None for r in summed)


class StandIn:
    """An engine that loads nothing: the plans of one method fail, the others take a second."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self) -> None:
        if self.plan.solver.method == "uniform":
            raise StageLostError("its process ended")


@pytest.mark.parametrize(
    "methods, code, ran",
    [
        pytest.param(["uniform"], 8, [], marks=pytest.mark.seldom),
        pytest.param(["pipeedge"], 0, ["pipeedge"], marks=pytest.mark.seldom),
        (["uniform", "pipeedge"], 8, ["pipeedge"]),
    ],
    ids=["none", "all", "some"],
)
def test_a_plan_that_fails_is_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: list[str], code: int, ran: list[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("heterogeneous")
    made = plans("emulated-2-weak-2-strong", "4")["pipeedge"]
    monkeypatch.setattr(script, "make_engine", lambda plan, args: StandIn(plan))
    timed = script.Timed(total_s=[1.0], prefill_s=[0.5], records=())
    monkeypatch.setattr(script, "time_jobs", lambda engine, plan, repeat: timed)
    monkeypatch.setattr(script, "report", lambda plan, timed: None)
    files = []
    for method in methods:
        files.append(tmp_path / f"{method}.json")
        solver = made.solver.model_copy(update={"method": method})
        made.model_copy(update={"solver": solver}).save_json(files[-1])
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["x", "run", *map(str, files), "--rows", str(rows)])
    assert script.main() == code
    written = [json.loads(line) for line in rows.read_text().splitlines()] if ran else []
    assert [r["case"]["plan"] for r in written if r["bench"] == "e2e"] == ran
    assert rows.exists() == bool(ran)


def test_a_bad_plan_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    script = ROOT / "benchmarks" / "heterogeneous.py"
    words = [sys.executable, script, "run", path, "--rows", tmp_path / "rows.jsonl"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and str(path) in done.stderr
