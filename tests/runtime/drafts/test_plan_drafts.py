"""What a plan says of drafts: how long they may be, what a stage on a GPU or a CPU copies."""

from __future__ import annotations

import pytest

from llmpq.plans.plan import Speculation, StagePlan
from llmpq.plans.speculation import MAX_GAMMA
from llmpq.precision import Precision

pytestmark = pytest.mark.cpu


def stage(kind: str, threads: int | None = None) -> StagePlan:
    return StagePlan(
        device="d-0",
        node="a",
        kind=kind,
        profile_kind=kind,
        threads=threads,
        layers=(0, 1),
        precisions=(Precision.W8A16,),
    )


def test_a_plan_drafts_no_more_than_the_runtime_takes() -> None:
    data = {"mode": "kv4", "gamma": MAX_GAMMA, "acceptance": 0.9}
    assert Speculation.parse_data(data, where="plan").gamma == MAX_GAMMA
    with pytest.raises(ValueError, match=f"'gamma': expected at most {MAX_GAMMA}"):
        Speculation.parse_data(data | {"gamma": MAX_GAMMA + 1}, where="plan")


def test_a_cpu_is_known_by_its_kind_or_its_threads() -> None:
    assert stage("CPU").is_cpu and stage("CPU", 2).is_cpu
    assert stage("not in the table", 1).is_cpu
    assert not stage("H200").is_cpu and not stage("not in the table").is_cpu
