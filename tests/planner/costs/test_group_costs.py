"""Shared stages of measured devices: costs put together from parts of layers and from sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmpq.costs.cost_model import (
    CostModel,
    LatencyEntry,
    Phase,
    Regime,
    Shares,
    SumCost,
    new_tokens,
)
from llmpq.devices.cluster import Cluster
from llmpq.devices.joined_devices import default_shares, group_kinds, together, weight_parts
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member
from llmpq.planner.costs.group_costs import group_entries, has_parts
from llmpq.planner.costs.sum_times import estimated_sum
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.device_groups import with_groups
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.topologies import FoundTopology, best_topology
from llmpq.planner.solving.topology_search import KnownPipeline
from llmpq.precision import Precision

pytestmark = pytest.mark.pure

SPEC = ModelSpec.by_name("llama-3.1-8b")
EVEN2, EVEN4 = (1, 1), (1, 1, 1, 1)


def fraction(shares: Shares, index: int = 0) -> float:
    """What a member has of a layer's weights."""
    return sum(weight_parts(Member(spec=SPEC, shares=shares, index=index).own)) / sum(
        weight_parts(SPEC)
    )


def profile_of(
    of_kind: dict[str, Callable[[float], float]],
    shares: tuple[Shares, ...] = ((), EVEN2, EVEN4),
    *,
    sum_s: float | None = 20e-6,
    groups: tuple[tuple[str, ...], ...] = (),
) -> CostModel:
    """A profile in which a part takes what a function of its share of the weights says."""
    entries = []
    for kind, seconds in of_kind.items():
        common = {"device_kind": kind, "dtype": "bfloat16", "source": "profile", "padding": "gpu"}
        for own in shares:
            part = fraction(own) if own else 1.0
            regime = Regime(terms={"1": seconds(part)})
            entries += [
                LatencyEntry.model_validate(
                    common
                    | {
                        "part": "layer",
                        "phase": phase,
                        "precision": Precision.W16A16,
                        "shares": own,
                        "regimes": (regime,),
                    }
                )
                for phase in (Phase.PREFILL, Phase.DECODE)
            ]
        entries += [
            LatencyEntry.model_validate(
                common
                | {
                    "part": part,
                    "phase": phase,
                    "precision": Precision.W16A16,
                    "regimes": (Regime(terms={"1": 1e-4}),),
                }
            )
            for part in ("embedding", "head")
            for phase in (Phase.PREFILL, Phase.DECODE)
        ]
    kinds = tuple(of_kind)
    groups = groups or ((kinds[0],) * 2, (kinds[0], kinds[-1]))
    times = () if sum_s is None else ((8192.0, sum_s), (2.0**20, 11 * sum_s))
    return CostModel(
        model=SPEC.name,
        model_fingerprint=SPEC.fingerprint(),
        entries=tuple(entries),
        sums=tuple(SumCost(kinds=tuple(sorted(one)), times=times) for one in groups if times),
    )


def cluster_of(devices: list[dict[str, object]]) -> Cluster:
    data = {"name": "box", "nodes": [{"name": "box", "devices": devices}]}
    return Cluster.parse_data(data, where="test")


TWO = cluster_of([{"kind": "A100-80GB", "count": 2}])
UNLIKE = cluster_of([{"kind": "A100-80GB"}, {"kind": "L40S"}])


def layer_s(profile: CostModel, cluster: Cluster, shares: Shares, rows: int = 1) -> float:
    """What a decode step takes in a layer of the group of a cluster's devices."""
    group = together(cluster.devices, shares, cluster, SPEC)
    (entry,) = (
        one
        for one in group_entries(profile, group, SPEC)
        if one.part == "layer" and one.phase is Phase.DECODE
    )
    assert entry.source == "profile" and entry.device_kind == group.profile_kind
    return entry.seconds(v=rows, length=1)


def linear(part: float) -> float:
    return 1e-4 + 1e-3 * part


def test_a_part_that_was_timed_is_taken_as_it_is_and_sums_are_added() -> None:
    profile = profile_of({"A100-80GB": linear})
    assert layer_s(profile, TWO, EVEN2) == pytest.approx(linear(fraction(EVEN2)) + 2 * 20e-6)
    # 128 rows of 4,096 channels are a MiB: the last point of the sums.
    assert layer_s(profile, TWO, EVEN2, rows=128) == pytest.approx(
        linear(fraction(EVEN2)) + 2 * 220e-6
    )


