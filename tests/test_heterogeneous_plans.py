"""benchmarks/heterogeneous*.py: plans of unequal GPUs that are fair to compare, and their sum."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llmpq.plan import Plan

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]


def load_script() -> ModuleType:
    path = ROOT / "benchmarks" / "heterogeneous_plans.py"
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
