"""--gpu-memory-utilization: the share of every GPU's memory that is used at most."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmpq
from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError
from llmpq.planner.make import make_plan
from llmpq.plans.gpu_memory import cluster_within, plan_within
from llmpq.plans.plan import Plan

pytestmark = pytest.mark.pure
ROOT = Path(__file__).resolve().parents[3]
JOB = {"model": "llama-3.1-8b", "devices": "4090", "batch": 8, "method": "uniform"}
GIB = 1 << 30


def cluster(**more: object) -> Cluster:
    groups = [{"kind": "RTX-3090", "count": 2, **more}, {"kind": "CPU", "memory": "64 GiB"}]
    data = {"schema": 1, "name": "c", "nodes": [{"name": "n", "devices": groups}]}
    return Cluster.parse_data(data, where="test")


def test_a_share_of_all_the_memory_unless_a_reserve_leaves_less():
    first, second, cpu = cluster().devices
    whole, screen = first.memory_bytes, first.reserve_bytes
    assert screen > 0
    for share, reserve in ((0.5, whole - whole // 2), (1.0, screen)):
        got = cluster_within(cluster(), share).devices
        assert [device.reserve_bytes for device in got] == [reserve, reserve, cpu.reserve_bytes]
    busy = cluster_within(cluster(reserve=20 * GIB), 0.9).devices
    assert busy[0].reserve_bytes == 20 * GIB
    assert cluster_within(cluster(), None) == cluster()


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), True, "0.9"])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(ValueError, match="--gpu-memory-utilization must be above 0 and at most 1"):
        cluster_within(cluster(), share)


def test_python_is_told_the_argument():
    with pytest.raises(ValueError, match="^gpu_memory_utilization must be") as error:
        llmpq.make_plan(**JOB, gpu_memory_utilization=1.5)
    assert "--" not in str(error.value)


def test_a_plan_is_made_for_the_share():
    whole, half = (make_plan(**JOB, gpu_memory_utilization=share) for share in (None, 0.5))
    (stage,) = half.stages
    memory = whole.stages[0].memory.limit_bytes + whole.stages[0].memory.reserve_bytes
    assert stage.memory.total_bytes <= stage.memory.limit_bytes == memory // 2
    assert whole.stages[0].memory.total_bytes > memory // 2
    bits = [sum(p.weight_bits for p in plan.precisions) for plan in (whole, half)]
    assert bits[1] < bits[0]


def test_a_plan_that_is_given_keeps_to_it_or_is_refused():
    plan = Plan.load(ROOT / "docs/plan.json")
    used = max(s.memory.total_bytes / (s.memory.limit_bytes + s.memory.reserve_bytes)
               for s in plan.stages)  # fmt: skip
    assert plan_within(plan, 1.0) == plan_within(plan, None) == plan
    tight = plan_within(plan, used + 1e-6)
    assert all(s.memory.total_bytes <= s.memory.limit_bytes for s in tight.stages)
    assert tight != plan
    with pytest.raises(DoesNotFitError, match="re-plan with llmpq-algo --gpu-memory-utilization"):
        plan_within(plan, used - 0.01)
