"""Links between single devices (an NVLink pair beside PCIe): read, refused when wrong, planned."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest

from llmpq.costs.cost_model import LinkCost
from llmpq.devices.cluster import Cluster
from llmpq.planner.check.build_plan import build_plan
from llmpq.planner.check.check import check_plan, recomputed, used_inputs
from llmpq.planner.cli.what_if import changed_devices, with_added, without
from llmpq.planner.costs.cost_book import CostBook
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.methods import SolveOptions, solve
from llmpq.plans.plan import ClusterRef, ModelRef, Plan, StagePlan
from reference.random_problems import random_problem

pytestmark = pytest.mark.pure

BOX: dict[str, Any] = {
    "name": "x",
    "nodes": [
        {"name": "box", "devices": [{"kind": "RTX-3090", "count": 4}]},
        {"name": "other", "devices": [{"kind": "T4", "count": 1}]},
    ],
    "links": {
        "within_node": {"gbps": 64, "latency_us": 20},
        "between_nodes": {"gbps": 10, "latency_us": 50},
        "pairs": [
            {"between": ["RTX-3090-0", "box:1"], "gbps": 900, "latency_us": 5},
            {"between": ["RTX-3090-3", "box"], "gbps": 16, "latency_us": 30},
            {"between": ["other", "box:2"], "gbps": 25, "latency_us": 40},
        ],
    },
}


def _cluster(pairs: list[dict[str, Any]] | None = None) -> Cluster:
    data = copy.deepcopy(BOX)
    if pairs is not None:
        data["links"]["pairs"] = pairs
    return Cluster.parse_data(data, where="box.yaml")


def test_a_devices_own_link_comes_before_its_nodes() -> None:
    cluster = _cluster()
    devices = cluster.devices
    rates = [[int(cluster.link(a, b).gbps) for b in devices] for a in devices]
    assert rates[0][1:] == [900, 64, 16, 10]
    assert rates[1] == [900, 64, 64, 16, 10]
    assert rates[2] == [64, 64, 64, 16, 25]
    assert rates[4][:4] == [10, 10, 25, 10]
    assert cluster.link(devices[1], devices[0]).latency_us == 5


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (["box:0", "RTX-3090-0"], "[box:0, RTX-3090-0] is one device, expected two; name the"),
        (["box:7", "box"], "unknown node or device 'box:7': did you mean 'box'? known: box, other"),
        (["RTX-3090-1", "RTX-3090-0"], "[RTX-3090-1, RTX-3090-0] is given twice; leave one of"),
    ],
)
def test_wrong_ends_are_one_sentence(ends: list[str], message: str) -> None:
    pair = {"between": ends, "gbps": 1, "latency_us": 1}
    with pytest.raises(ValueError) as caught:
        _cluster([*BOX["links"]["pairs"], pair])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_node_called_like_a_device_is_not_guessed() -> None:
    data = copy.deepcopy(BOX)
    data["nodes"][1]["name"] = "RTX-3090-2"
    data["links"]["pairs"] = [{"between": ["RTX-3090-2", "box"], "gbps": 1, "latency_us": 1}]
    with pytest.raises(ValueError, match="'RTX-3090-2' is a node and a device"):
        Cluster.parse_data(data, where="box.yaml")


def test_the_own_link_of_two_devices_comes_before_a_profile_of_their_kinds() -> None:
    p = random_problem(random.Random(1), layers=(3, 3), kinds=(1, 1), devices=(3, 3))
    measured = LinkCost(source_kind="K0", target_kind="K0", alpha_s=0.5, beta_s_per_byte=0)
    book = CostBook(
        estimate=p.costs.estimate,
        profile=p.costs.estimate.model_copy(update={"links": (measured,)}),
    )
    data = p.cluster.model_dump(by_alias=True)
    data["links"]["pairs"] = [{"between": ["K0-0", "K0-2"], "gbps": 8, "latency_us": 0}]
    cluster = Cluster.parse_data(data, where="test")
    a, b, c = cluster.devices
    assert book.link(cluster, a, b).seconds(0) == 0.5
    assert book.link(cluster, c, a).seconds(10**9) == 1.0


def _problem(seed: int) -> Problem:
    """A few devices of one or two kinds with room for all, and one pair or slot unlike the rest."""
    rng = random.Random(seed)
    p = random_problem(rng, layers=(3, 4), kinds=(1, 2), devices=(2, 2), precisions=1, batch=4)
    data = p.cluster.model_dump(by_alias=True)
    for node in data["nodes"]:
        for group in node["devices"]:
            group["memory"] = 2**34
            group["spec"]["memory"] = 2**34
    data["links"]["within_node"] = {"gbps": 0.3, "latency_us": 50}
    names = [d.name for d in p.cluster.devices]
    ends = rng.sample(names, 2) if rng.random() < 0.6 else [rng.choice(names), "node-0"]
    data["links"]["pairs"] = [
        {"between": ends, "gbps": rng.choice([0.001, 100]), "latency_us": rng.choice([1, 900])}
    ]
    return p.with_changes(cluster=Cluster.parse_data(data, where="test"), theta=0.0)


def _every_order(p: Problem) -> float:
    """Return the least time over every order of single devices, written out device by device."""
    best, layers, precision = float("inf"), p.spec.num_layers, p.choices[0]
    for count in range(1, min(len(p.cluster.devices), layers) + 1):
        for order in itertools.permutations(p.cluster.devices, count):
            stages = [(device, (precision,)) for device in order]
            inputs = used_inputs(p.spec, p.cluster, p.costs, p.workload, stages)
            for cuts in itertools.combinations(range(1, layers), count - 1):
                for eta, xi in p.pairs:
                    plan = _plan(p, [d.name for d in order], (0, *cuts, layers), (eta, xi))
                    best = min(best, recomputed(plan, inputs).total_s)
    return best


def _plan(p: Problem, names: list[str], bounds: tuple[int, ...], pair: tuple[int, int]) -> Plan:
    stages = [
        StagePlan(
            device=name, node="n", kind="K", profile_kind="K", layers=(low, high),
            precisions=(p.choices[0],) * (high - low),
        )
        for name, low, high in zip(names, bounds, bounds[1:], strict=False)
    ]  # fmt: skip
    return Plan(
        model=ModelRef(name="m", num_layers=p.spec.num_layers, fingerprint="f"),
        cluster=ClusterRef(name="c", fingerprint="f"),
        workload=p.workload,
        prefill_microbatch=pair[0],
        decode_microbatch=pair[1],
        stages=tuple(stages),
    )


def test_the_exact_plan_is_the_best_over_every_order_of_single_devices() -> None:
    several = 0
    for seed in (0, 3, 4, 10, 12, 15, 16, 23, 25, 28):
        p = _problem(seed)
        found = solve(p, SolveOptions(method="exact"))
        assert found.value == pytest.approx(_every_order(p), rel=1e-6), f"seed {seed}"
        plan = build_plan(p, found)
        check_plan(plan, spec=p.spec, cluster=p.cluster, costs=p.costs)
        several += len(plan.stages) > 1
    assert several >= 5


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("-box", ["T4-0"]),
        ("-other", [f"RTX-3090-{i}" for i in range(4)]),
        ("-RTX-3090:3", ["RTX-3090-0", "T4-0"]),
        ("-box:1", [*(f"RTX-3090-{i}" for i in range(3)), "T4-0"]),
    ],
)
def test_what_if_a_machine_is_gone(change: str, left: list[str]) -> None:
    cluster = Cluster.parse_data({"schema": 1, **BOX}, where="test")
    _, less = changed_devices(PlanRequest(), cluster, change)
    assert less is not None and [device.name for device in less.devices] == left


def test_what_if_takes_links_along() -> None:
    """The pair of the first and the third device stays theirs when the second is removed."""
    p = random_problem(random.Random(1), layers=(3, 3), kinds=(2, 2), devices=(3, 3))
    data = p.cluster.model_dump(by_alias=True)
    data["links"]["pairs"] = [
        {"between": ["node-0:0", "K0-2"], "gbps": 7, "latency_us": 0},
        {"between": ["K0-1", "K1-0"], "gbps": 9, "latency_us": 0},
    ]
    p = p.with_changes(cluster=Cluster.parse_data(data, where="test"))
    less, names = without(p.cluster, p.cluster.device("K0-1"))
    assert (names["K0-0"], names["K0-2"], names["K1-0"]) == ("K0-0", "K0-1", "K1-0")
    first, third = less.devices[:2]
    assert less.link(first, third).gbps == 7 and len(less.links.pairs) == 1
    more = with_added(p.cluster, "K0")
    assert [more.link(more.devices[i], more.devices[2]).gbps for i in (0, 3)] == [7, 800]
    assert len(without(p.cluster, p.cluster.device("K0-0"))[0].links.pairs) == 1
