"""Plans over two hosts: every stage where the plan says, what is shown is what is so."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmpq.runtime.cli.main import main

pytestmark = [pytest.mark.cluster, pytest.mark.hosts, pytest.mark.timeout(1200)]

CPU = "devices: [{kind: CPU, threads: 1}]"
PROMPTS = tuple(f"def f{row}(" for row in range(12))
TOKENS = 48


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
    make_plan(demo_model, splits=(4,), gen_len=TOKENS).save_json(folder / "plan.json")
    ask(folder)
    words = [f"{folder}/{word}" if "." in word else word for word in COMMAND]
    assert main([*words, "--backend", "threads"]) == 0
    return answers(folder)


def write(folder: Path, nodes: dict[str, str], make_plan, demo_model, *, keep: bool) -> None:
    """Write cluster.yaml with these nodes, and a plan over them that keeps them or does not."""
    from llmpq.cluster import Cluster
    from llmpq.plan import ClusterRef
    from llmpq.plan_nodes import node_plans

    text = "".join(f"  - {{name: {n}, {said}{CPU}}}\n" for n, said in nodes.items())
    (folder / "cluster.yaml").write_text(f"schema: 1\nname: two\nnodes:\n{text}")
    cluster = Cluster.load(folder / "cluster.yaml")
    plan = make_plan(demo_model, splits=(4,), gen_len=TOKENS)
    change = {
        "stages": tuple(
            stage.model_copy(update={"node": name})
            for stage, name in zip(plan.stages, nodes, strict=True)
        ),
        "cluster": ClusterRef(name=cluster.name, fingerprint=cluster.fingerprint()),
        "nodes": node_plans(cluster, set(nodes)) if keep else (),
    }
    plan.model_copy(update=change).save_json(folder / "plan.json")


COMMAND = ["run", "--plan", "plan.json", "-i", "in.jsonl", "-o", "out.jsonl",
           "--report", "report.json", "--ignore-eos"]  # fmt: skip


def ask(folder: Path) -> None:
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (folder / "in.jsonl").write_text(rows)


def answers(folder: Path) -> list:
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return [(line["text"], line["tokens"]) for line in lines]


def places(folder: Path) -> list:
    """Return where the stages were."""
    stages = json.loads((folder / "report.json").read_text())["stages"]
    return [(stage.get("host"), stage.get("address")) for stage in stages]


def out_for_five_seconds(bed, host, process, folder: Path) -> None:
    """Pull a host's cable once the first answer is there, and put it back."""
    out, end_s = folder / "out.jsonl", time.monotonic() + 400
    while not out.exists() or not out.read_text().count("\n"):
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.1)
    assert out.read_text().count("\n") < len(PROMPTS), "it is still at work"
    bed.pull(host)
    time.sleep(5)
    bed.plug_in(host)


A, B = ("hosta", "10.77.0.1"), ("hostb", "10.77.0.2")


@pytest.mark.parametrize(
    ("nodes", "keep", "flags", "where"),
    [
        # A name that Debian's hosts file puts on 127.0.1.1, and an address.
        (
            {"a": "host: hosta, ", "b": "host: 10.77.0.2, "},
            False,
            ("--cluster", "cluster.yaml"),
            [A, B],
        ),
        # Labels that are the other way round than the names; the plan alone.
        (
            {"hosta": "labels: {rack: hostb}, ", "hostb": "labels: {rack: hosta}, "},
            True,
            ("--network-interface", "eth0"),
            [B, A],
        ),
    ],
    ids=["names", "labels"],
)
def test_stages_run_where_the_plan_says_and_a_cable_may_be_out_for_five_seconds(
    bed, tmp_path, make_plan, demo_model, expected, nodes, keep, flags, where
):
    write(tmp_path, nodes, make_plan, demo_model, keep=keep)
    ask(tmp_path)
    command = (sys.executable, "-m", "llmpq.runtime", *COMMAND, "--ray-address", bed.address)
    process = bed.hosts[0].start(*command, *flags, folder=tmp_path)
    if keep:
        out_for_five_seconds(bed, bed.hosts[1], process, tmp_path)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert answers(tmp_path) == expected and places(tmp_path) == where
    for (host, address), name in zip(where, nodes, strict=True):
        assert f"on {name} ({host}: {address}" in said


def test_what_is_missing_is_one_sentence_before_anything_loads(
    bed, tmp_path, make_plan, demo_model
):
    nodes = {"a": "host: hosta, ", "b": "host: 10.77.0.9, "}
    write(tmp_path, nodes, make_plan, demo_model, keep=True)
    ask(tmp_path)
    joined = ("--ray-address", bed.address, "--wait-nodes", "4")
    done = bed.hosts[0].dist(*COMMAND, *joined, folder=tmp_path)
    assert done.returncode == 6
    assert len([line for line in done.stderr.splitlines() if "starting" not in line]) == 2
    waiting, end = [line for line in done.stderr.splitlines() if "is missing" in line]
    assert "the plan's node 'b' (host 10.77.0.9; CPU-1) is missing" in end
    assert "hosta at 10.77.0.1" in end and "hostb at 10.77.0.2" in end
    assert waiting.startswith("waiting up to ") and "(waited 4 s, --wait-nodes)" in end
