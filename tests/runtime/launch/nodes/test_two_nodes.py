"""Two Ray nodes on this machine: stages go where their node's labels say, over `--address`."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llmpq.devices.cluster import Cluster
from llmpq.plans.plan import ClusterRef
from llmpq.plans.topology import EngineShare, Topology

pytestmark = pytest.mark.cluster
CLUSTER = """
schema: 1
name: two-nodes
nodes:
  - {name: here, devices: [{kind: CPU, threads: 1}], labels: {place: here}}
  - {name: there, devices: [{kind: CPU, threads: 1}], labels: {place: there},
     model_dir: copy}
"""
LIMIT_S = 150
NOT_ASKED = ("--include-dashboard=false", "--no-monitor")
"""Programs of Ray's head that nobody here talks to."""
LOCKED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
JOB = ("--strat_file_name", "plan.json", "-i", "in.jsonl", "-o", "out.jsonl")


def ray(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", *map(str, arguments)]
    environment = os.environ | LOCKED | {"RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_agent_register_timeout_ms": "60000", "RAY_worker_niceness": "0"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
    )


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """Start two nodes that want a token; end what they started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = {process.pid for process in psutil.process_iter()}
    common = ("--num-cpus=1", "--node-ip-address=127.0.0.1", "--object-store-memory=80000000",
              "--include-log-monitor=false")  # fmt: skip
    folder = Path("/tmp") / f"llmpq-{port}"
    head = ("--head", f"--port={port}", f"--temp-dir={folder}", *NOT_ASKED)
    ray("start", *head, "--labels=place=here", *common)
    try:
        ray("start", f"--address=127.0.0.1:{port}", "--labels=place=there", *common)
        yield f"127.0.0.1:{port}"
    finally:
        for process in psutil.process_iter(["cmdline"]):
            mine = any(str(folder) in word for word in process.info["cmdline"] or ())
            if process.pid not in before and mine:
                process.kill()


@pytest.fixture
def files(tmp_path, make_plan, demo_model) -> Path:
    """Write the cluster, a plan over both nodes, and two prompts."""
    copy = tmp_path / "copy"
    copy.symlink_to(demo_model)
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("copy", str(copy)))
    cluster = Cluster.load(tmp_path / "cluster.yaml")
    plan = make_plan(demo_model, splits=(4,))
    nodes = zip(plan.stages, ("there", "here"), strict=True)
    stages = tuple(stage.model_copy(update={"node": node}) for stage, node in nodes)
    ref = ClusterRef(name=cluster.name, fingerprint=cluster.fingerprint())
    plan.model_copy(update={"stages": stages, "cluster": ref}).save_json(tmp_path / "plan.json")
    (tmp_path / "in.jsonl").write_text('{"prompt": "import os\\n"}\n{"prompt": "def "}\n')
    return tmp_path


def dist(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmpq.runtime", *map(str, arguments)]
    environment = os.environ | LOCKED
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False,
        timeout=LIMIT_S,
    )  # fmt: skip


def test_stages_run_on_the_nodes_their_plan_names(address, files):
    where = ("--cluster", "cluster.yaml", "--address", address)
    done = dist(files, "run", *JOB, *where)
    assert done.returncode == 0, done.stderr
    assert "CPU-0 on there" in done.stderr and "CPU-1 on here" in done.stderr
    rows = [json.loads(line) for line in (files / "out.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == [None, None]


def stages_of(address: str) -> list[psutil.Process]:
    """Return the stages of a Ray: its raylets have the number of its port in their folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("RemoteStageWorker" in word for word in process.info["cmdline"] or ()):
            parent = process.parent()
            words = [] if parent is None else parent.cmdline()
            if any(f"llmpq-{address.rpartition(':')[2]}" in word for word in words):
                found.append(process)
    return found


def test_rows_of_a_driver_that_is_killed_go_on_with_resume(address, files):
    rows = [
        {"prompt": [5 + n, 7, 9], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        for n in range(200)
    ]
    (files / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = ("run", *JOB, "--cluster", "cluster.yaml", "--address", address)
    command = [sys.executable, "-m", "llmpq.runtime", *job]
    with subprocess.Popen(command, cwd=files, env=os.environ | LOCKED) as driver:
        end_s = time.monotonic() + LIMIT_S
        output = files / "out.jsonl"
        while not (output.exists() and output.read_text().count("\n") > 3):
            assert driver.poll() is None and time.monotonic() < end_s
            time.sleep(0.02)
        stages = stages_of(address)
        driver.kill()
    finished = [json.loads(line)["index"] for line in output.read_text().splitlines()]
    assert len(stages) == 2 and 3 < len(finished) < len(rows)
    assert psutil.wait_procs(stages, timeout=60)[1] == [], "stages end with their driver"
    done = dist(files, *job, "--resume")
    assert done.returncode == 0, done.stderr
    whole = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["index"] for row in whole] == list(range(len(rows)))
    assert all(len(row["tokens"]) == 16 for row in whole)


def test_engines_on_both_nodes_are_served_behind_one_port(address, files, make_plan, demo_model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port = free.getsockname()[1]
    cluster = Cluster.load(files / "cluster.yaml")
    ref = ClusterRef(name=cluster.name, fingerprint=cluster.fingerprint())
    shares = []
    for number, node in enumerate(("there", "here")):
        plan = make_plan(demo_model)
        place = {"node": node, "device": f"CPU-{number}"}
        stages = (plan.stages[0].model_copy(update=place),)
        plan = plan.model_copy(update={"stages": stages, "cluster": ref})
        shares.append(EngineShare(rows=4, plan=plan))
    work = shares[0].plan.workload.model_copy(update={"batch": 8})
    Topology(engines=tuple(shares), workload=work).save_json(files / "both.json")
    words = ("serve", "--plan", "both.json", "--cluster", "cluster.yaml", "--port", free_port)
    alone = dist(files, *words)
    assert alone.returncode == 2 and "--ray-address HOST:PORT" in alone.stderr
    command = [sys.executable, "-m", "llmpq.runtime", *map(str, words), "--ray-address", address]
    url, body = f"http://127.0.0.1:{free_port}", {"prompt": "def ", "max_tokens": 8}
    with subprocess.Popen(command, cwd=files, env=os.environ | LOCKED) as server:
        try:
            end_s = time.monotonic() + LIMIT_S
            while not _answers(f"{url}/ready"):
                assert server.poll() is None and time.monotonic() < end_s
                time.sleep(0.3)
            parents = {process.parent().pid for process in stages_of(address)}
            assert len(parents) == 2, "a stage on each node"
            for number in range(6):
                asked = urllib.request.Request(
                    f"{url}/v1/completions",
                    json.dumps(body | {"prompt": f"def f{number}"}).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
                    assert json.load(answer)["usage"]["completion_tokens"] > 0
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0
    assert psutil.wait_procs(stages_of(address), timeout=60)[1] == []


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_the_preflight_looks_at_both_nodes(address, files):
    where = ("--cluster", "cluster.yaml", "--address", address)
    done = dist(files, "check", "plan.json", *where, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["places"]) == 2


def test_a_node_without_its_copy_of_the_model_is_named(address, files):
    (files / "copy").unlink()
    where = ("--cluster", "cluster.yaml", "--address", address)
    done = dist(files, "check", "plan.json", *where)
    assert done.returncode == 2
    assert "stage CPU-0 on there" in done.stderr and f"{files}/copy" in done.stderr


def test_a_node_with_another_model_is_named_before_anything_loads(address, files, demo_model):
    (files / "copy").unlink()
    (files / "copy").mkdir()
    for file in demo_model.iterdir():
        (files / "copy" / file.name).symlink_to(file)
    config = json.loads((demo_model / "config.json").read_text())
    (files / "copy/config.json").unlink()
    (files / "copy/config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    done = dist(files, "run", *JOB, "--cluster", "cluster.yaml", "--address", address)
    assert done.returncode == 4, done.stderr
    (last,) = [line for line in done.stderr.splitlines() if "another model" in line]
    assert "'rope_theta'" in last and "12345.0" in last and "--copy-weights" in last
    assert (files / "out.jsonl").read_text() == ""


def test_a_node_that_is_not_there_is_named(address, files):
    text = (files / "cluster.yaml").read_text()
    (files / "cluster.yaml").write_text(text.replace("place: there", "place: nowhere"))
    where = ("--cluster", "cluster.yaml", "--address", address)
    done = dist(files, "check", "plan.json", *where, "--deadlines", "wait_nodes=0")
    assert done.returncode == 6
    assert "node 'there' (labels place=nowhere; CPU-0) is missing" in done.stderr
    assert "Ray has 2: " in done.stderr and "labels place=here" in done.stderr


def test_the_doctor_looks_at_the_nodes_of_a_ray(address, tmp_path):
    done = dist(tmp_path, "doctor", "--json", "--ray-address", address)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["nodes"]) == 1, "both Ray nodes are this machine"
    assert len(report["links"]) == 1 and report["links"][0]["latency_us"] > 0
