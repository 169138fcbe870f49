"""Which host times which kinds of device, for `llmpq-profile --ray-address`."""

from __future__ import annotations

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.profiler.__main__ import main
from llmpq.profiler.cli.run_hosts import hosts_of_kinds

pytestmark = pytest.mark.cpu


def test_every_kind_is_timed_once_where_most_others_are():
    cluster = Cluster.parse_data(
        {
            "name": "three",
            "nodes": [
                {"name": "a", "accelerators": "T4:2"},
                {"name": "b", "devices": [{"kind": "T4"}, {"kind": "V100-32GB"}]},
                {"name": "c", "devices": [{"kind": "CPU", "threads": 4}, {"kind": "V100-32GB"}]},
            ],
        },
        where="test",
    )
    devices = cluster.devices
    found = hosts_of_kinds(devices, None)
    assert found == {"b": ["T4", "V100-32GB"], "c": ["CPU@4t"]}
    assert hosts_of_kinds(devices, "V100-32GB") == {"b": ["V100-32GB"]}
    assert hosts_of_kinds(devices, "CPU") == {"c": ["CPU@4t"]}
    assert hosts_of_kinds(devices, "CPU@4t") == {"c": ["CPU@4t"]}


def test_flags_of_one_host_are_refused_beside_a_ray(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("name: c\nnodes: [{name: a, accelerators: CPU:1}]\n")
    files = ["--cluster", str(tmp_path / "c.yaml"), "-o", str(tmp_path / "costs.json")]
    words = ["--model", "opt-1.3b", *files, "--wait-nodes", "3"]
    assert main(words) == 2 and "add --ray-address" in capsys.readouterr().err
    words = ["--model", "opt-1.3b", *files, "--ray-address", "127.0.0.1:1"]
    assert main([*words, "--samples", str(tmp_path / "s.jsonl")]) == 2
    assert "--samples names a file of one host" in capsys.readouterr().err
