"""Devices that share stages in tensor parallel, as plans see them."""

from __future__ import annotations

import json

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.devices.joined_devices import crowded_notes, group_of, joined, one_group
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main as planner
from llmpq.plans.member_memory import member_memory, planned_shape
from llmpq.plans.plan import Plan


def cluster_of(*devices: dict[str, object]) -> Cluster:
    nodes = [{"name": "box", "devices": list(devices)}]
    return Cluster.parse_data({"name": "test", "nodes": nodes}, where="test")


def test_even_groups_are_of_devices_that_are_alike():
    spec = ModelSpec.by_name("opt-1.3b")
    cluster = cluster_of({"kind": "A100-80GB", "count": 3}, {"kind": "T4", "count": 2})
    whole = joined(cluster, (1, 1), spec)
    assert [[one.name for one in d.joined] for d in whole.devices] == [
        ["A100-80GB-0", "A100-80GB-1"],
        [],
        ["T4-0", "T4-1"],
    ]
    pair, alone = whole.devices[0], cluster.devices[0]
    assert pair.spec.mem_gbps == 2 * alone.spec.mem_gbps
    assert pair.spec.fp16_tflops == 2 * alone.spec.fp16_tflops
    assert pair.limit_bytes == 2 * alone.limit_bytes
    assert len({d.kind for d in whole.devices}) == 3
    (only,) = one_group(cluster, 2, spec).devices
    assert [one.name for one in only.joined] == ["A100-80GB-0", "A100-80GB-1"]


def test_unlike_devices_are_as_fast_as_their_shares_let_them():
    spec = ModelSpec.by_name("opt-1.3b")
    cluster = cluster_of({"kind": "RTX-5090"}, {"kind": "RTX-3090", "count": 2})
    (group,) = joined(cluster, (2, 1, 1), spec).devices
    large, small = cluster.devices[0].spec, cluster.devices[1].spec
    assert group.spec.mem_gbps == 4 * min(large.mem_gbps / 2, small.mem_gbps)
    assert group.shares == (2, 1, 1) and group.kind.endswith("(2:1:1)")


def test_devices_that_are_left_over_keep_their_places():
    spec = ModelSpec.by_name("opt-1.3b")
    cluster = cluster_of({"kind": "RTX-3090", "count": 2}, {"kind": "RTX-4090"})
    whole = joined(cluster, (1, 1), spec)
    assert [(d.name, d.index) for d in whole.devices] == [("2 x RTX-3090-0", 0), ("RTX-4090-0", 2)]
    assert whole.fingerprint() == cluster.fingerprint()
    again = group_of(whole, ("RTX-3090-0", "RTX-3090-1"), (1, 1), spec)
    assert again == whole.devices[0]


def test_a_group_goes_as_fast_as_the_parts_of_its_layers_let_it():
    """Attention and MLP each take as long as the device that takes longest over its part."""
    spec = ModelSpec.by_name("qwen3-8b")
    cluster = cluster_of({"kind": "RTX-5090"}, {"kind": "RTX-3090", "count": 2})
    rates = {}
    for shares in ((2, 1, 1), (5, 4, 4), (5, 1, 1)):
        (group,) = joined(cluster, shares, spec).devices
        rates[shares] = group.spec.mem_gbps
    small, large = cluster.devices[1].spec.mem_gbps, cluster.devices[0].spec.mem_gbps
    assert rates[2, 1, 1] > max(rates[5, 4, 4], rates[5, 1, 1])
    assert all(rate < large + 2 * small for rate in rates.values())


def test_a_cpu_is_divided():
    spec = ModelSpec.by_name("opt-1.3b")
    cluster = cluster_of({"kind": "CPU", "threads": 8, "memory": "32GiB"})
    (group,) = joined(cluster, (3, 1), spec).devices
    assert [one.threads for one in group.joined] == [6, 2] and group.threads == 8


