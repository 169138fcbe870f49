"""Which Ray node a node of a plan is, and what is said where there is none."""

from __future__ import annotations

import pytest

from llmpq.plans.plan import NodePlan, StagePlan
from llmpq.precision import Precision
from llmpq.runtime.launch.nodes.node_match import (
    RayNode,
    Unmatched,
    WantedNode,
    match_nodes,
    plain_address,
    ray_nodes,
)

pytestmark = pytest.mark.pure

LOCAL = ("127.0.0.1", "::1", "10.0.0.1")


def node(number: int, *, host: str = "", kinds: str = "", here: bool = False, **labels: str):
    """Return Ray's node at 10.0.0.NUMBER; `kinds`: one word a GPU."""
    words = kinds.split()
    return RayNode(
        id=f"id{number}",
        address=f"10.0.0.{number}" if number < 100 else f"fd00::{number}",
        hostname=host or f"host{number}",
        labels=labels,
        num_gpus=len(words),
        gpu_kinds=frozenset(words),
        is_here=here,
    )


def want(
    name: str, host: str | None = None, *, at: tuple[str, ...] = (), kinds="CPU", **labels: str
):
    """Return a plan's node with a stage on each of the kinds."""
    stages = tuple(
        StagePlan(
            device=f"{kind}-{index}", node=name, kind=kind, profile_kind=kind,
            threads=1 if kind == "CPU" else None, layers=(index, index + 1),
            precisions=(Precision.W16A16,),
        )
        for index, kind in enumerate(kinds.split())
    )  # fmt: skip
    described = NodePlan(name=name, host=host, labels=labels)
    return WantedNode(node=described, addresses=frozenset(at), stages=stages)


def names(wanted, nodes) -> dict[str, str]:
    return {name: found.id for name, found in match_nodes(wanted, nodes, LOCAL).items()}


@pytest.mark.parametrize(
    ("host", "at"),
    [
        ("10.0.0.2", ()),
        ("host2", ()),
        ("HOST2", ()),
        ("box.example", ("10.0.0.2",)),
        ("box.example", ("10.9.9.9", "10.0.0.2")),
        ("::ffff:10.0.0.2", ()),
    ],
)
def test_a_host_is_an_address_or_a_name_that_ray_or_this_machine_knows(host, at):
    nodes = [node(1, here=True), node(2), node(3)]
    assert names([want("b", host, at=at)], nodes) == {"b": "id2"}


def test_an_ipv6_host_is_found_however_it_is_written():
    nodes = [node(1, here=True), node(200)]
    for host in ("fd00::200", "[fd00::200]", "fd00:0:0:0:0:0:0:200", "fd00::0200%eth0"):
        assert names([want("b", host)], nodes) == {"b": "id200"}
    assert plain_address("[FD00::1%3]") == "fd00::1" and plain_address("Box") == "box"


def test_this_hosts_name_means_its_ray_node_wherever_the_hosts_file_puts_it():
    nodes = [node(1, host="other-name", here=True), node(2)]
    assert names([want("a", "hosta", at=("127.0.1.1",))], nodes) == {"a": "id1"}
    assert names([want("a", "hosta", at=("::1",))], nodes) == {"a": "id1"}


def test_another_hosts_name_is_that_host_although_this_hosts_file_puts_it_on_loopback():
    # A machine that was renamed or copied keeps its former name on 127.0.1.1.
    nodes = [node(1, here=True), node(2)]
    assert names([want("b", "host2", at=("127.0.1.1",))], nodes) == {"b": "id2"}
    with pytest.raises(Unmatched, match="no Ray node is it"):
        names([want("b", "host2", at=("127.0.1.1",), rack="x")], nodes)


def test_two_nodes_that_name_one_host_are_both_said():
    wanted = [want("a", "host1"), want("b", "10.0.0.1")]
    with pytest.raises(Unmatched, match=r"'b' \(host 10.0.0.1.* is another node .* \('a'\)"):
        names(wanted, [node(1, here=True), node(2)])


