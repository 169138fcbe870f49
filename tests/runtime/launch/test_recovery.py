"""Stages that are killed: others take over, and requests go on from the tokens that they have."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from llmpq import LLM, SamplingParams
from llmpq.errors import StageLostError
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import Request
from llmpq.runtime.requests.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.cluster
STAGES = (2, 5)
"""Where three stages of unequal memory meet."""


def asked() -> list[SamplingParams]:
    """Return each kind of request whose state is more than its tokens."""
    long = {"max_tokens": 90, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **long),
        SamplingParams(temperature=0.9, seed=3, **long),
        SamplingParams(temperature=0.8, seed=4, top_p=0.9, n=2, **long),
        SamplingParams(
            temperature=0.9, seed=5, frequency_penalty=0.6, repetition_penalty=1.2, logprobs=2,
            prompt_logprobs=1, bad_words=["self"], **long,
        ),
        SamplingParams(temperature=0, stop=["\n\n\n", "zzzz"], **long),
        SamplingParams(
            temperature=0.9, seed=7, max_tokens=90,
            structured_outputs=StructuredOutputsParams(regex="[a-z ]{80}"),
        ),
    ]  # fmt: skip


PROMPTS = [f"def function_{number}(self, x):\n    return" for number in range(len(asked()))]


def seen(outputs) -> list:
    """Return all that must not depend on what happened to stages."""
    return [
        (
            [(a.text, list(a.token_ids), a.finish_reason, scores(a.logprobs)) for a in o.outputs],
            scores(o.prompt_logprobs),
        )
        for o in outputs
    ]


def scores(rows) -> list | None:
    return rows and [row and [(token, one.rank) for token, one in row.items()] for row in rows]


class Killer(threading.Thread):
    """Kills stages once so many tokens have come, and again while they are recovered."""

    def __init__(self, llm: LLM, victims: tuple[int, ...], *, again: int | None = None) -> None:
        super().__init__(daemon=True)
        self.llm, self.victims, self.again = llm, victims, again
        self.started_with = llm.stats()["generated_tokens"]

    def run(self) -> None:
        while self.llm.stats()["generated_tokens"] < self.started_with + 40:
            time.sleep(0.005)
        pids = [stage["pid"] for stage in self.llm.stats()["stages"]]
        for victim in self.victims:
            os.kill(pids[victim], signal.SIGKILL)
        while self.again is not None and self.llm.recovering is None:
            time.sleep(0.005)
        while self.again is not None:
            client = self.llm.stages_started
            loading = client.stage_pids() if client and client.phase == "loading" else []
            if loading and loading != pids:
                os.kill(loading[self.again], signal.SIGKILL)
                return
            time.sleep(0.002)


@pytest.fixture(scope="module")
def undisturbed(demo_model, make_plan):
    """Return a plan, and what it gives where nothing happens."""
    plan = make_plan(demo_model, STAGES, batch=8, prompt_len=64, gen_len=128)
    with LLM(demo_model, plan=plan, backend="threads") as llm:
        return plan, seen(llm.generate(PROMPTS, asked()))


@pytest.fixture(scope="module")
def llm(demo_model, undisturbed):
    with LLM(demo_model, plan=undisturbed[0], backend="processes") as made:
        yield made


@pytest.mark.parametrize(
    ("victims", "again"), [((0,), None), ((2,), None), ((1, 2), None), ((1,), 0)],
    ids=["the first", "the last", "two at once", "one that loads"],
)  # fmt: skip
def test_answers_are_those_of_an_undisturbed_run(llm, undisturbed, victims, again):
    before = len(llm.recoveries)
    killer = Killer(llm, victims, again=again)
    killer.start()
    outputs = llm.generate(PROMPTS, asked())
    killer.join(60)
    assert seen(outputs) == undisturbed[1]
    (recovery,) = llm.recoveries[before:]
    assert recovery.measured_s > 0 and recovery.pause_s >= recovery.measured_s
    assert "SIGKILL" in recovery.reason and recovery.action == "restart"
    assert recovery.num_attempts == (1 if again is None else 2)
    reported = llm.job_report(outputs)["recoveries"][before:]
    assert [one["predicted_s"] > 0 for one in reported] == [True]
    assert all(o.outputs[0].total_s >= recovery.measured_s for o in outputs[:2])


@pytest.mark.parametrize(
    ("backend", "shares", "victim"),
    [
        pytest.param("ray", (), 2, marks=pytest.mark.seldom),
        ("ray", (), 0),
        pytest.param("processes", [(1,), (1, 1), (1,)], 1, marks=pytest.mark.seldom),
        ("processes", [(1,), (1, 1), (1,)], 2),
        pytest.param("processes", [(1,), (1, 1), (1,)], 3, marks=pytest.mark.seldom),
    ],
    ids=["Ray, the last", "Ray, the first", "who leads", "who follows", "beside a shared stage"],
)
def test_stages_that_live_keep_their_process_and_layers(
    demo_model, make_plan, undisturbed, backend, shares, victim, request
):
    if backend == "ray":
        request.getfixturevalue("ray_session")
    plan = make_plan(demo_model, STAGES, shares=shares, batch=8, prompt_len=64, gen_len=128)
    with LLM(demo_model, plan=plan, backend=backend) as llm:
        before = [stage["pid"] for stage in llm.stats()["stages"]]
        warmed_up_s = sum(load.warm_s for load in llm.engine.client.load_reports)
        killer = Killer(llm, (victim,))
        killer.start()
        outputs = llm.generate(PROMPTS, asked())
        killer.join(60)
        after = [stage["pid"] for stage in llm.stats()["stages"]]
        (recovery,) = llm.recoveries
        assert sum(load.warm_s for load in llm.engine.client.load_reports) < warmed_up_s, (
            "requests wait"
        )
    assert seen(outputs) == undisturbed[1]
    assert [one != other for one, other in zip(before, after, strict=True)] == [
        index == victim for index in range(len(plan.places))
    ]
    assert recovery.num_loaded == plan.places[victim].num_layers
    kept = sum(place.num_layers for place in plan.places) - recovery.num_loaded
    assert recovery.num_held == kept and recovery.num_attempts == 1


def test_a_stream_hears_nothing_for_a_while_and_goes_on(llm):
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=120, ignore_eos=True, logprobs=1)
    whole = llm.generate(PROMPTS[0], params)[0].outputs[0]
    tokens, rows = [], []

    async def read() -> None:
        killed = False
        answers = await llm.submit(PROMPTS[0], params)
        async for delta in answers.deltas():
            tokens.extend(delta.token_ids)
            rows.extend(delta.logprobs)
            if len(tokens) > 20 and not killed:
                killed = True
                os.kill(llm.stats()["stages"][1]["pid"], signal.SIGKILL)

    asyncio.run(read())
    assert tokens == list(whole.token_ids) and scores(rows) == scores(whole.logprobs)


def test_requests_that_come_meanwhile_wait_and_aborted_ones_end(llm):
    long = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    expected = llm.generate(PROMPTS[1], long)[0].outputs[0].token_ids
    ends: dict[str, list] = {}

    def ask(name: str) -> None:
        prepared = llm.prepare(PROMPTS[1], long, request_id=name)
        ends[name] = [output.outputs[0] for _, output in llm.as_completed([prepared])]

    first = threading.Thread(target=ask, args=("first",))
    first.start()
    while llm.stats()["running"] == 0:
        time.sleep(0.005)
    os.kill(llm.stats()["stages"][2]["pid"], signal.SIGKILL)
    while llm.recovering is None:
        time.sleep(0.002)
    late = [threading.Thread(target=ask, args=(name,)) for name in ("late", "dropped")]
    for thread in late:
        thread.start()
    while "dropped" not in llm.stats()["requests"]:
        time.sleep(0.002)
    llm.abort("dropped")
    for thread in (first, *late):
        thread.join(120)
    assert ends["first"][0].token_ids == ends["late"][0].token_ids == expected
    assert ends["dropped"][0].finish_reason == "abort"
    assert expected[: len(ends["dropped"][0].token_ids)] == ends["dropped"][0].token_ids


def test_a_stage_that_dies_while_it_loads_first_is_started_again(demo_model, undisturbed):
    llm = LLM(demo_model, plan=undisturbed[0], backend="processes", start=False)
    killed = []

    def kill() -> None:
        while not killed:
            client = llm.stages_started
            if client is not None and client.phase == "loading" and client.stage_pids():
                os.kill(client.stage_pids()[1], signal.SIGKILL)
                killed.append(client.stage_pids()[1])
            time.sleep(0.001)

    threading.Thread(target=kill, daemon=True).start()
    with llm:
        llm.start()
        assert killed and llm.recoveries[0].phase == "loading"
        assert [stage["pid"] for stage in llm.stats()["stages"]][1] != killed[0]


@pytest.mark.parametrize(
    "num_before",
    [pytest.param(0, marks=pytest.mark.seldom), 1],
    ids=["before requests", "between requests"],
)
def test_a_stage_lost_without_a_request_is_lost_while_idle(demo_model, make_plan, num_before):
    plan = make_plan(demo_model, (4,), prompt_len=8, gen_len=8)
    settings = StageSettings(model_dir=str(demo_model), options=EngineOptions(backend="processes"))
    with (
        pytest.raises(StageLostError, match=r"stage 1 .* was lost while idle: .*SIGKILL") as lost,
        PipelineClient.start(plan, settings) as pipeline,
    ):
        for number in range(num_before):
            pipeline.serve([Request(id=number, prompt=(3, 4, 5), max_new=4)])
        assert pipeline.phase == "idle"
        os.kill(pipeline.stage_pids()[1], signal.SIGKILL)
        for _ in pipeline.updates():
            pass
    assert "during" not in str(lost.value)


POISON = """
import os, signal
from llmpq.runtime.backends.stage_runner import StageRunner
run = StageRunner.run

