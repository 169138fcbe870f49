"""`llmpq-dist run --ray-address` without a plan: that Ray's devices, planned for and run on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmpq.runtime.cli.main import main

pytestmark = pytest.mark.cluster
LIMIT_S = 150


def dist(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmpq.runtime", *map(str, words)], cwd=folder,
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip


@pytest.fixture
def job(tmp_path, demo_model) -> tuple[object, ...]:
    (tmp_path / "in.jsonl").write_text('{"prompt": "import os\\n"}\n{"prompt": "def "}\n')
    return ("run", "--model", demo_model, "-i", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 4)


def test_the_devices_of_a_ray_are_planned_for_and_run(ray_session, tmp_path, job, monkeypatch):
    done = dist(tmp_path, *job, "--ray-address", ray_session)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == [None, None]
    monkeypatch.chdir(tmp_path)
    plain = [*job[:-4], "-o", "plain.jsonl", *job[-2:], "--backend", "threads"]
    assert main([str(word) for word in plain]) == 0
    ours, theirs = (
        [json.loads(line)["tokens"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("out.jsonl", "plain.jsonl")
    )
    assert ours == theirs


def test_a_ray_that_is_not_there_is_named_at_once(tmp_path, job):
    done = dist(tmp_path, *job, "--ray-address", "127.0.0.1:1")
    assert done.returncode in (2, 6) and "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out.jsonl").exists()
