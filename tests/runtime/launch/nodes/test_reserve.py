"""Bundles on nodes that leave the Ray while they are reserved."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from llmpq.errors import StageLostError
from llmpq.plan import NodePlan
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
    asked: list[list[str]]
    removed: int = 0

    def alive_nodes(self) -> list[RayNode]:
        self.looks_until_dead -= 1
        return [HERE, FORMER, NEW] if self.looks_until_dead >= 0 else [HERE, NEW]

    def placement_group(self, bundles, strategy, bundle_label_selector):
        self.asked.append([one[placement.NODE_ID] for one in bundle_label_selector])
        return self

    def wait(self, timeout_seconds: float) -> bool:
        return "former" not in self.asked[-1]

    def remove(self, group) -> None:
        self.removed += 1


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

    def call(ray: FakeRay, timeout_s: float):
        monkeypatch.setattr(placement, "alive_nodes", ray.alive_nodes)
        monkeypatch.setattr(placement, "placement_group", ray.placement_group)
        monkeypatch.setattr(placement, "remove_placement_group", ray.remove)
        monkeypatch.setattr(placement, "local_addresses", lambda: ["10.0.0.1"])
        monkeypatch.setattr(placement, "_offered", lambda: "CPU: 2 free of 2")
        return placement.reserve(plan, None, joined=True, wait_s=0.0, timeout_s=timeout_s)

    return call


def test_the_successor_of_a_node_that_is_found_dead_is_taken(reserve):
    ray = FakeRay(looks_until_dead=3, asked=[])
    found = reserve(ray, 60.0)
    assert ray.asked == [["here", "former"], ["here", "new"]] and ray.removed == 1
    assert [node.id for node in found.nodes] == ["here", "new"]


def test_nodes_that_stay_and_have_no_room_are_a_sentence(reserve):
    ray = FakeRay(looks_until_dead=10**9, asked=[])
    with pytest.raises(StageLostError, match="2 stages could not be placed within 0 s.*hostb"):
        reserve(ray, 0.05)
    assert ray.removed == 1