def killed(self, message, hidden):
    if 777 in message.tokens_T[: message.num_tokens]:
        os.kill(os.getpid(), signal.SIGKILL)
    return run(self, message, hidden)

StageRunner.run = killed
"""
"""What every Python begins with: a stage that computes this token ends."""


def test_a_prompt_that_ends_real_stages_is_failed_and_those_beside_it_are_answered(
    tmp_path, monkeypatch, demo_model, make_plan
):
    plan = make_plan(demo_model, (2, 5), batch=4, prompt_len=32, gen_len=24)
    params = SamplingParams(temperature=0, max_tokens=24, logit_bias={777: -100}, ignore_eos=True)
    prompts = [[3, 4, 5], [7, 777, 8], [9, 10], [11, 12]]
    with LLM(demo_model, plan=plan, backend="threads", use_tqdm=False) as llm:
        whole = [output.text for output in llm.generate(prompts, params)]
    (tmp_path / "sitecustomize.py").write_text(POISON)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    with LLM(demo_model, plan=plan, backend="processes", use_tqdm=False) as llm:
        prepared = [llm.prepare(prompt, params) for prompt in prompts]
        answers = dict(llm.as_completed(prepared))
        again = llm.generate(prompts[0], params)[0].text
    assert "ends every stage that gets it" in answers[1].failure
    assert [answers[i].text for i in (0, 2, 3)] == [whole[i] for i in (0, 2, 3)]
    assert [answers[i].failure for i in (0, 2, 3)] == [None] * 3 and again == whole[0]
