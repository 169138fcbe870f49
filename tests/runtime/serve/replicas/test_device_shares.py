"""Which devices each of several engines gets."""

from __future__ import annotations

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.runtime.serve.replicas import device_shares
from llmpq.runtime.serve.replicas.device_shares import gpus_of_copies, shares_of

pytestmark = pytest.mark.pure
MIXED = [{"kind": "RTX-3090", "count": 2}, {"kind": "T4"}, {"kind": "CPU", "threads": 2}]


def cluster(*nodes: list[dict]) -> Cluster:
    each = [{"name": f"n{i}", "devices": devices} for i, devices in enumerate(nodes)]
    return Cluster.parse_data({"schema": 1, "name": "c", "nodes": each}, where="test")


@pytest.mark.parametrize(
    ("replicas", "kinds", "gpus"),
    [
        (1, [["RTX-3090", "RTX-3090", "T4", "CPU"]], [(0, 1, 2)]),
        (2, [["RTX-3090", "RTX-3090"], ["T4", "CPU"]], [(0, 1), (2,)]),
        (3, [["RTX-3090", "RTX-3090"], ["T4"], ["CPU"]], [(0, 1), (2,), ()]),
    ],
)
def test_devices_are_dealt_out_in_order_the_first_share_gets_what_is_over(replicas, kinds, gpus):
    shares = shares_of(cluster(MIXED), replicas)
    assert [[d.kind for d in share.cluster.devices] for share in shares] == kinds
    assert [share.gpus for share in shares] == gpus
    assert all(d.index == i for s in shares for i, d in enumerate(s.cluster.devices))
    whole = {(d.kind, d.memory_bytes, d.threads) for d in cluster(MIXED).devices}
    assert {(d.kind, d.memory_bytes, d.threads) for s in shares for d in s.cluster.devices} == whole


def test_one_cpu_is_divided_by_threads_and_memory(monkeypatch):
    monkeypatch.setattr(device_shares.os, "sched_getaffinity", lambda _: range(4), raising=False)
    (first, second) = shares_of(cluster([{"kind": "CPU", "threads": 3, "memory": "8 GiB"}]), 2)
    assert first == second and first.gpus == ()
    (cpu,) = first.cluster.devices
    assert (cpu.threads, cpu.memory_bytes) == (1, 4 * 2**30)
    with pytest.raises(ValueError, match="--replicas 5 needs as many cores, this machine has 4"):
        shares_of(cluster([{"kind": "CPU", "threads": 3}]), 5)


def test_too_few_devices_and_several_machines_are_refused():
    with pytest.raises(ValueError, match="--replicas 5 needs as many devices, got 4"):
        shares_of(cluster(MIXED), 5)
    with pytest.raises(ValueError, match="the devices of one machine, got 2 nodes"):
        shares_of(cluster(MIXED, MIXED), 2)


def test_links_of_single_devices_are_left_out_of_shares():
    data = cluster(MIXED).model_dump(mode="json", by_alias=True)
    data["links"]["pairs"] = [{"between": ["n0:0", "n0:2"], "gbps": 1, "latency_us": 1}]
    shares = shares_of(Cluster.parse_data(data, where="test"), 2)
    assert [share.cluster.links.pairs for share in shares] == [(), ()]


def test_copies_of_a_plan_get_gpus_of_their_own(demo_model, make_plan, monkeypatch):
    monkeypatch.setattr(device_shares.os, "sched_getaffinity", lambda _: range(2), raising=False)
    plan = make_plan(demo_model, (3,))
    assert gpus_of_copies(plan, 2, 0) == [(), ()]
    with pytest.raises(ValueError, match="--replicas 3 needs as many cores"):
        gpus_of_copies(plan, 3, 0)
    on_gpus = tuple(
        stage.model_copy(update={"kind": "T4", "threads": None, "device_index": i})
        for i, stage in enumerate(plan.stages)
    )
    plan = plan.model_copy(update={"stages": on_gpus})
    assert gpus_of_copies(plan, 2, 4) == [(0, 1), (2, 3)]
    with pytest.raises(ValueError, match="for 2 GPUs need 6, this machine has 5"):
        gpus_of_copies(plan, 3, 5)
    split = (on_gpus[0], on_gpus[1].model_copy(update={"node": "other"}))
    with pytest.raises(ValueError, match="one of 2 nodes"):
        gpus_of_copies(plan.model_copy(update={"stages": split}), 1, 8)
