"""The best topology = the best over all groupings of devices and all ways to deal rows."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.problem.limits import MOST_WAVES
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving import engine_floors
from llmpq.planner.solving.count_vectors import CountVectors, partitions
from llmpq.planner.solving.engine_floors import EngineFloors
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import best_plan
from llmpq.planner.solving.topologies import best_topology, two_fit
from llmpq.planner.solving.topology_search import KnownPipeline, TopologySearch, dealt
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]

ALL = "LLMPQ_ALL_TESTS" in os.environ
OPTIONS = SolveOptions(gap=1e-9, time_limit_s=math.inf, groups=False)


def _problem(seed: int, *, batch: int = 3) -> Problem:
    """A problem in which some single devices hold the model, and others do not."""
    rng = random.Random(seed)
    p = random_problem(rng, layers=(2, 3), kinds=(1, 2), devices=(1, 2), precisions=2, batch=batch)
    data = p.cluster.model_dump(mode="json", by_alias=True)
    for node in data["nodes"]:
        for group in node["devices"]:
            group["spec"]["memory"] += int(rng.uniform(0, 2) * int(p.all_layer_bytes.sum()))
    return p.with_changes(cluster=Cluster.parse_data(data, where="test"))


class _Oracle:
    """Every grouping of devices, every way to deal rows: engines solved one by one."""

    def __init__(self, p: Problem, budget: float | None = None) -> None:
        self.p, self.known = p, dict[tuple[tuple[str, ...], int], float]()
        self.options = SolveOptions(gap=1e-9, time_limit_s=math.inf, budget=budget)

    def best(self, engines: int | None = None) -> float:
        names = [device.name for device in self.p.cluster.devices]
        rows = self.p.workload.batch
        found = math.inf
        for groups in _groupings(names):
            if engines not in (None, len(groups)):
                continue
            for dealt_rows in _compositions(rows, len(groups)):
                worst = max(
                    self.engine(group, n) for group, n in zip(groups, dealt_rows, strict=True)
                )
                found = min(found, worst)
        return found

    def engine(self, names: tuple[str, ...], rows: int) -> float:
        kinds = tuple(sorted(name.rpartition("-")[0] for name in names))
        if (kinds, rows) not in self.known:
            best = math.inf
            for waves in range(1, min(MOST_WAVES, rows) + 1):
                job = self.p.part(names).with_job(batch=-(-rows // waves))
                try:
                    one = best_plan(job.with_changes(theta=self.p.theta / waves), self.options)
                except DoesNotFitError:
                    continue
                best = min(best, waves * one.outcome.value)
            self.known[kinds, rows] = best
        return self.known[kinds, rows]


@cache
def _oracle(seed: int) -> _Oracle:
    """Return that of a problem which several tests have: engines are valued once."""
    return _Oracle(_problem(seed))


def _groupings(names: list[str]) -> Iterator[list[tuple[str, ...]]]:
    """Yield every set of disjoint, non-empty groups of some of the devices."""
    if not names:
        yield []
        return
    first, rest = names[0], names[1:]
    for groups in _groupings(rest):
        yield groups
        yield [(first,), *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], (first, *group), *groups[at + 1 :]]


def _compositions(rows: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, rows), parts - 1) if parts else ():
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, rows)))


def _check(seed: int, p: Problem, best: float, search: TopologySearch) -> bool:
    found = search.run()
    assert found.value == pytest.approx(best, rel=1e-6), f"seed {seed}"
    assert found.bound <= best * (1 + 1e-9), f"seed {seed}: the bound is above the best"
    if math.isfinite(best):
        assert found.bound >= best * (1 - 1e-6), f"seed {seed}: not proven"
    return len(found.engines) > 1


def test_the_best_topology_is_that_of_brute_force() -> None:
    several = fitting = 0
    for seed in range(1000 if ALL else 10):
        p = _problem(seed)
        best = _Oracle(p).best()
        fitting += math.isfinite(best)
        several += _check(seed, p, best, TopologySearch(p, OPTIONS, gap=0.0))
    assert several > 1 and fitting > 5


@pytest.mark.parametrize("many", [engine_floors.MANY, pytest.param(0, marks=pytest.mark.seldom)])
def test_no_engine_is_quicker_than_its_floor(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows and waves an engine has; of one device the floor is what it takes, but for
    memory, which floors of more than MANY engines do not count."""
    monkeypatch.setattr(engine_floors, "MANY", many)
    near = known = 0
    for seed in range(400 if ALL else 4):
        p = _problem(seed, batch=4)
        budget = float(p.omega.min(axis=1).sum()) * 1.3 + 1e-6 if seed % 3 == 0 else None
        oracle, vectors = _Oracle(p, budget), CountVectors(p)
        own = p if budget is None else p.with_changes(theta=0.0)
        floors = EngineFloors(own, vectors.vectors, (), budget)
        for v in vectors.vectors:
            for rows in (1, 3, 4):
                took, floor = oracle.engine(vectors.names(v), rows), floors.floor(v, rows)
                assert floor <= took * (1 + 1e-9), (seed, v, rows)
                if math.isfinite(took):
                    known, near = known + 1, near + (floor > 0.8 * took)
    assert known > 30 and (near > known / 3 or not many)


