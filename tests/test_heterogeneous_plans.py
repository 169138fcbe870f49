"""benchmarks/heterogeneous_plans.py: plans of unequal GPUs that are fair to compare."""

from __future__ import annotations

import argparse
import importlib.util
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
