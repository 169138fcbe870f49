"""Stages as Ray actors over gloo: the tokens are those of transformers, the report adds up."""

from __future__ import annotations

import json

import pytest
import torch

from llmpq.runtime.launch.ray_actors import Pipeline
from llmpq.runtime.launch.stage_settings import StageSettings
from llmpq.runtime.request import Request
from llmpq.runtime.trace import chrome_trace

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


@pytest.mark.parametrize("splits", [(), (3,), (2, 5)], ids=["1 stage", "2 stages", "3 stages"])
def test_actors_give_the_tokens_of_transformers(
    ray_session, demo_model, make_plan, expected, splits
):
    prompts, outputs = expected
    plan = make_plan(demo_model, splits, batch=4, prompt_len=24, gen_len=MAX_NEW)
    settings = StageSettings(model_dir=str(demo_model), trace=True)
    tokens = {}
    with Pipeline.start(plan, settings) as pipeline:
        pipeline.submit(
            [Request(id=i, prompt=tuple(p), max_new=MAX_NEW) for i, p in enumerate(prompts)]
        )
        for update in pipeline.updates():
            tokens |= {done.id: done.tokens for done in update.finished}
        records = pipeline.records()
    assert [tokens[i] for i in range(len(prompts))] == outputs
    for record in records:
        assert record.totals["prefill"].rows == len(prompts)
        assert record.totals["decode"].rows == len(prompts) * (MAX_NEW - 1)
    events = chrome_trace([stage.device for stage in plan.stages], records)["traceEvents"]
    assert {event["pid"] for event in events} == set(range(len(plan.stages)))
    assert sum(event["ph"] == "X" for event in events) == sum(
        total.steps for record in records for total in record.totals.values()
    )
    json.dumps(events)


def test_speculation_over_actors_gives_the_same_tokens(
    ray_session, demo_model, make_plan, expected
):
    prompts, outputs = expected
    plan = make_plan(demo_model, (2, 5), batch=4, prompt_len=24, gen_len=MAX_NEW)
    settings = StageSettings(model_dir=str(demo_model), speculate="w4kv4", gamma=3, trace=True)
    tokens = {}
    with Pipeline.start(plan, settings) as pipeline:
        pipeline.submit(
            [Request(id=i, prompt=tuple(p), max_new=MAX_NEW) for i, p in enumerate(prompts)]
        )
        for update in pipeline.updates():
            tokens |= {done.id: done.tokens for done in update.finished}
        report = pipeline.speculation()
        records = pipeline.records()
    assert [tokens[i] for i in range(len(prompts))] == outputs
    assert report is not None and report["mode"] == "w4kv4" and report["acceptance"] > 0.3
    for record in records:
        assert {"prefill", "draft", "verify"} <= set(record.totals)
    assert all(load.draft_bytes > 0 for load in pipeline.load_reports)
    events = chrome_trace([stage.device for stage in plan.stages], records)["traceEvents"]
    colours = {(event["pid"], event["cat"]): event["cname"] for event in events if "cat" in event}
    for pid in range(3):
        shown = [colours[pid, kind] for kind in ("prefill", "draft", "verify")]
        assert len(set(shown)) == 3, "drafts, verifies and prefills are told apart"