def test_it_is_never_worse_than_simple_topologies() -> None:
    """Not than one card, one pipeline, or an engine a card, all valued alike."""
    compared = 0
    for seed in range(500, 505):
        p = _problem(seed)
        try:
            pipeline = best_plan(p, OPTIONS).outcome.value
        except DoesNotFitError:
            continue
        known = KnownPipeline(value=pipeline, bound=pipeline)
        search = TopologySearch(p, OPTIONS, known=known, gap=0.0)
        each, cards = search.one_a_device(), search.single_devices
        search.offer([(v, rows) for v, rows, _ in each])
        alone = [search.prices.price(v, search.prices.rows).value for v in set(cards)]
        worst = max((price.value for _, _, price in each), default=math.inf)
        assert sum(rows for _, rows, _ in each) in (0, 3)
        found = search.run().value
        assert found <= min(pipeline, worst, *alone) * (1 + 1e-9), seed
        compared += math.isfinite(worst)
    assert compared > 1


def test_so_many_engines_are_the_best_of_so_many() -> None:
    for seed in range(300, 304):
        p, oracle = _problem(seed), _oracle(seed)
        for engines in (1, 2, 3):
            best = oracle.best(engines)
            known = KnownPipeline(value=oracle.best(1) if engines > 1 else math.inf)
            start = known if seed % 2 else KnownPipeline()
            search = TopologySearch(p, OPTIONS, known=start, exactly=engines, gap=0.0)
            assert search.run().value == pytest.approx(best, rel=1e-6), (seed, engines)


