"""Stages in tensor parallel: the best plan = the best over all groupings, shares, cuts and bits."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from llmpq.cluster import Cluster
from llmpq.devices.joined_devices import members_of
from llmpq.errors import DoesNotFitError
from llmpq.planner.costs.roofline import estimate_costs
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.count_vectors import CountVectors, Place
from llmpq.planner.solving.device_groups import may_group, on_places, with_groups
from llmpq.planner.solving.engine_prices import GROUP_GAIN
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import best_plan
from llmpq.planner.solving.topologies import best_topology
from llmpq.planner.solving.topology_search import KnownPipeline, TopologySearch
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]

ALL = "LLMPQ_ALL_TESTS" in os.environ
OPTIONS = SolveOptions(gap=1e-9, time_limit_s=math.inf)


def _problem(seed: int) -> Problem:
    """A few layers on two or three cards of a node, with estimated times."""
    rng = random.Random(seed)
    p = random_problem(rng, layers=(2, 3), kinds=(1, 2), devices=(1, 2), precisions=2, batch=2)
    data = p.cluster.model_dump(mode="json", by_alias=True)
    whole = int(p.all_layer_bytes.sum())
    (first, *others) = data["nodes"]
    for node in others:
        first["devices"] += node["devices"]
    for group in first["devices"]:
        group["spec"]["memory"] += int(rng.uniform(0, 1.5) * whole)
        group["spec"]["mem_gbps"] = rng.uniform(5, 60)
        group["spec"]["fp16_tflops"] = rng.uniform(0.2, 3)
    link = {"gbps": rng.uniform(5, 400), "latency_us": rng.uniform(0, 30)}
    data |= {"nodes": [first], "links": {"within_node": link, "between_nodes": link}}
    cluster = Cluster.parse_data(data, where="test")
    costs = estimate_costs(
        p.spec,
        cluster.devices,
        dtype=p.workload.dtype,
        precisions=p.choices,
        kvs=(p.kv,),
        quantization=p.quantization,
    )
    return p.with_changes(
        cluster=cluster, costs=replace(p.costs, estimate=costs, profile=None, scale={})
    )


def _placings(p: Problem, ways: dict[tuple[str, ...], list[Place]]) -> Iterator[list[list[Place]]]:
    """Yield all ways to make engines of disjoint devices, alone or in groups."""

    def split(names: list[str]) -> Iterator[list[Place]]:
        """Into devices alone and groups, all used."""
        if not names:
            yield []
            return
        first, rest = names[0], names[1:]
        for more in range(len(rest) + 1):
            for others in itertools.combinations(rest, more):
                own = (first, *others)
                left = [name for name in rest if name not in others]
                for place in ways.get(own, []) if others else [first]:
                    yield from ([place, *tail] for tail in split(left))

    def engines(names: list[str]) -> Iterator[list[list[Place]]]:
        if not names:
            yield []
            return
        first, rest = names[0], names[1:]
        yield from engines(rest)  # the first is not used
        for more in range(len(rest) + 1):
            for others in itertools.combinations(rest, more):
                left = [name for name in rest if name not in others]
                for own in split([first, *others]):
                    yield from ([own, *tail] for tail in engines(left))

    return engines([device.name for device in p.cluster.devices])


def _ways(p: Problem) -> dict[tuple[str, ...], list[Place]]:
    """Return all groups of two or three devices with all shares that the search looks at."""
    grouped = with_groups(p, (p.kv,))
    if grouped is None:
        return {}
    kinds: dict[tuple[str, ...], set[tuple[tuple[str, int], ...]]] = {}
    kind_of = {device.name: device.kind for device in p.cluster.devices}
    for device in grouped.problem.cluster.devices:
        if device.joined:
            pairs = sorted(
                (one.kind, s) for one, s in zip(device.joined, device.shares, strict=True)
            )
            kinds.setdefault(tuple(kind for kind, _ in pairs), set()).add(tuple(pairs))
    found: dict[tuple[str, ...], list[Place]] = {}
    names = [device.name for device in p.cluster.devices]
    for size in range(2, len(names) + 1):
        for own in itertools.combinations(names, size):
            key = tuple(sorted(kind_of[name] for name in own))
            for kind_shares in kinds.get(key, ()):
                left = dict(kind_shares)
                shares = tuple(left[kind_of[name]] for name in own)
                found.setdefault(own, []).append(_leading_first(p, own, shares))
    return found


def _leading_first(p: Problem, names: tuple[str, ...], shares: tuple[int, ...]) -> Place:
    pairs = [(p.cluster.device(name), s) for name, s in zip(names, shares, strict=True)]
    pairs.sort(key=lambda pair: (-pair[0].spec.mem_gbps, -pair[0].limit_bytes))
    return tuple(device.name for device, _ in pairs), tuple(share for _, share in pairs)


def _brute_force(p: Problem) -> float:
    known: dict[tuple[object, ...], float] = {}

    def engine(places: list[Place], rows: int) -> float:
        key = (*sorted(map(str, places)), rows)
        if key not in known:
            best = math.inf
            for waves in range(1, rows + 1):
                job = on_places(p, places, (p.kv,)).with_job(batch=-(-rows // waves))
                try:
                    one = best_plan(job.with_changes(theta=p.theta / waves), OPTIONS)
                except DoesNotFitError:
                    continue
                best = min(best, waves * one.outcome.value)
            shares = any(not isinstance(place, str) for place in places)
            known[key] = best * (GROUP_GAIN if shares else 1.0)
        return known[key]

    rows, best = p.workload.batch, math.inf
    for engines in _placings(p, _ways(p)):
        if len(engines) == 1:
            best = min(best, engine(engines[0], rows))
        elif len(engines) == 2 and rows == 2:
            best = min(best, max(engine(own, 1) for own in engines))
    return best


def test_the_best_topology_with_groups_is_that_of_brute_force() -> None:
    shared = 0
    for seed in range(2000 if ALL else 3):
        p = _problem(seed)
        best = _brute_force(p)
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


def test_shares_follow_speed_where_all_have_room() -> None:
    request = PlanRequest(model="gemma-3-27b", devices="5090,3080:2", batch=1)
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
        ({"bits": "8,w8a8"}, False),  # their inputs are rounded whole
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
