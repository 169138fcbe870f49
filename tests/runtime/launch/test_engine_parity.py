"""Stages as threads, processes and Ray actors: the tokens are those of transformers, over all."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from llmpq.profiler.cli import run_hosts
from llmpq.profiler.timing.host_actor import HostWorker
from llmpq.runtime.launch import probes
from llmpq.runtime.launch.on_ray import ray_launcher
from llmpq.runtime.launch.on_ray.actor_class import actor_class
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.launch.stages.node_survey import NodeSurvey
from llmpq.runtime.launch.stages.stage_probe import StageProbe
from llmpq.runtime.launch.stages.stage_worker import StageWorker
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import Request
from llmpq.runtime.steps.trace import chrome_trace

pytestmark = pytest.mark.cluster
MAX_NEW = 16


@pytest.fixture(scope="module")
def expected(demo_model, random_prompts):
    """Prompts of unequal length, and what transformers generates for each."""
    import transformers

    torch.set_num_threads(1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    prompts = random_prompts(5, 24, 1, 9, 17, vocab=4000)
    outputs = []
    for prompt in prompts:
        tokens = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=MAX_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(tokens[0, len(prompt) :].tolist())
    return prompts, outputs


# Over processes: test_front_door.py and serve/test_server.py.
@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.seldom), "ray"])
def backend(request):
    """Return each way to start stages."""
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


def require_tokens_of_transformers(plan, engine, news, expected) -> None:
    """Serve the prompts, every other one as a stream; look at tokens, totals and trace."""
    prompts, outputs = expected
    tokens, streamed = {}, {}
    requests = [
        Request(id=i, prompt=tuple(p), max_new=MAX_NEW, stream=i % 2 == 0)
        for i, p in enumerate(prompts)
    ]
    engine.submit(requests, more=True)
    while len(tokens) < len(prompts):
        update = next(news)
        tokens |= {done.id: done.tokens for done in update.finished}
        for number, new in update.tokens.items():
            streamed.setdefault(number, []).extend(new)
    records = engine.records()
    assert streamed == {i: outputs[i] for i in range(0, len(prompts), 2)}
    assert [tokens[i] for i in range(len(prompts))] == outputs
    for record in records:
        assert set(record.totals) <= {"prefill", "decode", "mixed"}
        rows = sum(total.rows for total in record.totals.values())
        assert rows == len(prompts) * MAX_NEW, "prompts whole, then a row a token"
    events = chrome_trace([stage.device for stage in plan.stages], records)["traceEvents"]
    assert {event["pid"] for event in events} == set(range(len(plan.stages)))
    assert sum(event["ph"] == "X" for event in events) == sum(
        total.steps for record in records for total in record.totals.values()
    )
    json.dumps(events)


def test_three_stages_serve_jobs_in_turn_and_abort_between_steps(
    demo_model, make_plan, backend, expected
):
    plan = make_plan(demo_model, (2, 5), batch=4, prompt_len=24, gen_len=900)
    settings = StageSettings(
        model_dir=str(demo_model), options=EngineOptions(backend=backend, trace="trace.json")
    )
    with PipelineClient.start(plan, settings) as engine:
        news = engine.updates()
        for _ in range(2):
            require_tokens_of_transformers(plan, engine, news, expected)
        engine.submit([Request(id=7 + i, prompt=(5,), max_new=900, stream=True) for i in range(3)])
        ended = []
        for update in news:
            if update.tokens and not ended:
                engine.abort([8, 7, 9, 1234])
            ended += update.finished
    assert sorted(done.id for done in ended) == [7, 8, 9]
    assert {done.finish_reason for done in ended} == {"abort"}
    assert all(len(done.tokens) < 900 for done in ended)


@pytest.mark.parametrize(
    ("splits", "backend"),
    [((), "threads"), pytest.param((), "processes", marks=pytest.mark.seldom), ((3,), "threads")],
    ids=["1 stage as a thread", "1 stage as a process", "2 stages as threads"],
)
def test_fewer_stages_give_the_tokens_of_transformers(
    demo_model, make_plan, expected, splits, backend
):
    plan = make_plan(demo_model, splits, batch=4, prompt_len=24, gen_len=MAX_NEW)
    settings = StageSettings(
        model_dir=str(demo_model), options=EngineOptions(backend=backend, trace="trace.json")
    )
    with PipelineClient.start(plan, settings) as engine:
        require_tokens_of_transformers(plan, engine, engine.updates(), expected)
        engine.end()


@pytest.mark.parametrize("sizes", [(4, 1), (3, 2), (1, 4)], ids=["4 and 1", "3 and 2", "1 and 4"])
def test_micro_batches_may_be_larger_in_either_phase(demo_model, make_plan, expected, sizes):
    """Stages as threads; prefill's micro-batch is the larger one in the first two plans."""
    prompts, outputs = expected
    shape = {"prefill_microbatch": sizes[0], "decode_microbatch": sizes[1]}
    plan = make_plan(demo_model, (4,), batch=4, prompt_len=24, gen_len=MAX_NEW, **shape)
    settings = StageSettings(model_dir=str(demo_model), options=EngineOptions(backend="threads"))
    with PipelineClient.start(plan, settings) as engine:
        jobs = [Request(id=i, prompt=tuple(p), max_new=MAX_NEW) for i, p in enumerate(prompts)]
        tokens = {done.id: done.tokens for done in engine.serve(jobs)}
    assert [tokens[i] for i in range(len(prompts))] == outputs