@pytest.mark.parametrize(
    ("threads", "shares", "has"),
    [
        (2, (1, 1, 1, 1), "4 processes share CPU-0, which has 2 threads"),
        (1, (1, 1), "2 processes share CPU-0, which has 1 thread"),
        (3, (5, 1, 1), "3 processes share CPU-0, which has 3 threads"),
        (2, (1, 1), None),
        (8, (3, 1), None),
    ],
)
def test_more_processes_than_a_cpu_has_threads_are_said(threads, shares, has):
    spec = ModelSpec.by_name("opt-1.3b")
    cluster = cluster_of({"kind": "CPU", "threads": threads, "memory": "32GiB"})
    notes = crowded_notes(joined(cluster, shares, spec))
    assert [has in note for note in notes] == ([] if has is None else [True]), notes


def test_too_few_devices_are_refused():
    spec = ModelSpec.by_name("opt-1.3b")
    cluster = cluster_of({"kind": "A100-80GB"}, {"kind": "T4"})
    with pytest.raises(ValueError, match="as many devices of one node that are .*such as 3:1$"):
        joined(cluster, (1, 1), spec)
    with pytest.raises(ValueError, match="tensor parallel of 3 needs as many .*; take fewer$"):
        joined(cluster, (2, 1, 1), spec)


@pytest.mark.parametrize(
    ("model", "devices", "shares", "names"),
    [
        ("llama-3.1-8b", "4090:2", "2", ["RTX-4090-0", "RTX-4090-1"]),
        ("qwen3-14b", "5090,3090:2", "2:1:1", ["RTX-5090-0", "RTX-3090-0", "RTX-3090-1"]),
        ("mixtral-8x7b", "3090:4", "3:1", ["RTX-3090-0", "RTX-3090-1"]),
    ],
)
def test_a_plan_of_groups_says_what_each_device_holds(
    tmp_path, capsys, model, devices, shares, names
):
    path = tmp_path / "plan.json"
    words = ["--model", model, "--devices", devices, "--tensor-parallel", shares]
    assert planner([*words, "--engines", "1", "--batch", "1", "-o", str(path)]) == 0
    plan, spec = Plan.load(path), ModelSpec.by_name(model)
    assert [place.device for place in plan.places][: len(names)] == names
    for worker in plan.workers:
        memory, place = worker.place.memory, worker.place
        assert memory is not None and memory.total_bytes <= memory.limit_bytes
        shape = planned_shape(plan, worker.stage, None, on_gpu=True)
        own = member_memory(plan, worker, spec, shape)
        assert memory.weights_bytes == own.weights_bytes and memory.kv_bytes == own.kv_bytes
        assert place.kind in place.device
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in names), said
    assert planner(["check", str(path)]) == 0
    assert planner(["check", str(path), "--devices", devices]) == 0  # the same cluster
    one = tmp_path / "one.json"
    words[3] = devices.replace(":2", "").replace(":4", "").partition(",")[0]
    if planner([*words[:4], "--engines", "1", "--batch", "1", "-o", str(one)]) == 0:
        layer = Plan.load(one).stages[0]
        shared = plan.stages[0]
        assert shared.decode_s is not None and layer.decode_s is not None
        assert shared.decode_s < layer.decode_s or layer.precisions != shared.precisions


def test_sums_take_time(tmp_path):
    """A slow link between the devices makes every layer of a group slower."""
    seconds = []
    for latency_us in (5, 500):
        cluster = {
            "name": "box",
            "nodes": [{"name": "box", "devices": [{"kind": "A100-80GB", "count": 2}]}],
            "links": {"within_node": {"gbps": 400, "latency_us": latency_us}},
        }
        path, out = tmp_path / "c.yaml", tmp_path / "plan.json"
        path.write_text(json.dumps(cluster))
        words = ["--model", "llama-3.1-8b", "--cluster", str(path), "--tensor-parallel", "2"]
        assert planner([*words, "--bits", "16", "--engines", "1", "-o", str(out)]) == 0
        seconds.append(Plan.load(out).stages[0].decode_s)
    assert seconds[1] - seconds[0] == pytest.approx(32 * 2 * 495e-6, rel=0.01)


@pytest.mark.parametrize("text", ["2x", "0", "1:0", "", "3:-1"])
def test_shares_that_are_none_are_refused(text, capsys):
    words = ["--model", "opt-1.3b", "--devices", "4090:2", f"--tensor-parallel={text}"]
    assert planner(words) == 2
    assert "--tensor-parallel must be a number of devices" in capsys.readouterr().err
