"""Seeded problems of the planner's benchmarks are of real size; rows are added up rightly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmpq.devices.cluster import Cluster

pytestmark = pytest.mark.pure
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as for a script: its folder comes first
    yield importlib.import_module("lib.odd_problems"), importlib.import_module("odd_clusters")
    for name in ("lib.odd_problems", "odd_clusters", "lib.rows"):
        sys.modules.pop(name, None)


def test_a_seed_is_one_problem_of_real_size(modules: tuple[ModuleType, ModuleType]) -> None:
    problems, _ = modules
    kinds, nodes, models = set(), set(), set()
    for seed in range(40):
        found = problems.odd_problem(seed)
        p = found.case().problem
        assert 1 <= len(p.cluster.devices) <= 16 and p.workload.batch <= 512
        kinds |= {device.kind for device in p.cluster.devices}
        nodes.add(len(p.cluster.nodes))
        models.add(found.model)
    assert problems.odd_problem(3) == problems.odd_problem(3)
    assert len(kinds) >= 14 and len(nodes) >= 5 and len(models) >= 10
    assert len(problems.KINDS) >= 14 and "CPU" in problems.KINDS


def test_the_larger_problem_of_a_pair_has_more(modules: tuple[ModuleType, ModuleType]) -> None:
    problems, _ = modules
    for seed in range(6):
        less, more, what = problems.larger_pair(seed)
        one, two = less.problem, more.problem
        devices = len(two.cluster.devices) - len(one.cluster.devices)
        memory = sum(d.memory_bytes for d in two.cluster.devices)
        memory -= sum(d.memory_bytes for d in one.cluster.devices)
        choices = len(two.choices) - len(one.choices)
        assert (devices, choices) in {(1, 0), (0, 0), (0, 1)} and memory >= 0, what
        assert devices or choices or memory
        assert one.workload == two.workload and less.kvs == more.kvs


def test_clusters_of_the_issue_cases_parse(modules: tuple[ModuleType, ModuleType]) -> None:
    _, clusters = modules
    names = {name for name, *_ in (*clusters.ISSUE_CASES, *clusters.SCALE_CASES)}
    for name in names | set(clusters.TWINS.values()):
        assert Cluster.load(BENCHMARKS / "clusters" / f"{name}.yaml").devices


def _row(seed: int, ratio: float, **measured: float) -> dict[str, Any]:
    base = {"exact": 1.0, "gap": 0.0, "proven": 1.0, "checked": 1.0}
    base |= {"replay_difference": 0.0, "search_difference": 0.0}
    case = {"name": f"seed {seed}", "seed": seed, "limit_s": 2.0}
    return {"value": ratio, "case": case, "baselines": {"seconds": 1.0, **base, **measured}}


def test_the_summary_counts_what_went_wrong(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, clusters = modules
    rows = [
        _row(0, 1.0),
        _row(1, 1.01),
        _row(2, 0.9, gap=0.5, proven=0.0),
        _row(3, 1.0, seconds=9.0, checked=0.0, replay_difference=0.01),
        _row(4, 1.0, search_difference=-0.02),
        _row(5, 1.0, search_difference=0.006),
    ]
    line = clusters.summary(rows).splitlines()
    assert line[2] == (
        "| 2 s | 6 (0 without a plan) | 1 | 0.00% | 50.00% | 83% | 1 | 1 | 2 | 1 | 9.0 s |"
    )
    assert line[4] == "Worse: seed 1."
