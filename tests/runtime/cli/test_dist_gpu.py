"""`llmpq-dist` with two stages, on one GPU and on two: the CPU's tokens, and every way to fail.

Where stages share a GPU, Ray gets two and leaves CUDA_VISIBLE_DEVICES alone. It counts the
words there and refuses to start with fewer; CUDA reads only what stands before a -1.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmpq.plans.plan import MemoryForm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ENVIRONMENT = os.environ | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
}
SHARED = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] + ",-1",
}
LIMIT_S = 90
TEXTS = ("import os\n", "def main(", "class A:", "for i in", "NAME\n", "x = [1, 2", "return")


@pytest.fixture(scope="module", params=["shared", "own"])
def address(request) -> Iterator[str]:
    """Start Ray with two names for one GPU, or with two GPUs; end it."""
    if request.param == "own" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    env = ENVIRONMENT | (SHARED if request.param == "shared" else {})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = f"/tmp/llmpq-{port}"
    words = f"start --head --port={port} --num-gpus=2 --num-cpus=2 --include-dashboard=false"
    words += f" --node-ip-address=127.0.0.1 --object-store-memory=80000000 --temp-dir={folder}"
    words += " --min-worker-port=0 --max-worker-port=0"  # any: several may run side by side
    command = [sys.executable, "-m", "ray.scripts.scripts", *words.split()]
    started = subprocess.run(command, env=env, timeout=LIMIT_S, capture_output=True, text=True)
    assert started.returncode == 0, started.stdout + started.stderr
    yield f"127.0.0.1:{port}"
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        if folder.encode() in entry.read_bytes():
            os.kill(int(entry.parent.name), signal.SIGKILL)


def on_gpus(plan, **changes):
    """Return a plan of CPU stages as one of GPU stages."""
    stages = tuple(
        stage.model_copy(
            update={"device": f"GPU-{i}", "kind": "H200", "profile_kind": "H200", "threads": None}
            | changes
        )
        for i, stage in enumerate(plan.stages)
    )
    return plan.model_copy(update={"stages": stages})


@pytest.fixture
def write(tmp_path, make_plan, demo_model):
    """Return a writer of plans over two GPU stages, and of prompts."""

    def make(*, on_gpu: bool = True, rows: int = 7, tokens: int = 40, **changes) -> Path:
        plan = make_plan(demo_model, (4,), batch=4, gen_len=400, prompt_len=16)
        path = tmp_path / ("plan.json" if on_gpu else "cpu.json")
        (on_gpus(plan, **changes) if on_gpu else plan).save_json(path)
        lines = [
            json.dumps({"prompt": TEXTS[i % len(TEXTS)], "max_tokens": tokens if i else 8})
            for i in range(rows)
        ]
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        return path

    return make


def command(plan: Path, out: str, *more: object) -> list[str]:
    words = ["run", "--strat_file_name", plan, "-i", plan.parent / "in.jsonl"]
    words += ["-o", plan.parent / out, "--ignore-eos", *more]
    return [sys.executable, "-m", "llmpq.runtime", *map(str, words)]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S)


def tokens(path: Path) -> list[list[int]]:
    return [json.loads(line)["tokens"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("links", ["peer", "gloo"])
def test_tokens_equal_the_cpus(address, write, tmp_path, links):
    cpu = run(command(write(on_gpu=False), "cpu.jsonl"))
    assert cpu.returncode == 0, cpu.stderr
    done = run(command(write(), "gpu.jsonl", "--address", address, "--links", links))
    assert done.returncode == 0, done.stderr
    assert tokens(tmp_path / "gpu.jsonl") == tokens(tmp_path / "cpu.jsonl")
    assert "link failed" not in done.stderr


def test_the_preflight_finds_the_gpus_and_their_link(address, write):
    words = [sys.executable, "-m", "llmpq.runtime", "check", str(write()), "--address", address]
    done = run([*words, "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [place["kind"] for place in found["places"]] == ["H200", "H200"]
    assert all(link["device"] == "peer" for link in found["links"])


def test_a_plan_for_another_gpu_is_refused(address, write):
    done = run(command(write(kind="A100-80GB"), "out.jsonl", "--address", address))
    assert done.returncode == 6, done.stderr
    assert "no Ray node has A100-80GB" in done.stderr and "2 x H200" in done.stderr


def test_a_stage_that_runs_out_of_memory_at_start_is_named(address, write, make_plan, demo_model):
    limit = 8 << 20
    memory = MemoryForm(
        weights_bytes=0, embedding_bytes=0, kv_bytes=0, workspace_bytes=0, context_bytes=0,
        total_bytes=0, limit_bytes=limit,
    )  # fmt: skip
    done = run(command(write(memory=memory), "out.jsonl", "--address", address))
    assert done.returncode == 5, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "ran out of memory while loading layers" in last and "re-plan" in last


def test_a_killed_stage_is_named_and_resume_finishes(address, write, tmp_path):
    words = command(write(tokens=380), "out.jsonl", "--address", address, "--on-loss", "stop")
    log, out = tmp_path / "log", tmp_path / "out.jsonl"
    with log.open("w") as stderr:
        process = subprocess.Popen(words, env=ENVIRONMENT, stderr=stderr, stdout=subprocess.DEVNULL)
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s and not (out.exists() and out.read_text()):
            time.sleep(0.01)
        pids = [int(pid) for pid in re.findall(r"stage \d: .*, pid (\d+)", log.read_text())]
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        code = process.wait(timeout=LIMIT_S)
    last = log.read_text().strip().splitlines()[-1]
    assert code == 6, log.read_text()
    assert time.monotonic() - killed_s < 15
    assert f"stage 1 (GPU-1 on local, pid {pids[1]}) was lost" in last and "--resume" in last
    assert 1 <= len(out.read_text().splitlines()) < 7
    done = run([*words, "--resume"])
    assert done.returncode == 0, done.stderr
    assert len(tokens(out)) == 7
