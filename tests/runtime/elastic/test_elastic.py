"""Devices that come and go while requests run: layers that stay are not loaded again."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from llmpq import LLM, SamplingParams
from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError
from llmpq.runtime.elastic import elastic
from llmpq.runtime.launch.pipeline_client import PipelineClient

pytestmark = pytest.mark.cluster
PROMPTS = [f"def function_{number}(self, x):\n    return" for number in range(12)]
PARAMS = [
    SamplingParams(temperature=t, seed=3, max_tokens=80, ignore_eos=True)
    for t in (0, 0.9, 0, 0.8, 0, 0.7)
] * 2
HOW = {
    "max_model_len": 160, "max_num_seqs": 2, "dtype": "float32", "backend": "processes",
    "use_tqdm": False,
}  # fmt: skip


def cluster(*memory: str) -> Cluster:
    devices = [{"kind": "CPU", "threads": 1, "memory": each, "reserve": 0} for each in memory]
    return Cluster.parse_data(
        {"name": "here", "nodes": [{"name": "here", "devices": devices}]}, where="test"
    )


def seen(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def during(llm: LLM, *actions) -> list[list[int]]:
    """Do things one after the other while answers come; return the answers."""
    asked = [llm.prepare(p, own) for p, own in zip(PROMPTS, PARAMS, strict=True)]
    begun, outputs = threading.Event(), {}
    failures: list[BaseException] = []

    def act() -> None:
        begun.wait()
        try:
            for action in actions:
                action()
        except BaseException as error:
            failures.append(error)

    acting = threading.Thread(target=act)
    acting.start()
    for index, output in llm.as_completed(
        asked, on_progress=lambda progress: progress.generated_tokens > 20 and begun.set()
    ):
        outputs[index] = output
    acting.join()
    assert not failures, failures
    return seen([outputs[index] for index in range(len(PROMPTS))])


@pytest.fixture(scope="module")
def expected(demo_model) -> list[list[int]]:
    with LLM(demo_model, cluster=cluster("60 MiB"), **{**HOW, "backend": "threads"}) as llm:
        return seen(llm.generate(PROMPTS, PARAMS))


def test_only_what_moves_is_loaded(demo_model, expected):
    """A device comes, another goes; processes that have layers go on with them."""
    changes, pids = [], []
    two, three = cluster("26 MiB", "24 MiB"), cluster("26 MiB", "24 MiB", "24 MiB")
    with LLM(demo_model, cluster=two, **HOW) as llm:
        first = llm.stages_started.stage_pids()

        def add() -> None:
            changes.append(llm.add_devices("CPU-2", cluster=three))
            pids.append(llm.stages_started.stage_pids())

        def drain() -> None:
            changes.append(llm.drain_devices("CPU-1"))
            pids.append(llm.stages_started.stage_pids())

        assert during(llm, add, drain) == expected
        added, drained = changes
        assert added.done and drained.done
        assert pids[0][:2] == first and len(pids[0]) == 3
        assert pids[1] == [pids[0][0], pids[0][2]]
        assert [stage.device for stage in llm.plan.stages] == ["CPU-0", "CPU-2"]
        for change, recovery in zip(changes, llm.recoveries, strict=True):
            held, loaded = change.layers
            assert held + loaded == llm.model_spec.num_layers and held >= 3 and loaded >= 2
            assert (recovery.num_held, recovery.num_loaded) == change.layers
            assert recovery.measured_s is not None and recovery.undone is None
        assert [one.action for one in llm.recoveries] == ["add", "drain"]
        assert "layers were loaded" in drained.text
        assert seen(llm.generate(PROMPTS, PARAMS)) == expected
        report = llm.job_report([])
        assert [one["action"] for one in report["recoveries"]] == ["add", "drain"]


@pytest.mark.seldom  # test_recovery.py has that those that live keep their layers
def test_a_lost_stage_alone_is_loaded_again(demo_model, expected):
    with LLM(demo_model, cluster=cluster("26 MiB", "24 MiB"), **HOW) as llm:
        before = llm.stages_started.stage_pids()
        assert during(llm, lambda: os.kill(before[1], signal.SIGKILL)) == expected
        now = llm.stages_started.stage_pids()
        assert now[0] == before[0] and now[1] != before[1]
        (recovery,) = llm.recoveries
        own = [stage.num_layers for stage in llm.plan.stages]
        assert [recovery.num_held, recovery.num_loaded] == own
        assert [load.num_held for load in llm.engine.client.load_reports] == [own[0], 0]


def test_what_does_not_pay_or_fit_is_said_and_nothing_moves(demo_model, expected):
    three = cluster("26 MiB", "24 MiB", "2 MiB")
    with LLM(demo_model, cluster=cluster("26 MiB", "24 MiB"), min_quality=16, **HOW) as llm:
        plan, pids = llm.plan, llm.stages_started.stage_pids()
        idle = llm.add_devices("CPU-2", cluster=three)  # too small for a layer
        assert not idle.done and "the plan that runs is the best one" in idle.text
        wide = cluster("26 MiB", "24 MiB", "24 MiB")
        short = llm.add_devices("CPU-2", cluster=wide, horizon_s=0.001)
        assert not short.done and "does not pay" in short.text and "tokens/s" in short.text
        with pytest.raises(DoesNotFitError, match=r"CPU-1.*16 bits or more .*CPU-1 is short"):
            llm.drain_devices("CPU-0")
        with pytest.raises(ValueError, match="CPU-1 is in use already"):
            llm.add_devices("CPU-1")
        with pytest.raises(ValueError, match="node or device 'CPU-7'"):
            llm.drain_devices("CPU-7")
        with pytest.raises(ValueError, match="which CPU-1 of the plan that runs is"):
            llm.add_devices("CPU-0", cluster=cluster("26 MiB"))
        assert llm.plan is plan and llm.stages_started.stage_pids() == pids
        assert not llm.recoveries
        assert seen(llm.generate(PROMPTS, PARAMS)) == expected


def test_bits_are_lowered_for_a_device_that_goes_and_come_back_with_it(demo_model):
    with LLM(demo_model, cluster=cluster("26 MiB", "24 MiB"), **HOW) as llm:
        before = llm.plan.precisions
        gone = llm.drain_devices("CPU-0")
        lower = llm.plan.precisions
        assert gone.done and "(before: w16a16 x8)" in gone.text
        assert sum(p.weight_bits for p in lower) < sum(p.weight_bits for p in before)
        again = llm.add_devices("CPU-0")
        assert again.done and llm.plan.precisions == before


def test_a_plan_that_cannot_be_started_is_undone(demo_model, expected, monkeypatch):
    """Requests go on by the plan before."""
    begin = PipelineClient.begin

    def broken(self: PipelineClient) -> None:
        if len(self.plan.stages) == 3:
            self.was_refused, self.failed_stage = True, 2
            raise ValueError("no such device")
        begin(self)

    monkeypatch.setattr(PipelineClient, "begin", broken)
    three = cluster("26 MiB", "24 MiB", "24 MiB")
    changes = []
    with LLM(demo_model, cluster=cluster("26 MiB", "24 MiB"), **HOW) as llm:
        add = lambda: changes.append(llm.add_devices("CPU-2", cluster=three))  # noqa: E731
        assert during(llm, add) == expected
        (change,) = changes
        assert not change.done and "no such device" in change.text
        assert [stage.device for stage in llm.plan.stages] == ["CPU-0", "CPU-1"]
        assert llm.recoveries[0].undone is not None


def test_without_a_record_of_requests_nothing_moves(demo_model):
    with (
        LLM(demo_model, cluster=cluster("26 MiB", "24 MiB"), on_loss="stop", **HOW) as llm,
        pytest.raises(RuntimeError, match="on_loss='stop'"),
    ):
        llm.drain_devices("CPU-0")


def test_a_stage_that_dies_while_it_moves_is_part_of_the_move(demo_model, expected, monkeypatch):
    changes = []
    with LLM(demo_model, cluster=cluster("26 MiB", "24 MiB"), **HOW) as llm:
        move = elastic.EngineThread.move_to

        def dying(self, made, **more):
            pid = llm.stages_started.stage_pids()[1]
            threading.Timer(0.02, os.kill, (pid, signal.SIGKILL)).start()
            return move(self, made, **more)

        monkeypatch.setattr(elastic.EngineThread, "move_to", dying)
        three = cluster("26 MiB", "24 MiB", "24 MiB")
        add = lambda: changes.append(llm.add_devices("CPU-2", cluster=three))  # noqa: E731
        assert during(llm, add, lambda: time.sleep(0.1)) == expected
        assert changes[0].done and len(llm.plan.stages) == 3
