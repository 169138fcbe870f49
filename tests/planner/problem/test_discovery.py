"""Devices of this machine and of Ray, from what they report."""

from __future__ import annotations

import json

import pytest
import yaml

from llmpq.devices.cluster import Cluster
from llmpq.devices.this_machine import kind_of, parse_gpus
from llmpq.planner.__main__ import main
from llmpq.planner.problem import discovery
from llmpq.planner.problem.discovery import FoundDevices, cluster_of_nodes, cluster_yaml, grouped

pytestmark = pytest.mark.pure


def gpus(*cards: tuple[str, int | str]) -> list[FoundDevices]:
    """Return what is found where nvidia-smi lists these names and MiB."""
    lines = [
        f"{i}, GPU-{i}, {name}, {mib}, {mib}, 570.1, 8.0" for i, (name, mib) in enumerate(cards)
    ]
    return grouped(parse_gpus("\n".join(lines)))


@pytest.mark.parametrize(
    "reported, mib, kind",
    [
        ("NVIDIA H200", 143771, "H200"),
        ("Tesla T4", 15360, "T4"),
        ("Tesla V100-SXM2-16GB", 16384, "V100-16GB"),
        ("Tesla V100-SXM2-32GB", 32768, "V100-32GB"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-SXM"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX-4090"),
        ("NVIDIA RTX A6000", 49140, "RTX-A6000"),
        ("NVIDIA L4", 23034, "L4"),
        ("Quadro K2000", 2048, None),
    ],
)
def test_drivers_names_are_known(reported: str, mib: int, kind: str | None) -> None:
    assert kind_of(reported, mib * 2**20) == kind


def test_smi_lines_become_groups_and_a_cluster() -> None:
    found = gpus(("Tesla T4", 15360), ("Tesla T4", 15360), ("NVIDIA H200", 143771))
    assert [(f.kind, f.count) for f in found] == [("T4", 2), ("H200", 1)]
    text = cluster_yaml(found)
    cluster = Cluster.parse_data(yaml.safe_load(text), where="test")
    assert [d.name for d in cluster.devices] == ["T4-0", "T4-1", "H200-0"]
    assert cluster.devices[0].memory_bytes == 15360 * 2**20


def test_a_gpu_that_shares_the_hosts_memory_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gpus(("NVIDIA GB99", "[N/A]"), ("NVIDIA T4", "[N/A]"))
    assert [(f.kind, f.memory_bytes) for f in found] == [(None, None), ("T4", None)]
    cluster = Cluster.parse_data(yaml.safe_load(cluster_yaml(found)), where="test")
    assert [d.name for d in cluster.devices] == ["T4-0"], "its memory is the table's"
    monkeypatch.setattr(discovery, "local_devices", lambda: found)
    assert main(["devices"]) == 0
    assert capsys.readouterr().out == (
        "1 x NVIDIA GB99, memory not reported: not in the table: describe it with 'spec' in a "
        "cluster YAML\n"
        "1 x NVIDIA T4, memory not reported: T4\n"
    )


def test_ray_nodes_become_a_cluster() -> None:
    nodes = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.1",
         "Resources": {"GPU": 3.0, "CPU": 8.0, "accelerator_type:T4": 1.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.2",
         "Resources": {"GPU": 1.0, "accelerator_type:V100": 1.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.3",
         "Resources": {"CPU": 2.0, "memory": 8e9}},
        {"Alive": False, "NodeManagerAddress": "10.0.0.4", "Resources": {}},
    ]  # fmt: skip
    cluster = cluster_of_nodes(nodes)
    assert [d.kind for d in cluster.devices] == ["T4", "T4", "T4", "V100-32GB", "CPU"]
    assert [n.host for n in cluster.nodes] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    nodes[0]["Resources"] = {"GPU": 1.0, "accelerator_type:XPU9": 1.0}
    with pytest.raises(ValueError) as caught:
        cluster_of_nodes(nodes)
    assert str(caught.value) == (
        "node 10.0.0.1: GPU type ['XPU9'] is not in the table; write a cluster YAML with 'spec'"
    )


def test_a_dead_ray_address_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--from-ray", "127.0.0.1:1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("llmpq-algo: no Ray cluster at '127.0.0.1:1' (")
    assert err.endswith("; start one with: ray start --head, or give its address\n")


def test_devices_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--known", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["H200"]["mem_gbps"] == 4800 and len(known) >= 30
    for word, named in (
        ("4070", "RTX-4070"),
        ("rtx 4070 mobile", "RTX-4070-Laptop"),
        ("v100", "V100"),
    ):
        assert main(["devices", word, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert any(kind.startswith(named) for kind in found) and len(found) < len(known) / 2
    assert main(["devices", "40710"]) == 2
    assert "nearest: " in capsys.readouterr().err
    assert main(["devices", "4070", "--yaml"]) == 2
    assert "leave out --yaml" in capsys.readouterr().err
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["count"] >= 1
    assert main(["devices", "--yaml"]) == 0
    assert "nodes:" in capsys.readouterr().out