# Over processes: test_bench_command.py has Ray's.
@pytest.mark.parametrize(
    "backend", ["threads", pytest.param("processes", marks=pytest.mark.seldom)]
)
def test_speculation_over_stages_gives_the_same_tokens(demo_model, make_plan, expected, backend):
    prompts, outputs = expected
    plan = make_plan(demo_model, (2, 5), batch=4, prompt_len=24, gen_len=MAX_NEW)
    settings = StageSettings(
        model_dir=str(demo_model),
        options=EngineOptions(backend=backend, speculate="w4kv4", gamma=3, trace="trace.json"),
    )
    tokens = {}
    with PipelineClient.start(plan, settings) as engine:
        engine.submit(
            [Request(id=i, prompt=tuple(p), max_new=MAX_NEW) for i, p in enumerate(prompts)]
        )
        for update in engine.updates():
            tokens |= {done.id: done.tokens for done in update.finished}
        report = engine.speculation()
        records = engine.records()
    assert [tokens[i] for i in range(len(prompts))] == outputs
    assert report is not None and report["mode"] == "w4kv4" and report["acceptance"] > 0.3
    for record in records:
        assert {"prefill", "draft", "verify"} <= set(record.totals)
    assert all(load.draft_bytes > 0 for load in engine.load_reports)
    events = chrome_trace([stage.device for stage in plan.stages], records)["traceEvents"]
    colours = {(event["pid"], event["cat"]): event["cname"] for event in events if "cat" in event}
    for pid in range(3):
        shown = [colours[pid, kind] for kind in ("prefill", "draft", "verify")]
        assert len(set(shown)) == 3, "drafts, verifies and prefills differ"


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_stage_that_cannot_load_is_named_by_what_is_wrong(
    demo_model, make_plan, tmp_path, backend
):
    plan = make_plan(demo_model)
    settings = StageSettings(model_dir=str(tmp_path), options=EngineOptions(backend=backend))
    with (
        pytest.raises(ValueError, match="config.json"),
        PipelineClient.start(plan, settings),
    ):
        pass


NO_RAY = """
import sys
sys.modules["ray"] = None
import llmpq.runtime.launch.pipeline_client, llmpq.runtime.launch.process_launcher
assert "torch" not in sys.modules
import llmpq.runtime.launch.stages.stage_process, llmpq.runtime.launch.thread_launcher
"""
NO_TORCH = """
import sys
sys.modules["torch"] = None
import llmpq.runtime.launch.on_ray.ray_launcher, llmpq.runtime.entrypoints.llm
import llmpq.runtime.tools.check
import llmpq.profiler.cli.run_hosts, llmpq.runtime.serve.app
"""


def test_stages_as_threads_and_processes_need_no_ray_and_a_driver_of_processes_no_torch():
    subprocess.run([sys.executable, "-c", NO_RAY], check=True)


def test_a_driver_of_ray_and_a_server_need_no_torch():
    subprocess.run([sys.executable, "-c", NO_TORCH], check=True)


INNER, OUTER = {"successor"}, {"move"}
"""By which a stage's process goes on as another stage: in the process, and as it is called."""


@pytest.mark.parametrize(
    ("held", "late"),
    [
        (StageWorker, ray_launcher.RemoteStageWorker),
        (StageProbe, actor_class(StageProbe.__module__, "StageProbe", probes.PROBE_CALLS)),
        (HostWorker, run_hosts.HostWorker),
        (NodeSurvey, actor_class(NodeSurvey.__module__, "NodeSurvey", probes.SURVEY_CALLS)),
    ],
)
def test_a_actor_class_has_every_method_of_the_one_it_holds(held, late):
    def methods(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert late.__name__.removeprefix("Remote") == held.__name__
    assert methods(late) - OUTER == methods(held) - INNER


class Held:
    """Counts what it gets."""

    def __init__(self, start, *, step=1):
        self.count, self.step = start, step

    def more(self, times, *, less=0):
        self.count += self.step * times - less
        return self.count


def test_a_actor_class_calls_what_it_holds(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_module", SimpleNamespace(Held=Held))
    counting = actor_class("a_module", "Held", ("more",))(5, step=2)
    assert (counting.more(3), counting.more(1, less=4)) == (11, 9)