def test_two_nodes_alike_are_two_ray_nodes():
    nodes = [node(1, here=True), node(2)]
    assert set(names([want("a"), want("b")], nodes).values()) == {"id1", "id2"}
    # One that may be either makes room for one that may not.
    for order in ([want("a"), want("b", "10.0.0.1")], [want("b", "10.0.0.1"), want("a")]):
        assert names(order, nodes) == {"a": "id2", "b": "id1"}


def test_a_name_that_is_a_hosts_is_preferred():
    nodes = [node(1, host="b", here=True), node(2, host="a")]
    assert names([want("a"), want("b")], nodes) == {"a": "id2", "b": "id1"}


def test_labels_say_which_and_both_must_hold():
    nodes = [node(1, here=True, rack="x"), node(2, rack="y")]
    assert names([want("a", rack="y"), want("b", rack="x")], nodes) == {"a": "id2", "b": "id1"}
    with pytest.raises(Unmatched, match=r"host 10.0.0.1; labels rack=y; CPU-0\) is missing"):
        names([want("a", "10.0.0.1", rack="y")], nodes)


def test_without_host_and_labels_the_kind_of_devices_tells():
    nodes = [node(1, here=True), node(2, kinds="T4 T4"), node(3, kinds="V100-32GB")]
    wanted = [want("a", kinds="V100-32GB"), want("b", kinds="T4 T4"), want("c")]
    assert names(wanted, nodes) == {"a": "id3", "b": "id2", "c": "id1"}
    with pytest.raises(Unmatched, match=r"'a' \(T4-0, T4-1, T4-2\) is missing: no Ray node has 3"):
        names([want("a", kinds="T4 T4 T4")], nodes)


def test_cards_of_one_name_and_two_sizes_are_told_apart_by_the_stage():
    nodes = [node(1, kinds="A100-40GB")]
    assert names([want("a", kinds="A100-80GB")], nodes) == {"a": "id1"}


def test_a_named_node_with_another_card_is_refused_for_good():
    nodes = [node(1, here=True), node(2, kinds="T4")]
    with pytest.raises(Unmatched, match=r"needs 1 x V100-32GB, Ray's node is host2 at 10.0.0.2 \(1"
                       r" x T4\)") as refused:  # fmt: skip
        names([want("a", "10.0.0.2", kinds="V100-32GB")], nodes)
    assert refused.value.for_good


@pytest.mark.parametrize("missing", [want("b", "10.0.0.9"), want("b", rack="z"), want("b")])
def test_what_is_missing_and_what_there_is_is_one_sentence(missing):
    with pytest.raises(Unmatched) as refused:
        names([want("a", "10.0.0.1"), missing], [node(1, here=True)])
    text = str(refused.value)
    assert "the plan's node 'b'" in text and "Ray has 1: host1 at 10.0.0.1 (CPU only)" in text
    assert "ray start --address HOST:PORT" in text and not refused.value.for_good


def test_rays_own_description_is_read():
    described = [
        {
            "NodeID": "n2", "Alive": True, "NodeManagerAddress": "10.0.0.2",
            "NodeManagerHostname": "two", "Labels": {"ray.io/node-id": "n2", "rack": "b"},
            "Resources": {"CPU": 4.0, "GPU": 2.0, "accelerator_type:T4": 1.0, "node:10.0.0.2": 1.0},
        },
        {"NodeID": "n3", "Alive": False},
        {
            "NodeID": "n1", "Alive": True, "NodeManagerAddress": "10.0.0.9",
            "NodeManagerHostname": "nine", "Labels": {}, "Resources": {"CPU": 4.0},
        },
    ]  # fmt: skip
    here, other = ray_nodes(described, "n1")
    assert here.is_here and here.id == "n1" and here.num_gpus == 0
    assert other.gpu_kinds == {"T4"} and other.num_gpus == 2
    assert other.shown() == "two at 10.0.0.2 (2 x T4, labels rack=b)"
