"""Values every topology of a small problem: all engines of disjoint devices, alone or in groups.

What an engine takes for its rows, in any number of waves, is the best of all its plans
(all_plans.py): all cuts, bits and micro-batches. Shares of a group are those that the search looks
at, or all there are.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from llmpq.devices.cluster import Cluster
from llmpq.planner.costs.roofline import estimate_costs
from llmpq.planner.problem.limits import MOST_WAVES
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.count_vectors import Place
from llmpq.planner.solving.device_groups import on_places, with_groups
from reference.all_plans import best_of_all
from reference.random_problems import random_problem

Ways = Mapping[tuple[str, ...], list[Place]]
"""Groups of devices, given by their names."""


def shared_problem(seed: int) -> Problem:
    """Return a few layers on two or three cards of a node, with estimated times."""
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
    cluster = Cluster.parse_data(data, where="random")
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


def searched_ways(p: Problem) -> Ways:
    """Return all groups of two devices or more with all shares that the search looks at."""
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


def best_topology_of_all(p: Problem) -> float:
    """Return the least value of all topologies."""
    known: dict[tuple[object, ...], float] = {}

    def engine(places: list[Place], rows: int) -> float:
        key = (*sorted(str(_of_kinds(place)) for place in places), rows)
        if key not in known:
            own, best = on_places(p, places, (p.kv,)), math.inf
            for waves in range(1, min(MOST_WAVES, rows) + 1):
                job = own.with_job(batch=-(-rows // waves)).with_changes(theta=p.theta / waves)
                best = min(best, waves * best_of_all(job, None)[0])
            known[key] = best
        return known[key]

    rows, best = p.workload.batch, math.inf
    for engines in _placings(p, searched_ways(p)):
        if len(engines) > rows:
            continue
        for cuts in itertools.combinations(range(1, rows), len(engines) - 1) if engines else ():
            dealt = [b - a for a, b in itertools.pairwise((0, *cuts, rows))]
            each = (engine(own, n) for own, n in zip(engines, dealt, strict=True))
            best = min(best, max(each))
    return best


def _of_kinds(place: Place) -> Place:
    """Return a place by the kinds of its devices: those of a kind are alike."""
    if isinstance(place, str):
        return place.rpartition("-")[0]
    return tuple(name.rpartition("-")[0] for name in place[0]), place[1]


def _placings(p: Problem, ways: Ways) -> Iterator[list[list[Place]]]:
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