@pytest.mark.parametrize("shares", [(3, 1), (5, 3), (7, 1)])
def test_uneven_parts_are_between_those_that_were_timed(shares: Shares) -> None:
    """On a GPU up to the whole layer; the larger share of alike devices decides."""
    profile = profile_of({"A100-80GB": linear})
    assert layer_s(profile, TWO, shares) == pytest.approx(linear(fraction(shares)) + 40e-6)


def test_a_step_between_two_parts_is_neither_of_them() -> None:
    """A layer that takes twice as long from half of it on: 5:3 is a quarter of the way."""
    steep = profile_of({"A100-80GB": lambda part: 1e-3 if part < 0.6 else 2e-3})
    assert 1e-3 < layer_s(steep, TWO, (5, 3)) < 1.5e-3


def test_without_a_whole_layer_a_larger_part_is_in_proportion_and_a_smaller_one_as_the_least() -> (
    None
):
    profile = profile_of({"A100-80GB": linear}, ((), EVEN2))
    on_cpu = profile.model_copy(
        update={
            "entries": tuple(one.model_copy(update={"padding": "cpu"}) for one in profile.entries)
        }
    )
    half, most = fraction(EVEN2), fraction((7, 1))
    assert layer_s(on_cpu, TWO, (7, 1)) == pytest.approx(linear(half) * most / half + 40e-6)
    slow = profile_of({"A100-80GB": linear, "L40S": lambda part: 3 * linear(part)}, ((), EVEN2))
    # The smaller part on the slower device: no less than half a layer takes there.
    assert layer_s(slow, UNLIKE, (7, 1)) >= 3 * linear(half)


def test_of_unlike_devices_the_slower_part_decides() -> None:
    shares = ((), EVEN2, EVEN4, (1,) * 8, (3, 1))
    profile = profile_of({"A100-80GB": linear, "L40S": lambda part: 2 * linear(part)}, shares)
    even = layer_s(profile, UNLIKE, EVEN2)
    assert even == pytest.approx(2 * linear(fraction(EVEN2)) + 40e-6)
    uneven = layer_s(profile, UNLIKE, (3, 1))
    own = linear(fraction((3, 1))), 2 * linear(fraction((3, 1), 1))
    assert max(own) + 40e-6 <= uneven * (1 + 1e-9) and uneven < even


def test_parts_that_were_not_timed_are_not_made_up() -> None:
    group = together(TWO.devices, EVEN2, TWO, SPEC)
    assert has_parts(profile_of({"A100-80GB": linear}), group, SPEC)
    assert not has_parts(profile_of({"A100-80GB": linear}, ((),)), group, SPEC)
    unlike = together(UNLIKE.devices, EVEN2, UNLIKE, SPEC)
    assert not has_parts(profile_of({"A100-80GB": linear}), unlike, SPEC)


def linked(gbps: float) -> Cluster:
    """Two cards whose link the cluster says."""
    link = {"gbps": gbps, "latency_us": 20}
    nodes = [{"name": "box", "devices": [{"kind": "A100-80GB", "count": 2}]}]
    data = {"name": "box", "nodes": nodes, "links": {"within_node": link}}
    return Cluster.parse_data(data, where="test")


@pytest.mark.parametrize(
    ("measured_gbps", "gbps", "taken"),
    [
        (None, 128, True),
        (None, 2400, True),
        (2400, 128, False),
        (2400, 1200, True),
        (2400, 64, True),  # what a cluster that says nothing has
        (256, 128, True),
        (256, 2400, False),
    ],
)
def test_sums_of_another_machine_are_taken_over_links_like_its_own(
    measured_gbps: float | None, gbps: float, taken: bool
) -> None:
    """Else they are estimated by the link of the cluster, and so are the group's times."""
    profile = profile_of({"A100-80GB": linear})
    sums = tuple(one.model_copy(update={"gbps": measured_gbps}) for one in profile.sums)
    profile = profile.model_copy(update={"sums": sums})
    cluster = linked(gbps)
    group = together(cluster.devices, EVEN2, cluster, SPEC)
    layers = [one for one in group_entries(profile, group, SPEC) if one.part == "layer"]
    for entry in layers:
        assert entry.source == ("profile" if taken else "estimated")
        times = sums[0].times if taken else estimated_sum(group, entry.phase)
        tokens = new_tokens(entry.phase, v=1, length=1, padding="gpu")
        sum_s = Regime(terms={}, curve=times).curve_s(tokens * SPEC.hidden * 2)
        assert entry.seconds(v=1, length=1) == pytest.approx(linear(fraction(EVEN2)) + 2 * sum_s)
    assert len(layers) == 2


