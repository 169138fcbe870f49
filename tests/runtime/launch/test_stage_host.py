"""Where stages meet, and which processes can name each other by number."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from llmpq.cluster import Cluster
from llmpq.errors import StageLostError
from llmpq.runtime.launch.stage_host import (
    LOCAL_HOST,
    listening_socket,
    meeting_host,
    process_space,
)

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


def test_a_port_that_somebody_else_took_is_a_sentence() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((LOCAL_HOST, 0))
        port = other.getsockname()[1]
        # Bound, not listening yet: a second bind succeeds, as between two runs that start together.
        mine = listening_socket(LOCAL_HOST, port)
        with pytest.raises(StageLostError, match=f"cannot listen on {LOCAL_HOST}:{port}"):
            listening_socket(LOCAL_HOST, port)
        mine.close()


def test_two_that_bind_one_port_at_once_both_get_an_answer(monkeypatch) -> None:
    taken = socket.socket()

    class Raced(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            super().bind(address)
            if not taken.getsockname()[1]:  # the other run's bind and listen, in between
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(self.getsockname())
                taken.listen()

    monkeypatch.setattr("llmpq.runtime.launch.stage_host.socket.socket", Raced)
    with taken, pytest.raises(StageLostError, match="Address already in use"):
        listening_socket(LOCAL_HOST, 0)


def test_a_child_shares_its_parents_process_space() -> None:
    code = "from llmpq.runtime.launch.stage_host import process_space; print(process_space())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == process_space()
