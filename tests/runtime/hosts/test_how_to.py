"""Two hosts: every command of docs/how-to/several-machines.md, then stages where a plan says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmpq.runtime.cli.main import main

pytestmark = [pytest.mark.cluster, pytest.mark.hosts, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/how-to/several-machines.md"
MODULES = {
    "llmpq-dist": "llmpq.runtime",
    "llmpq-algo": "llmpq.planner",
    "llmpq-profile": "llmpq.profiler",
    "ray": "ray.scripts.scripts",
}
FEW_SHAPES = ["--bits", "16", "--max-batch", "4", "--max-len", "48"]
"""Of a profile, whose numbers are not looked at here."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)


def translated(text: str, demo_model: Path) -> str:
    """Return the page's text with this bed's addresses and the demo model."""
    text = text.replace("192.168.1.10", "10.77.0.1").replace("192.168.1.20", "10.77.0.2")
    return re.sub(r"\bDIR\b", str(demo_model), text)


def commands(block: str) -> tuple[dict[str, str], list[list[str]]]:
    """Return what a block exports, and its commands as words."""
    exported: dict[str, str] = {}
    found = []
    for line in block.strip().splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "export":
            exported |= dict(word.split("=", 1) for word in words[1:])
        else:
            found.append(words)
    return exported, found


@pytest.fixture(scope="module")
def bed(make_bed, demo_model, tmp_path_factory) -> Iterator:
    """Two hosts whose own names are 127.0.1.1, a Ray node in each: started as the page says."""
    folder = tmp_path_factory.mktemp("start")
    _, first, second, *_ = (translated(block, demo_model) for block in blocks("sh"))
    with make_bed(["hosta", "hostb"]) as two:
        box, server = two.hosts
        for host, block in ((box, first), (server, second)):
            exported, starts = commands(block)
            for words in starts:
                run(two, host, words, folder, exported)
            shutil.copy(box.home / ".ray/auth_token", server.home / ".ray/auth_token")
        yield two


def run(bed, host, words: list[str], folder: Path, exported: dict[str, str]):
    small = bed.small(host) if words[:2] == ["ray", "start"] else []
    small += [f"--labels=rack={host.name}"] if small else []
    small += FEW_SHAPES if words[0] == "llmpq-profile" else []
    variables = [f"{name}={value}" for name, value in exported.items()]
    command = ("env", *variables, sys.executable, "-m", MODULES[words[0]], *words[1:], *small)
    done = host.run(*command, folder=folder)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def page(demo_model, tmp_path) -> tuple[str, list[list[str]]]:
    """Write the files that the page has; return its look at both hosts, and its job's commands."""
    install, _, _, look, job = (translated(b, demo_model) for b in blocks("sh"))
    extra = re.fullmatch(r"pip install -c constraints.txt -e '.\[(\w+)\]'", install.strip())
    assert extra is not None and f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text()
    (described,) = blocks("yaml")
    shown = [line for line in (ROOT / "docs/clusters/two-machines.yaml").read_text().splitlines()]
    assert described.splitlines() == [line for line in shown if not line.startswith("#")]
    (tmp_path / "two-machines.yaml").write_text(translated(described, demo_model))
    rows = [json.dumps({"prompt": text}) for text in ("import os\n", "def ", "class A")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return look, commands(job)[1]


EXPORTED = {"RAY_AUTH_MODE": "token"}


def test_both_hosts_of_the_page_are_measured_and_planned_for(bed, page, tmp_path):
    for words in page[1]:
        if words[0] != "llmpq-dist":
            run(bed, bed.hosts[0], words, tmp_path, EXPORTED)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["stages"] and {s["node"] for s in plan["stages"]} <= {"box", "server"}
    costs = json.loads((tmp_path / "costs.json").read_text())
    ways = {(link["source"], link["target"]) for link in costs["node_links"]}
    assert ways == {("box", "server"), ("server", "box")}


# On one host: test_two_nodes.py and test_from_ray.py; a plan that runs over two: below.
@pytest.mark.seldom
def test_other_commands_of_the_page_run(bed, page, demo_model, make_plan, tmp_path):
    look, job = page
    box, _ = bed.hosts
    (doctor,) = commands(look)[1]
    assert "hostb" in run(bed, box, doctor, tmp_path, EXPORTED).stdout
    nodes = {"box": "host: 10.77.0.1, ", "server": "host: 10.77.0.2, "}
    write(tmp_path, nodes, make_plan, demo_model, keep=True)
    for words in job:
        if words[0] == "llmpq-dist":
            run(bed, box, words, tmp_path, EXPORTED)
    answered = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["error"] for answer in answered] == [None] * 3
    inline = re.search(r"`(llmpq-dist run --model DIR --ray-address [^`]*)`", PAGE.read_text())
    assert inline is not None
    words = shlex.split(translated(inline[1].replace("\n", " "), demo_model))
    words[words.index("answers.jsonl")] = "others.jsonl"
    run(bed, box, words, tmp_path, EXPORTED)
    others = [json.loads(line) for line in (tmp_path / "others.jsonl").read_text().splitlines()]
    assert [answer["error"] for answer in others] == [None] * 3


CPU = "devices: [{kind: CPU, threads: 1}]"
PROMPTS = tuple(f"def f{row}(" for row in range(12))
TOKENS = 48


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
    from llmpq.devices.cluster import Cluster
    from llmpq.plans.plan import ClusterRef
    from llmpq.plans.plan_nodes import node_plans

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
        # A name that Debian's hosts file puts on 127.0.1.1, and an address. By name and by address
        # hosts are found below, too.
        pytest.param(
            {"a": "host: hosta, ", "b": "host: 10.77.0.2, "},
            False,
            ("--cluster", "cluster.yaml"),
            [A, B],
            marks=pytest.mark.seldom,
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
    joined = ("--ray-address", bed.address, "--deadlines", "wait_nodes=4")
    done = bed.hosts[0].dist(*COMMAND, *joined, folder=tmp_path)
    assert done.returncode == 6
    assert len([line for line in done.stderr.splitlines() if "starting" not in line]) == 2
    waiting, end = [line for line in done.stderr.splitlines() if "is missing" in line]
    assert "the plan's node 'b' (host 10.77.0.9; CPU-1) is missing" in end
    assert "hosta at 10.77.0.1" in end and "hostb at 10.77.0.2" in end
    assert waiting.startswith("waiting up to ") and "(waited 4 s, --deadlines wait_nodes)" in end
