"""Links that were measured between hosts: each direction, before those of kinds and of the file."""

from __future__ import annotations

import pytest

from llmpq.costs.cost_model import CostModel, LinkCost, NodeLinkCost
from llmpq.devices.cluster import Cluster
from llmpq.planner.costs.cost_book import CostBook

pytestmark = pytest.mark.pure

NOTHING = CostModel(model="m", model_fingerprint="f", entries=())


def cluster(pairs: tuple = ()) -> Cluster:
    nodes = [{"name": name, "accelerators": "CPU:1"} for name in ("a", "b", "c")]
    links = {"between_nodes": {"gbps": 1, "latency_us": 100}, "pairs": list(pairs)}
    return Cluster.parse_data({"name": "three", "nodes": nodes, "links": links}, where="test")


def measured(source: str, target: str, alpha_s: float, **more: float) -> NodeLinkCost:
    terms = {"occupied_s": 0.001, "beta_s_per_byte": 1e-8, **more}
    return NodeLinkCost(source=source, target=target, alpha_s=alpha_s, **terms)


def test_each_direction_has_its_own_terms_and_other_pairs_the_files():
    links = (measured("a", "b", 0.005), measured("b", "a", 0.007, beta_s_per_byte=2e-8))
    book = CostBook(estimate=NOTHING, profile=NOTHING.model_copy(update={"node_links": links}))
    three = cluster()
    a, b, c = three.devices
    there, back = book.link(three, a, b), book.link(three, b, a)
    assert (there.delay_s, there.handshake_s, there.per_byte_s) == (0.004, 0.001, 1e-8)
    assert back.delay_s == pytest.approx(0.006) and back.per_byte_s == 2e-8
    other = book.link(three, a, c)
    assert other.delay_s + other.handshake_s == pytest.approx(100e-6)


def test_hosts_come_before_kinds_and_a_link_the_file_gives_for_devices_before_both():
    kinds = LinkCost(
        source_kind="CPU@1t", target_kind="CPU@1t", same_node=False, alpha_s=0.5, beta_s_per_byte=1
    )
    profile = NOTHING.model_copy(
        update={"node_links": (measured("a", "b", 0.005),), "links": (kinds,)}
    )
    book, three = CostBook(estimate=NOTHING, profile=profile), cluster()
    a, b, c = three.devices
    assert book.link(three, a, b).seconds(0) == pytest.approx(0.005)
    assert book.link(three, a, c).seconds(0) == pytest.approx(0.5)
    own = cluster(({"between": ["CPU-0", "CPU-1"], "gbps": 1, "latency_us": 40},))
    a, b, _ = own.devices
    assert book.link(own, a, b).seconds(0) == pytest.approx(40e-6)


def test_merging_keeps_every_direction_and_the_newer_of_two():
    one = NOTHING.model_copy(update={"node_links": (measured("a", "b", 1), measured("b", "a", 2))})
    two = NOTHING.model_copy(update={"node_links": (measured("a", "b", 3),)})
    merged = one.merged(two)
    assert {(k.source, k.target): k.alpha_s for k in merged.node_links} == {
        ("a", "b"): 3,
        ("b", "a"): 2,
    }
