"""Every layer exactly once, for many numbers of layers and devices, in plans the search makes."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.errors import BadPlanError
from llmpq.planner.check.build_plan import build_plan
from llmpq.planner.check.check import check_plan
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.problem.outcome import Infeasible
from llmpq.planner.problem.problem import Problem
from llmpq.plans.plan import Plan
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]

LAYERS, KINDS, DEVICES = (1, 12), (1, 4), (1, 3)
ALL = "LLMPQ_ALL_TESTS" in os.environ


def _problem(seed: int, layers: int, kinds: int) -> Problem:
    return random_problem(
        random.Random(seed),
        layers=(layers, layers),
        kinds=(kinds, kinds),
        devices=DEVICES,
        precisions=2,
        batch=2,
    )


def _plan(p: Problem) -> Plan | None:
    """Return the exact plan as a reader of its file sees it; None where nothing fits."""
    try:
        outcome = solve_exact(p, gap=1e-3)
    except Infeasible:
        return None
    return Plan.parse_data(json.loads(build_plan(p, outcome).dump_json()), where="plan")


def _faults(p: Problem, stages: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a partition, counted layer by layer."""
    runs = [0] * p.spec.num_layers
    for stage in stages:
        for layer in range(*stage["layers"]):
            runs[layer] += 1
    faults = [f"layer {i} runs {n} times" for i, n in enumerate(runs) if n != 1]
    starts = [stage["layers"][0] for stage in stages]
    devices = [stage["device"] for stage in stages]
    if starts != sorted(starts):
        faults.append("out of order")
    if len(set(devices)) < len(devices) or not {*devices} <= {d.name for d in p.cluster.devices}:
        faults.append("devices")
    if [len(s["precisions"]) for s in stages] != [s["layers"][1] - s["layers"][0] for s in stages]:
        faults.append("precisions")
    return faults


@settings(max_examples=60 if ALL else 5, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9), layers=st.integers(*LAYERS), kinds=st.integers(*KINDS))
def test_every_layer_exactly_once(seed: int, layers: int, kinds: int) -> None:
    p = _problem(seed, layers, kinds)
    plan = _plan(p)
    if plan is not None:
        assert _faults(p, plan.model_dump(mode="json")["stages"]) == []
        check_plan(plan, spec=p.spec, cluster=p.cluster, costs=p.costs)


def test_all_sizes_are_met_and_most_have_a_plan() -> None:
    planned = {
        (layers, kinds): _plan(_problem(1000 * layers + kinds, layers, kinds))
        for layers in range(LAYERS[0], LAYERS[1] + 1)
        for kinds in range(KINDS[0], KINDS[1] + 1)
        if ALL or (layers + kinds) % 3 == 0
    }
    found = [plan for plan in planned.values() if plan is not None]
    assert len(found) > len(planned) / 2
    assert {len(plan.stages) for plan in found} >= {1, 2, 3}


@settings(max_examples=15 if ALL else 5, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9), shift=st.sampled_from([-1, 1]), which=st.integers(0, 100))
def test_a_moved_boundary_is_seen_and_refused(seed: int, shift: int, which: int) -> None:
    p = _problem(seed, 6, 2)
    plan = _plan(p)
    if plan is None:
        return
    data = plan.model_dump(mode="json", by_alias=True)
    stage = data["stages"][which % len(data["stages"])]
    stage["layers"][1] = min(6, stage["layers"][1] + shift)
    if stage["layers"] == [*plan.stages[which % len(plan.stages)].layers]:
        stage["layers"][1] -= 1  # the last stage cannot end later
    assert _faults(p, data["stages"])
    with pytest.raises((BadPlanError, ValueError)):
        Plan.parse_data(data, where="plan")
