"""The checker passes every plan a method makes and refuses every corrupted one."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.errors import BadPlanError, DoesNotFitError, PlanMismatchError
from llmpq.planner.check.build_plan import build_plan
from llmpq.planner.check.check import check_plan
from llmpq.planner.evaluate.add_drafts import round_bytes
from llmpq.planner.evaluate.objective import value
from llmpq.planner.problem.outcome import Infeasible
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.methods import PLANNERS, SolveOptions, solve
from llmpq.plans.plan import Plan, Speculation
from llmpq.plans.speculation import draft_bytes
from llmpq.units import format_size
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]
ALL = "LLMPQ_ALL_TESTS" in os.environ


@settings(max_examples=30 if ALL else 12, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9), method=st.sampled_from(PLANNERS))
def test_no_method_makes_a_plan_that_does_not_check(seed: int, method: str) -> None:
    p = random_problem(random.Random(seed), layers=(3, 7), kinds=(1, 2), devices=(1, 2), batch=2)
    try:
        outcome = solve(p, SolveOptions(method=method))
    except Infeasible:
        return
    assert outcome.value == pytest.approx(value(p, outcome.assignment), rel=1e-9)
    plan = build_plan(p, outcome)
    check_plan(plan, spec=p.spec, cluster=p.cluster, costs=p.costs)
    layers = [i for stage in plan.stages for i in range(*stage.layers)]
    assert layers == list(range(p.spec.num_layers))
    for stage in plan.stages:
        assert stage.memory is not None
        assert stage.memory.total_bytes <= stage.memory.limit_bytes


@settings(max_examples=20 if ALL else 8, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9))
def test_exact_is_at_least_as_good_as_every_method(seed: int) -> None:
    p = random_problem(random.Random(seed), layers=(3, 6), kinds=(1, 2), devices=(1, 2), batch=2)
    values = {}
    for method in PLANNERS:
        try:
            values[method] = solve(p, SolveOptions(method=method)).value
        except Infeasible:
            continue
    if values:
        assert values["exact"] <= min(values.values()) * (1 + 1e-6)


def _planned(seed: int = 1) -> tuple[Problem, Plan]:
    p = random_problem(
        random.Random(seed), layers=(6, 6), kinds=(2, 2), devices=(1, 2), precisions=3
    )
    p = p.with_changes(theta=0.0)
    plan = build_plan(p, solve(p, SolveOptions(method="exact")))
    return p, plan


def _corrupt(plan: Plan, **changes: Any) -> Plan:
    data = json.loads(plan.dump_json())
    for key, new in changes.items():
        data[key] = new(data[key])
    return Plan.parse_data(data, where="test")


def test_wrong_time_memory_device_model_and_cluster_are_refused() -> None:
    p, plan = _planned()
    others = {"spec": p.spec, "cluster": p.cluster, "costs": p.costs}
    check_plan(plan, **others)  # type: ignore[arg-type]

    def faster(predicted: dict[str, Any]) -> dict[str, Any]:
        return {**predicted, "total_s": predicted["total_s"] * 0.999}

    with pytest.raises(BadPlanError) as caught:
        check_plan(_corrupt(plan, predicted=faster), **others)  # type: ignore[arg-type]
    assert plan.predicted is not None
    seconds = plan.predicted.total_s
    assert str(caught.value) == (
        f"the plan predicts {seconds * 0.999:.6f} s, its own stages take {seconds:.6f} s; re-plan "
        "with llmpq-algo"
    )

    def heavier(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        stages[0]["memory"]["total_bytes"] += 1
        return stages

    with pytest.raises(BadPlanError) as caught:
        check_plan(_corrupt(plan, stages=heavier), **others)  # type: ignore[arg-type]
    first = plan.stages[0]
    assert first.memory is not None
    assert str(caught.value) == (
        f"stage {first.device}: the plan states {first.memory.total_bytes + 1} bytes for "
        f"total_bytes, the formulas give {first.memory.total_bytes}: re-plan with llmpq-algo"
    )
    parts = ("weights", "embedding", "kv", "workspace", "context")
    for part in parts:

        def other(stages: list[dict[str, Any]], part: str = part) -> list[dict[str, Any]]:
            stages[0]["memory"][f"{part}_bytes"] += 1
            return stages

        with pytest.raises(BadPlanError, match=f"bytes for {part}_bytes, the formulas"):
            check_plan(_corrupt(plan, stages=other), **others)  # type: ignore[arg-type]

    def unlike(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        stages[0]["profile_kind"] = "K9"
        return stages

    with pytest.raises(BadPlanError, match="the plan has a K9, the cluster a K"):
        check_plan(_corrupt(plan, stages=unlike), **others)  # type: ignore[arg-type]
    other_p, _ = _planned(2)
    with pytest.raises(PlanMismatchError):
        check_plan(plan, spec=p.spec, cluster=other_p.cluster, costs=None)


def test_what_drafts_take_is_counted() -> None:
    """A plan that fits but for the rounds of its drafts is refused, with what they take."""
    p, plan = _planned()
    data = p.cluster.model_dump(by_alias=True)
    for node in data["nodes"]:
        for group in node["devices"]:
            group["memory"] = max(s.memory.total_bytes for s in plan.stages if s.memory)
    tight = type(p.cluster).parse_data(data, where="test")
    moved = _corrupt(plan, cluster=lambda c: {**c, "fingerprint": tight.fingerprint()})
    check_plan(moved, spec=p.spec, cluster=tight, costs=None)
    chosen = Speculation(mode="kv4", gamma=3, acceptance=0.9)
    drafting = moved.model_copy(update={"speculation": chosen})
    with pytest.raises(DoesNotFitError, match=r"^stage K\d-\d: needs .*; short by ") as caught:
        check_plan(drafting, spec=p.spec, cluster=tight, costs=None)
    full = max(plan.stages, key=lambda s: s.memory.total_bytes if s.memory else 0)
    index = plan.stages.index(full)
    extra = round_bytes(plan, p.spec, index, tight.device(full.device), "kv4", 3)
    assert str(caught.value).endswith(f"short by {format_size(extra)}")
    assert extra >= draft_bytes(plan, p.spec, index, "kv4") > 0


def test_too_little_memory_is_named_with_its_bytes() -> None:
    p, plan = _planned()
    needed = max(s.memory.total_bytes for s in plan.stages if s.memory)
    data = p.cluster.model_dump(by_alias=True)
    for node in data["nodes"]:
        for group in node["devices"]:
            group["memory"] = needed // 2
    small = type(p.cluster).parse_data(data, where="test")
    moved = _corrupt(plan, cluster=lambda c: {**c, "fingerprint": small.fingerprint()})
    with pytest.raises(DoesNotFitError) as caught:
        check_plan(moved, spec=p.spec, cluster=small, costs=None)
    texts = []
    for stage in plan.stages:
        assert stage.memory is not None
        needs, has = stage.memory.total_bytes, small.device(stage.device).limit_bytes
        if needs > has:
            texts.append(
                f"stage {stage.device}: needs {format_size(needs)}, the device has "
                f"{format_size(has)}; short by {format_size(needs - has)}"
            )
    assert str(caught.value) == texts[0]


@pytest.mark.parametrize("shift, word", [(1, "gap"), (-1, "overlap")], ids=["a gap", "an overlap"])
def test_gaps_and_overlaps_cannot_even_be_read(shift: int, word: str) -> None:
    for seed in range(50):
        p, plan = _planned(seed)
        if len(plan.stages) > 1 and plan.stages[1].num_layers > 1:
            break

    def moved(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        start, end = stages[1]["layers"]
        stages[1]["layers"] = [start + shift, end]
        return stages

    with pytest.raises(ValueError, match=f"leave an? {word}; expected to start at layer"):
        _corrupt(plan, stages=moved)
