"""Plans over two hosts: every stage where the plan says, what is shown is what is so."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.hosts, pytest.mark.timeout(1200)]

CPU = "devices: [{kind: CPU, threads: 1}]"
PROMPTS = ("import os\n", "def ", "class A", "x = ")


@pytest.fixture(scope="module")
def bed(make_bed, tmp_path_factory) -> Iterator:
    """Two hosts whose own names are 127.0.1.1, a Ray node in each."""
    with make_bed(["hosta", "hostb"]) as two:
        for host in two.hosts:
            two.start_ray(host, f"--labels=rack={host.name}")
        yield two


@pytest.fixture(scope="module")
def expected(make_plan, demo_model, tmp_path_factory) -> list:
    """What one host's stages answer."""
    folder = tmp_path_factory.mktemp("alone")
    make_plan(demo_model, splits=(4,)).save_json(folder / "plan.json")
    return run(None, folder)[1]


def write(folder: Path, nodes: dict[str, str], make_plan, demo_model, *, keep: bool) -> None:
    """Write cluster.yaml with these nodes, and a plan over them that keeps them or does not."""
    from llmpq.cluster import Cluster
    from llmpq.plan import ClusterRef
    from llmpq.plan_nodes import node_plans

    text = "".join(f"  - {{name: {n}, {said}{CPU}}}\n" for n, said in nodes.items())
    (folder / "cluster.yaml").write_text(f"schema: 1\nname: two\nnodes:\n{text}")
    cluster = Cluster.load(folder / "cluster.yaml")
    plan = make_plan(demo_model, splits=(4,))
    change = {
        "stages": tuple(
            stage.model_copy(update={"node": name})
            for stage, name in zip(plan.stages, nodes, strict=True)
        ),
        "cluster": ClusterRef(name=cluster.name, fingerprint=cluster.fingerprint()),
        "nodes": node_plans(cluster, set(nodes)) if keep else (),
    }
    plan.model_copy(update=change).save_json(folder / "plan.json")


def run(host, folder: Path, *words: object):
    """Run the folder's plan; return the process, its answers and where its stages were."""
    import subprocess

    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (folder / "in.jsonl").write_text(rows)
    command = ["run", "--plan", "plan.json", "-i", "in.jsonl", "-o", "out.jsonl",
               "--report", "report.json", *words]  # fmt: skip
    if host is None:
        done = subprocess.run(
            [sys.executable, "-m", "llmpq.runtime", *command, "--backend", "threads"],
            cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
    else:
        done = host.dist(*command, folder=folder)
    if done.returncode:
        return done, None, None
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    stages = json.loads((folder / "report.json").read_text())["stages"]
    places = [(stage.get("host"), stage.get("address")) for stage in stages]
    return done, [(line["text"], line["tokens"]) for line in lines], places


A, B = ("hosta", "10.77.0.1"), ("hostb", "10.77.0.2")


@pytest.mark.parametrize(
    ("nodes", "keep", "flags", "places"),
    [
        # A name that Debian's hosts file puts on 127.0.1.1, and an address.
        ({"a": "host: hosta, ", "b": "host: 10.77.0.2, "}, False, ("--cluster",), [A, B]),
        # The plan alone, its first stage on the other host.
        ({"b": "host: hostb, ", "a": "host: hosta, "}, True, (), [B, A]),
        # Labels that are the other way round than the names.
        (
            {"hosta": "labels: {rack: hostb}, ", "hostb": "labels: {rack: hosta}, "},
            True,
            (),
            [B, A],
        ),
        # Two nodes of one kind of which nothing is said.
        ({"one": "", "two": ""}, True, ("--network-interface", "eth0"), None),
    ],
    ids=["names", "plan alone", "labels", "kinds"],
)  # fmt: skip
def test_stages_run_where_the_plan_says(
    bed, tmp_path, make_plan, demo_model, expected, nodes, keep, flags, places
):
    write(tmp_path, nodes, make_plan, demo_model, keep=keep)
    flags = ("--cluster", "cluster.yaml") if flags == ("--cluster",) else flags
    done, answers, where = run(bed.hosts[0], tmp_path, "--ray-address", bed.address, *flags)
    assert done.returncode == 0, done.stderr
    assert answers == expected
    assert sorted(where) == [A, B] if places is None else where == places
    for (host, address), name in zip(where, nodes, strict=True):
        assert f"on {name} ({host}: {address}" in done.stderr


def test_what_is_missing_is_one_sentence_before_anything_loads(
    bed, tmp_path, make_plan, demo_model
):
    nodes = {"a": "host: hosta, ", "b": "host: 10.77.0.9, "}
    write(tmp_path, nodes, make_plan, demo_model, keep=True)
    where = ("--ray-address", bed.address, "--wait-nodes")
    done, _, _ = run(bed.hosts[0], tmp_path, *where, "0")
    assert done.returncode == 6
    (last,) = [line for line in done.stderr.splitlines() if "starting" not in line]
    assert "the plan's node 'b' (host 10.77.0.9; CPU-1) is missing" in last
    assert "hosta at 10.77.0.1" in last and "hostb at 10.77.0.2" in last
    done, _, _ = run(bed.hosts[0], tmp_path, *where, "8")
    assert done.returncode == 6
    waiting, end = [line for line in done.stderr.splitlines() if "is missing" in line]
    assert waiting.startswith("waiting up to ") and "(waited 8 s, --wait-nodes)" in end
