"""What a CPU takes alone and beside others of its host: timed in turns, kept as one share."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from llmpq.costs.cost_model import LatencyEntry, Phase, Regime
from llmpq.devices.cluster import Cluster
from llmpq.planner.costs.cost_book import alone_kinds
from llmpq.precision import Precision
from llmpq.profiler.timing.cases import CaseTime, Conditions, Sample, Target, TimedCase
from llmpq.profiler.timing.profile_host import SHARE_ROUNDS, alone_share

pytestmark = pytest.mark.pure
TARGET = Target(device_kind="CPU@1t", part="layer", phase=Phase.DECODE, dtype="float32")


def timing(seconds: float) -> CaseTime:
    return CaseTime(seconds=seconds, low_s=seconds, high_s=seconds, repeats=5, layers=5)


def sample(v: int, seconds: float) -> Sample:
    return Sample(
        conditions=Conditions(model_fingerprint="m", machine="h", copies=1),
        case=TimedCase(target=TARGET, v=v, length=64),
        timing=timing(seconds),
    )


@dataclass
class FakeGroup:
    """Copies that take 25 % longer at once; the machine is twice as slow in every other round."""

    children: list[int] = field(default_factory=lambda: [0, 1])
    at_once: float = 1.25
    asked: list[tuple[int, bool]] = field(default_factory=list)

    def time(self, case: TimedCase, *, alone: bool = False, seconds: float | None = None) -> object:
        self.asked.append((case.v, alone))
        state = 1 + (len(self.asked) - 1) // 4 % 2
        return timing(state * 1e-3 * case.v * (1.0 if alone else self.at_once))


SAMPLES = [sample(4, 4e-3), sample(1, 1e-3), sample(16, 16e-3), sample(400, 0.4)]


def test_the_share_is_of_the_shortest_and_the_longest_step_that_is_not_too_long() -> None:
    group = FakeGroup()
    assert alone_share(group, SAMPLES) == pytest.approx(0.8)  # type: ignore[arg-type]
    assert {v for v, _ in group.asked} == {1, 16} and len(group.asked) == 4 * SHARE_ROUNDS


@pytest.mark.parametrize("group", [FakeGroup(children=[0]), FakeGroup(at_once=0.9)])
def test_it_is_one_where_others_take_nothing(group: FakeGroup) -> None:
    assert alone_share(group, SAMPLES) == 1.0  # type: ignore[arg-type]


def test_an_entry_has_both_times() -> None:
    entry = LatencyEntry(
        device_kind="CPU@1t", part="layer", phase=Phase.DECODE, precision=Precision.W16A16,
        dtype="float32", source="profile",
        regimes=(Regime(terms={"1": 1e-3, "v*(t+s)": 1e-6}, curve=((1, 0.0), (8, 4e-3))),),
    )  # fmt: skip
    alone_s = entry.seconds(v=4, length=100)
    both = entry.at_once(0.8)
    assert both.seconds(v=4, length=100) == pytest.approx(alone_s / 0.8)
    assert both.alone().seconds(v=4, length=100) == pytest.approx(alone_s)


def test_a_kind_is_alone_whose_devices_are_each_their_node_s_only_cpu() -> None:
    def cpu(threads: int, count: int = 1) -> dict[str, object]:
        return {"kind": "CPU", "threads": threads, "count": count, "memory": "8 GiB"}

    nodes = [
        {"name": "a", "devices": [cpu(2)]},
        {"name": "b", "devices": [cpu(4, 2), {"kind": "T4"}]},
        {"name": "c", "devices": [cpu(2), {"kind": "T4", "count": 2}]},
    ]
    cluster = Cluster.parse_data({"name": "some", "nodes": nodes}, where="test")
    assert alone_kinds(cluster.devices) == {"CPU@2t"}
    both = [*nodes, {"name": "d", "devices": [cpu(2), cpu(8)]}]
    cluster = Cluster.parse_data({"name": "some", "nodes": both}, where="test")
    assert alone_kinds(cluster.devices) == frozenset()
