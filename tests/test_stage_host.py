"""Where stages meet, and which processes can name each other by number."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmpq.cluster import Cluster
from llmpq.runtime.stage_host import LOCAL_HOST, meeting_host, process_space

pytestmark = pytest.mark.cpu


def test_stages_on_several_nodes_meet_at_the_first_ones_host(demo_model, make_plan) -> None:
    plan = make_plan(demo_model, splits=(4,))
    names = ("one", "two")
    stages = tuple(
        stage.model_copy(update={"node": node})
        for stage, node in zip(plan.stages, names, strict=True)
    )
    spread = plan.model_copy(update={"stages": stages})
    cluster = Cluster.model_validate({
        "name": "pair",
        "nodes": [
            {"name": name, "host": f"10.0.0.{at}", "accelerators": "CPU:1"}
            for at, name in ((2, "two"), (1, "one"))
        ],
    })  # fmt: skip
    assert meeting_host(None, spread, cluster) == "10.0.0.1"
    assert meeting_host("10.9.9.9", spread, cluster) == "10.9.9.9"
    assert meeting_host(None, spread, None) == LOCAL_HOST
    together = tuple(stage.model_copy(update={"node": "one"}) for stage in stages)
    alone = plan.model_copy(update={"stages": together})
    assert meeting_host(None, alone, cluster) == LOCAL_HOST


def test_a_child_shares_its_parents_process_space() -> None:
    code = "from llmpq.runtime.stage_host import process_space; print(process_space())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == process_space()
