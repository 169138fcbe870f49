"""Bundles on nodes that leave the Ray while they are reserved."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from llmpq.errors import StageLostError
from llmpq.plans.plan import NodePlan
from llmpq.runtime.launch.nodes.node_match import RayNode
from llmpq.runtime.launch.on_ray import placement

pytestmark = pytest.mark.cpu

HERE = RayNode(id="here", address="10.0.0.1", hostname="hosta", is_here=True)
FORMER = RayNode(id="former", address="10.0.0.2", hostname="hostb")
NEW = RayNode(id="new", address="10.0.0.2", hostname="hostb")


@dataclass
class FakeRay:
    """Two hosts, of which the second has joined again; groups with its former node never end."""

    looks_until_dead: int
    asked: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def alive_nodes(self) -> list[RayNode]:
        self.looks_until_dead -= 1
        return [HERE, FORMER, NEW] if self.looks_until_dead >= 0 else [HERE, NEW]

    def placement_group(self, bundles, strategy, bundle_label_selector):
        (selector,) = bundle_label_selector
        self.asked.append(selector[placement.NODE_ID])
        return FakeGroup(self.asked[-1])

    def remove(self, group) -> None:
        self.removed.append(group.node)


@dataclass
class FakeGroup:
    """A bundle, which the former node never gives."""

    node: str

    def wait(self, timeout_seconds: float) -> bool:
        return self.node != "former"


@pytest.fixture
def reserve(monkeypatch, make_plan, demo_model):
    """Return a call of `reserve` for a plan over both hosts."""
    plan = make_plan(demo_model, splits=(4,))
    stages = zip(plan.stages, "ab", strict=True)
    nodes = (NodePlan(name="a", host="10.0.0.1"), NodePlan(name="b", host="10.0.0.2"))
    plan = plan.model_copy(
        update={"stages": tuple(s.model_copy(update={"node": n}) for s, n in stages),
                "nodes": nodes}
    )  # fmt: skip

    def call(ray: FakeRay, timeout_s: float, **held):
        monkeypatch.setattr(placement, "alive_nodes", ray.alive_nodes)
        monkeypatch.setattr(placement, "placement_group", ray.placement_group)
        monkeypatch.setattr(placement, "remove_placement_group", ray.remove)
        monkeypatch.setattr(placement, "local_addresses", lambda: ["10.0.0.1"])
        monkeypatch.setattr(placement, "_offered", lambda: "CPU: 2 free of 2")
        return placement.reserve(plan, None, joined=True, wait_s=0.0, timeout_s=timeout_s, **held)

    return call


def test_the_successor_of_a_node_that_is_found_dead_is_taken(reserve):
    ray = FakeRay(looks_until_dead=3)
    found = reserve(ray, 60.0)
    assert ray.asked == ["here", "former", "here", "new"] and ray.removed == ["here", "former"]
    assert {index: own.node.id for index, own in found.items()} == {0: "here", 1: "new"}


def test_nodes_that_stay_and_have_no_room_are_a_sentence(reserve):
    ray = FakeRay(looks_until_dead=10**9)
    with pytest.raises(StageLostError, match="2 stages could not be placed within 0 s.*hostb"):
        reserve(ray, 0.05)
    assert ray.removed == ["here", "former"]


def test_bundles_of_stages_that_go_on_are_theirs(reserve):
    ray = FakeRay(looks_until_dead=0)
    found = reserve(ray, 60.0, held={0: HERE})
    assert ray.asked == ["new"] and list(found) == [1]
    assert reserve(ray, 60.0, held={0: HERE, 1: NEW}) == {}


def test_a_stage_that_goes_on_on_a_node_that_has_left_does_not_choose_it(reserve):
    ray = FakeRay(looks_until_dead=0)
    assert reserve(ray, 60.0, held={0: FORMER})[1].node is NEW
