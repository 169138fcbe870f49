"""Hosts that are known by their IPv6 addresses only."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from llmpq.plans.plan import NodePlan

pytestmark = [pytest.mark.hosts_long, pytest.mark.timeout(600)]

HEAD = "[fd00::1]:6379"
JOB = ("run", "--plan", "plan.json", "-i", "in.jsonl", "-o", "out.jsonl")


def test_stages_run_on_hosts_that_are_named_by_ipv6_addresses(
    make_bed, make_plan, demo_model, tmp_path
):
    plan = make_plan(demo_model, splits=(4,))
    stages = zip(plan.stages, "ba", strict=True)
    change = {
        "stages": tuple(stage.model_copy(update={"node": name}) for stage, name in stages),
        "nodes": (NodePlan(name="a", host="fd00::1"), NodePlan(name="b", host="fd00:0::0:2")),
    }
    plan.model_copy(update=change).save_json(tmp_path / "plan.json")
    (tmp_path / "in.jsonl").write_text('{"prompt": "import os"}\n{"prompt": "def "}\n')
    with make_bed(["hosta", "hostb"]) as bed:
        head, other = bed.hosts
        common = ("--num-cpus=1", "--object-store-memory=80000000")
        head.ray("get-auth-token", "--generate")
        shutil.copy(head.home / ".ray/auth_token", other.home / ".ray/auth_token")
        here = ("--port=6379", "--node-ip-address=fd00::1", "--include-dashboard=false")
        head.ray("start", "--head", *here, *common)
        other.ray("start", f"--address={HEAD}", "--node-ip-address=fd00::2", *common)
        done = head.dist(*JOB, "--ray-address", HEAD, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on b (hostb: fd00::2" in done.stderr and "on a (hosta: fd00::1" in done.stderr
    found = (tmp_path / "out.jsonl").read_text().splitlines()
    alone = (sys.executable, "-m", "llmpq.runtime", *JOB, "--backend", "threads")
    (tmp_path / "out.jsonl").unlink()
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    expected = (tmp_path / "out.jsonl").read_text().splitlines()
    tokens = [[json.loads(line)["tokens"] for line in lines] for lines in (found, expected)]
    assert tokens[0] == tokens[1]