def test_so_many_engines_are_dealt_by_speed_from_the_first_round_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search that ends early has engines, though none are as good as the pipeline."""
    from llmpq.planner.solving import topology_search

    monkeypatch.setattr(topology_search, "MOST_ROUNDS", 2)
    early = 0
    for seed in range(300, 304):
        p, oracle = _problem(seed), _oracle(seed)
        best, known = oracle.best(2), KnownPipeline(value=oracle.best(1))
        if math.isfinite(best) and math.isfinite(known.value):
            found = TopologySearch(p, OPTIONS, known=known, exactly=2, gap=0.0).run()
            early += len(found.engines) == 2
    assert early > 1


def test_every_engine_keeps_the_budget() -> None:
    several = 0
    for seed in range(400, 500 if ALL else 403):
        p = _problem(seed).with_changes(theta=0.0)
        rng = random.Random(seed)
        budget = rng.uniform(0, float(p.omega.max(axis=1).sum()))
        options = replace(OPTIONS, budget=budget)
        best = _Oracle(p, budget).best()
        found = best_topology(p, options, KnownPipeline(), gap=0.0)
        assert found.value == pytest.approx(best, rel=1e-6), seed
        several += len(found.engines) > 1
        for engine in found.engines:
            loss = sum_omega(engine.solved.problem, engine.solved.outcome.assignment)
            assert loss <= budget * (1 + 1e-9) + 1e-12
    assert several > 0


def test_engines_have_disjoint_devices_that_hold_their_plans() -> None:
    for seed in range(500, 506):
        p = _problem(seed)
        found = best_topology(p, OPTIONS, KnownPipeline(), gap=0.0)
        names = [name for engine in found.engines for name in engine.places]
        assert len(set(names)) == len(names)
        assert not found.engines or sum(e.rows for e in found.engines) == p.workload.batch
        for engine in found.engines:
            own, a = engine.solved.problem, engine.solved.outcome.assignment
            assert {d.name for d in own.cluster.devices} == set(engine.places)
            assert fits(own, a)
            assert engine.waves * value(own, a) <= found.value * (1 + 1e-9)


def test_a_search_that_is_stopped_gives_what_it_has_and_a_true_bound() -> None:
    for seed in range(600, 604):
        p = _problem(seed)
        best = _Oracle(p).best()
        hurried = SolveOptions(gap=1e-9, time_limit_s=0.0)
        known = KnownPipeline(value=2 * best if math.isfinite(best) else math.inf)
        found = TopologySearch(p, hurried, known=known).run()
        assert found.bound <= best * (1 + 1e-9) and found.value >= best * (1 - 1e-9)


def test_twin_nodes_are_one_engine() -> None:
    group = {"kind": "T4", "count": 2}
    nodes = [{"name": f"n{i}", "devices": [group]} for i in range(3)]
    links = {"between_nodes": {"gbps": 1, "latency_us": 50}}
    cluster = Cluster.parse_data({"name": "twins", "nodes": nodes, "links": links}, where="test")
    p = _problem(0).with_changes(cluster=cluster)
    vectors = CountVectors(p)
    assert len(vectors.vectors) == 26 and vectors.complete
    assert len({vectors.canonical(v) for v in vectors.vectors}) == 9


def test_devices_are_parted_where_links_are_slow() -> None:
    nodes = [
        {"name": "a", "devices": [{"kind": "V100-32GB", "count": 4}]},
        {"name": "b", "devices": [{"kind": "T4", "count": 2}]},
        {"name": "c", "devices": [{"kind": "T4"}]},
    ]
    pairs = [
        {"between": ["V100-32GB-0", "V100-32GB-1"], "gbps": 1200, "latency_us": 5},
        {"between": ["V100-32GB-2", "V100-32GB-3"], "gbps": 1200, "latency_us": 5},
        {"between": ["a", "c"], "gbps": 1, "latency_us": 100},
        {"between": ["b", "c"], "gbps": 1, "latency_us": 100},
    ]
    links = {"between_nodes": {"gbps": 25, "latency_us": 50}, "pairs": pairs}
    cluster = Cluster.parse_data({"name": "x", "nodes": nodes, "links": links}, where="test")
    last, ts = ("T4-2",), ("T4-0", "T4-1")
    a = ("V100-32GB-0", "V100-32GB-1", "V100-32GB-2", "V100-32GB-3")
    assert partitions(cluster, cluster.devices) == [
        [a, ts, last],
        [a[:2], a[2:], ("T4-0",), ("T4-1",), last],
        [(*a, *ts), last],
    ]
    for alone in ({"name": "one", "nodes": nodes[:1]}, {"name": "one", "nodes": nodes[2:]}):
        one = Cluster.parse_data(alone, where="test")
        assert partitions(one, one.devices) == []


def test_rows_are_dealt_in_proportion() -> None:
    rng = random.Random(1)
    for _ in range(200):
        able = [rng.randint(1, 50) for _ in range(rng.randint(1, 6))]
        rows = rng.randint(1, sum(able))
        found = dealt(rows, able)
        assert sum(found) == rows
        assert all(0 <= n <= most for n, most in zip(found, able, strict=True))
        assert all(
            abs(n - rows * m / sum(able)) < 1 + 1e-9 for n, m in zip(found, able, strict=True)
        )


def test_where_no_two_groups_have_room_there_are_no_two_engines() -> None:
    without = 0
    for seed in range(60 if not ALL else 600):
        p = _problem(seed, batch=2)
        whole = sum_omega_of(p, 0)
        for budget in (None, 0.3 * whole):
            options = SolveOptions(gap=1e-9, time_limit_s=math.inf, budget=budget)
            if not two_fit(p, options):
                without += 1
                assert _Oracle(p, budget).best(2) == math.inf
    assert without > 10


def sum_omega_of(p: Problem, choice: int) -> float:
    """Sum of omega with every layer at one choice."""
    return float(p.omega[:, choice].sum())