def test_sums_that_were_not_timed_are_of_the_link(tmp_path: Path) -> None:
    profile = profile_of({"A100-80GB": linear}, sum_s=None)
    found = found_with(tmp_path, profile, "a100-80gb:2")
    assert (found.groups, found.groups_measured) == (1, 0)
    (engine,) = found.engines
    assert any(not isinstance(place, str) for place in engine.places)
    _, notes = problem_with(tmp_path, profile, "a100-80gb:2")
    assert not any("have no times of stages" in note for note in notes)


def problem_with(
    tmp_path: Path, profile: CostModel, devices: str, **more: object
) -> tuple[Problem, list[str]]:
    path = tmp_path / "costs.json"
    profile.save_json(path)
    request = PlanRequest(
        model=SPEC.name, devices=devices, costs=str(path), batch=1, bits="16", **more
    )
    problem, _, notes = make_problem(request)
    return problem, notes


def found_with(tmp_path: Path, profile: CostModel, devices: str) -> FoundTopology:
    problem, _ = problem_with(tmp_path, profile, devices)
    return best_topology(problem, SolveOptions(), KnownPipeline())


@pytest.mark.parametrize(("sum_s", "shares"), [(20e-6, True), (3e-3, False)])
def test_a_shared_stage_is_found_or_not_by_measured_sums(
    tmp_path: Path, sum_s: float, shares: bool
) -> None:
    found = found_with(tmp_path, profile_of({"A100-80GB": linear}, sum_s=sum_s), "a100-80gb:2")
    assert found.groups == found.groups_measured == 1
    (engine,) = found.engines
    assert any(not isinstance(place, str) for place in engine.places) == shares


def test_estimated_and_measured_devices_share_no_stage(tmp_path: Path) -> None:
    profile = profile_of({"A100-80GB": linear})
    problem, notes = problem_with(tmp_path, profile, "a100-80gb:2,3090:2")
    grouped = with_groups(problem, (problem.kv,))
    assert grouped is not None
    kinds = {
        tuple(sorted({one.kind for one in device.joined}))
        for device in grouped.problem.cluster.devices
        if device.joined
    }
    assert kinds == {("A100-80GB",), ("RTX-3090",)}
    assert not any("have no times of stages" in note for note in notes)


def test_costs_without_parts_say_what_measures_them(tmp_path: Path) -> None:
    old = profile_of({"A100-80GB": linear}, ((),), sum_s=None)
    problem, notes = problem_with(tmp_path, old, "a100-80gb:4")
    assert with_groups(problem, (problem.kv,)) is None
    (note,) = (note for note in notes if "have no times of stages" in note)
    assert "A100-80GB" in note and "llmpq-profile --tensor-parallel 2,4 " in note
    _, notes = problem_with(tmp_path, old, "a100-80gb:4", tensor_parallel="1")
    assert not any("have no times of stages" in note for note in notes)


def test_shares_that_the_search_may_take_are_timed() -> None:
    assert default_shares(TWO.devices) == [EVEN2]
    three = cluster_of([{"kind": "T4", "count": 3}])
    assert default_shares(three.devices) == [EVEN2, (1, 1, 1)]
    assert default_shares(UNLIKE.devices) == [EVEN2, EVEN4, (1,) * 8, (3, 1)]
    assert default_shares(cluster_of([{"kind": "T4"}]).devices) == []
    assert group_kinds(UNLIKE.devices) == [("A100-80GB", "L40S")]
    assert group_kinds(three.devices) == [("T4", "T4"), ("T4", "T4", "T4")]
