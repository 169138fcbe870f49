"""No wait of a pipeline is without an end: stages that do not meet, messages that are lost."""

from __future__ import annotations

import datetime
import threading
import time

import pytest
import torch.distributed as dist

from llmpq.errors import DeadlineError
from llmpq.runtime.launch import thread_launcher
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.launch.stages.stage_worker import StageWorker
from llmpq.runtime.links.transport import join_gloo
from llmpq.runtime.options.engine_options import Deadlines, EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import EngineOutputs, Progress, Request
from llmpq.runtime.steps.trace import LoadReport

pytestmark = pytest.mark.cluster
ONE_SECOND = EngineOptions(backend="threads", deadlines=Deadlines(step_s=1))


def test_a_stage_that_never_joins_is_given_up(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    limit = datetime.timedelta(seconds=1)
    with pytest.raises(
        DeadlineError, match=r"the 2 stages have not found each other within [1-9] s"
    ):
        join_gloo(store, 0, 2, limit=limit)


@pytest.mark.parametrize("closing", [False, True], ids=["a row", "the end"])
def test_a_lost_message_ends_the_run(demo_model, make_plan, monkeypatch, closing):
    """Every stage is well and waits for its neighbour: no step is too long, nobody is silent."""
    over = threading.Event()

    class Waiting(StageWorker):
        def load(self):
            return LoadReport(weights_bytes=0, kv_bytes=0, seconds=0.0)

        def run(self):
            over.wait(60)

        def stop(self):
            over.set()

        def poll(self, timeout_s):
            time.sleep(timeout_s)
            progress = Progress(finished=1) if closing else Progress(running=1)
            return EngineOutputs(finished=[], tokens={}, progress=progress)

    monkeypatch.setattr(thread_launcher, "StageWorker", Waiting)
    plan, settings = (
        make_plan(demo_model, (4,)),
        StageSettings(model_dir=str(demo_model), options=ONE_SECOND),
    )
    started_s = time.monotonic()
    with (
        pytest.raises(DeadlineError, match=r"no stage has computed for 4 s .*allow more time"),
        PipelineClient.start(plan, settings) as pipeline,
    ):
        pipeline.submit([Request(id=0, prompt=(5,), max_new=2)])
        started_s = time.monotonic()
        for _ in pipeline.updates():
            pass
    assert 4 <= time.monotonic() - started_s < 15


def test_a_reader_who_takes_long_is_not_the_stages_fault(demo_model, make_plan):
    settings = StageSettings(model_dir=str(demo_model), options=ONE_SECOND)
    finished = []
    with PipelineClient.start(make_plan(demo_model, (4,)), settings) as pipeline:
        pipeline.submit([Request(id=0, prompt=(5,), max_new=9)], more=True)
        updates = pipeline.updates()
        while len(finished) < 1:
            finished += next(updates).finished
        time.sleep(5)  # between two jobs
        pipeline.submit([Request(id=1, prompt=(5,), max_new=9)])
        for update in updates:
            finished += update.finished
    assert [done.id for done in finished] == [0, 1]
    assert finished[0].tokens == finished[1].tokens
