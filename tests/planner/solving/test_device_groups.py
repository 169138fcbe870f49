"""Stages in tensor parallel: the best plan = the best over all groupings, shares, cuts and bits."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.devices.joined_devices import members_of
from llmpq.planner.evaluate.objective import value
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving import topology_search
from llmpq.planner.solving.count_vectors import CountVectors
from llmpq.planner.solving.device_groups import is_even, may_group, with_groups
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.topologies import best_topology
from llmpq.planner.solving.topology_search import KnownPipeline, TopologySearch
from reference.all_topologies import best_topology_of_all, shared_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]

ALL = "LLMPQ_ALL_TESTS" in os.environ
OPTIONS = SolveOptions(gap=1e-9, time_limit_s=math.inf)


def test_the_best_topology_with_groups_is_that_of_brute_force() -> None:
    shared = 0
    for seed in range(2000 if ALL else 3):
        p = shared_problem(seed)
        best = best_topology_of_all(p)
        grouped = with_groups(p, (p.kv,))
        among = p if grouped is None else grouped.problem
        found = TopologySearch(among, OPTIONS, gap=0.0).run()
        assert found.value == pytest.approx(best, rel=1e-6), f"seed {seed}"
        assert found.bound <= best * (1 + 1e-9), f"seed {seed}: the bound is above the best"
        if math.isfinite(best):
            assert found.bound >= best * (1 - 1e-6), f"seed {seed}: not proven"
        kinds = len(CountVectors(among).counts)
        shared += any(any(one.vector[kinds:]) for one in found.engines)
    assert shared > 0


@pytest.mark.parametrize("seed", [131])
def test_a_plain_engine_beside_one_that_shares_stages_has_its_own_value(seed: int) -> None:
    """The slowest engine may be either."""
    p = shared_problem(seed)
    found = best_topology(p, OPTIONS, KnownPipeline(), gap=0.0)
    each = [
        (one.waves * value(one.solved.problem, one.solved.outcome.assignment), one.places)
        for one in found.engines
    ]
    shares = [any(not isinstance(place, str) for place in places) for _, places in each]
    assert any(shares) and not all(shares)
    assert found.value == pytest.approx(max(seconds for seconds, _ in each), rel=1e-9)
    assert found.value == pytest.approx(best_topology_of_all(p), rel=1e-6)
    assert found.bound <= found.value


def test_a_search_that_ends_early_is_no_worse_than_even_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request on four cards: of all engines with groups none is tried, but the even one is."""
    monkeypatch.setattr(topology_search, "MOST_TRIED", 0)
    monkeypatch.setattr(topology_search, "MOST_ROUNDS", 0)
    request = PlanRequest(model="qwen3-8b", devices="3090:4", batch=1, gen_len=32, bits="16")
    p, _, _ = make_problem(request)
    found = best_topology(p, SolveOptions(), KnownPipeline())
    even = found.simple["shared"]
    assert even is not None and found.value <= even[1]


def test_shares_follow_speed_where_all_have_room() -> None:
    request = PlanRequest(model="gemma-3-27b", devices="5090,3080:2", batch=1, bits="8")
    p, _, _ = make_problem(request)
    found = best_topology(p.with_changes(theta=0.1), SolveOptions(), KnownPipeline())
    (engine,) = found.engines
    (place,) = engine.places
    assert not isinstance(place, str)
    names, shares = place
    assert names[0] == "RTX-5090-0" and shares[0] > max(shares[1:])
    stage = engine.solved.problem.cluster.devices[0]
    assert stage.spec.mem_gbps > p.cluster.devices[0].spec.mem_gbps
    heads = [len(member.heads or ()) for member in members_of(p.spec, shares)]
    assert heads[0] > heads[1] == heads[2]


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"bits": "8,w8a8,w4a4"}, True),
        ({"devices": "3090"}, False),
        ({"devices": "cpu=64GB+60GB/s+16threads,3090"}, False),
        ({"devices": "cpu=64GB+60GB/s+16threads,3090,4090"}, True),
        ({"devices": "m4-max=64GB"}, False),
        ({"devices": "gb10:2"}, False),  # two machines
        ({"devices": "4090-laptop,strix-halo=96GB"}, False),
        ({"devices": "gb10,4090,3090"}, True),
    ],
)
def test_groups_are_of_devices_that_can_share(changes: dict[str, Any], can: bool) -> None:
    request = replace(PlanRequest(model="qwen3-8b", devices="3090:2", batch=4), **changes)
    p, _, _ = make_problem(request)
    assert may_group(p) == can


def test_a_device_has_more_than_outliers() -> None:
    """Of 112 runs of 128 MLP channels the smallest share has one, all of them outliers."""
    request = PlanRequest(model="llama-3.1-8b", devices="3090:2", bits="w4a4", batch=4)
    with pytest.raises(ValueError, match="RTX-3090-1 would have only outliers of w4a4 layers"):
        make_problem(replace(request, tensor_parallel="111:1"))
    p, _, _ = make_problem(replace(request, tensor_parallel="111:1", outliers=64))
    assert p.quantization.outliers == 64


def test_no_group_is_over_two_nodes() -> None:
    p, _, _ = make_problem(PlanRequest(model="qwen3-8b", devices="3090:2", batch=1))
    nodes = [{"name": f"n{i}", "devices": [{"kind": "RTX-3090", "count": 2}]} for i in (0, 1)]
    cluster = Cluster.parse_data({"name": "two", "nodes": nodes}, where="test")
    grouped = with_groups(p.with_changes(cluster=cluster), (p.kv,))
    assert grouped is not None
    groups = [device for device in grouped.problem.cluster.devices if device.joined]
    assert len(groups) == 2 and grouped.left_out == 0
    for group in groups:
        assert len({one.node for one in group.joined}) == 1


def test_even_groups_are_those_whose_heads_go_into_equal_parts() -> None:
    """8 key/value heads: not of three devices, nor of all five, though their shares are equal."""
    devices = "3090:4,a100-40gb"
    p, _, _ = make_problem(PlanRequest(model="qwen3-32b", devices=devices, batch=4))
    grouped = with_groups(p, (p.kv,))
    assert grouped is not None
    groups = [device for device in grouped.problem.cluster.devices if device.joined]
    alike = {len(group.shares) for group in groups if len(set(group.shares)) == 1}
    assert alike >= {2, 3, 4, 5}
    assert {len(group.shares) for group in groups if is_even(p, group)} == {2, 4}
