"""Hosts with two networks: links are measured, and stages talk, over the one that is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmpq.plans.plan import NodePlan

pytestmark = [pytest.mark.hosts_long, pytest.mark.timeout(900)]

CLUSTER = """
schema: 1
name: two
nodes:
  - {name: a, host: 10.77.0.1, devices: [{kind: CPU, threads: 1, memory: 2 GiB}]}
  - {name: b, host: 10.77.0.2, devices: [{kind: CPU, threads: 1, memory: 2 GiB}]}
"""
SECOND = ("eth1", "10.78.0.{index}")


@pytest.fixture(scope="module")
def bed(make_bed) -> Iterator:
    """Two hosts that are joined by a second cable, without the switch."""
    with make_bed(["hosta", "hostb"]) as two:
        first, other = two.hosts
        name, address = SECOND
        cable = ("link", "add", name, "type", "veth", "peer", "name", name, "netns", other.pid)
        command = ("nsenter", "-t", first.pid, "-n", "ip", *cable)
        subprocess.run([str(word) for word in command], check=True)
        for index, host in enumerate(two.hosts, 1):
            for words in (f"addr add {address.format(index=index)}/24 dev {name}",
                          f"link set {name} up"):  # fmt: skip
                host.run("ip", *words.split(), check=True)
            two.start_ray(host)
        yield two


@pytest.fixture
def folder(tmp_path, make_plan, demo_model) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    plan = make_plan(demo_model, splits=(4,))
    stages = zip(plan.stages, "ab", strict=True)
    change = {
        "stages": tuple(stage.model_copy(update={"node": name}) for stage, name in stages),
        "nodes": (NodePlan(name="a", host="10.77.0.1"), NodePlan(name="b", host="10.77.0.2")),
    }
    plan.model_copy(update=change).save_json(tmp_path / "plan.json")
    (tmp_path / "in.jsonl").write_text('{"prompt": "import os"}\n{"prompt": "def "}\n')
    return tmp_path


def bytes_over(host, interface: str) -> int:
    """Return the bytes that a host has sent over an interface (proc(5), net/dev)."""
    lines = host.run("cat", "/proc/net/dev", check=True).stdout.splitlines()
    (counts,) = [line.split(":")[1].split() for line in lines if interface in line]
    return int(counts[8])


def test_a_run_talks_over_the_interface_that_is_asked_for(bed, folder):
    job = ("run", "--plan", "plan.json", "-i", "in.jsonl", "-o", "out.jsonl")
    before = bytes_over(bed.hosts[0], "eth1")
    done = bed.hosts[0].dist(
        *job, "--ray-address", bed.address, "--network-interface", "a=eth1,b=eth1", folder=folder
    )
    assert done.returncode == 0, done.stderr
    assert bytes_over(bed.hosts[0], "eth1") - before > 2000


def test_links_are_measured_over_the_interface_that_is_asked_for(bed, folder, demo_model):
    command = (sys.executable, "-m", "llmpq.profiler", "--model", demo_model, "--cluster",
               "cluster.yaml", "--ray-address", bed.address, "--quick", "--bits", "16",
               "-o", "costs.json")  # fmt: skip
    before = bytes_over(bed.hosts[0], "eth1")
    done = bed.hosts[0].run(*command, "--network-interface", "eth1", folder=folder)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((folder / "costs.json").read_text())["node_links"]) == 2
    assert bytes_over(bed.hosts[0], "eth1") - before > 1 << 20
    done = bed.hosts[0].run(*command, "--network-interface", "eth7", folder=folder)
    assert done.returncode == 2, done.stderr
    (last,) = [line for line in done.stderr.splitlines() if "eth7" in line]
    assert "host hosta has no such interface" in last and "eth1 (10.78.0.1)" in last
