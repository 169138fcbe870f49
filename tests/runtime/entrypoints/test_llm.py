"""The front door: text in and out over every way to start stages, streams, aborts, refusals."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time

import pytest

import llmpq
from llmpq import LLM, Plan, SamplingParams, make_plan
from llmpq.errors import BadPlanError

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["def main():", "import os\n", "class Stack:\n    "]


def streamed(llm: LLM, prompt: str, params: SamplingParams) -> list[str]:
    async def pieces() -> list[str]:
        return [piece async for piece in llm.stream(prompt, params)]

    return asyncio.run(pieces())


@pytest.fixture(scope="module")
def one(demo_model):
    """Return the model on this machine's one device, in this process."""
    with LLM(demo_model, dtype="float32", max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(one):
    """Return the greedy answers of one stage."""
    return [answer.text for answer in one.generate(PROMPTS, GREEDY)]


@pytest.mark.cpu
def test_the_door_opens_without_torch_and_shows_what_there_is():
    code = (
        "import sys, llmpq; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules;"
        "print(sorted(set(dir(llmpq)) & {'LLM', 'SamplingParams', 'Plan', 'make_plan'}));"
        "from llmpq import Plan, make_plan; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['LLM', 'Plan', 'SamplingParams', 'make_plan']"
    with pytest.raises(AttributeError, match="LMM"):
        llmpq.LMM  # noqa: B018


@pytest.mark.cpu
def test_answers_have_the_names_of_vllms(one, wanted):
    (answer,) = one.generate(PROMPTS[0], GREEDY)
    assert answer.prompt == PROMPTS[0] and answer.finished
    assert answer.text == answer.outputs[0].text == wanted[0]
    assert len(answer.outputs[0].token_ids) == 24 and answer.outputs[0].finish_reason == "length"
    ids = one.generate({"prompt_token_ids": list(answer.prompt_token_ids)}, GREEDY)
    assert ids[0].text == wanted[0] and ids[0].prompt is None
    assert one.plan.stages[0].is_cpu and one.stats()["finished"] >= 2


@pytest.mark.cpu
def test_sampling_is_seeded_and_several_answers_differ(one):
    drawn = SamplingParams(n=3, max_tokens=12, seed=5)
    first, again = one.generate(PROMPTS[0], drawn), one.generate(PROMPTS[0], drawn)
    texts = [output.text for output in first[0].outputs]
    assert texts == [output.text for output in again[0].outputs] and len(set(texts)) == 3
    assert [output.index for output in first[0].outputs] == [0, 1, 2]


@pytest.mark.cpu
@pytest.mark.parametrize("stop", [None, "self", ["    def", "zzz"], "(self):\n"])
def test_a_stream_gives_the_text_of_generate(one, stop):
    params = SamplingParams(temperature=0, max_tokens=80, stop=stop)
    for prompt in PROMPTS[:2]:
        (answer,) = one.generate(prompt, params)
        pieces = streamed(one, prompt, params)
        assert "".join(pieces) == answer.text
        assert all(pieces) and (len(pieces) > 3 or stop is not None)
        if stop is not None and answer.outputs[0].finish_reason == "stop":
            assert not any(text in answer.text for text in params.stop_texts)


@pytest.mark.cpu
def test_a_reader_who_is_late_is_told_all_that_waits_at_once(one):
    params = SamplingParams(seed=3, max_tokens=20, logprobs=1, ignore_eos=True, n=2)
    (whole,) = one.generate([PROMPTS[0]], params)

    async def late():
        answers = await one.submit(PROMPTS[0], params)
        ended = 0
        while ended < 2:
            await asyncio.sleep(0.01)
            waiting = [news for together in answers._deltas._queue for news in together]
            ended = sum(news.finished is not None for news in waiting)
        return [delta async for delta in answers.deltas()]

    deltas = asyncio.run(late())
    assert [delta.index for delta in deltas] == [0, 1]
    for delta, output in zip(deltas, whole.outputs, strict=True):
        assert delta.text == output.text and delta.token_ids == output.token_ids
        assert delta.logprobs == output.logprobs and delta.finish_reason == "length"


@pytest.mark.cpu
def test_an_abort_ends_a_stream_between_steps_and_frees_its_place(one):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    async def some(prompt: str, name: str) -> str:
        text = ""
        async for piece in one.stream(prompt, params, request_id=name):
            text += piece
            if len(text) > 20 and name == "by name":
                one.abort("by name")
            if len(text) > 20 and name == "by leaving":
                break
        return text

    async def both() -> list[str]:
        return await asyncio.gather(some(PROMPTS[0], "by name"), some(PROMPTS[0], "by leaving"))

    whole = one.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    for text in asyncio.run(both()):
        assert 20 < len(text) < len(whole[0].text) and whole[0].text.startswith(text)
    one.generate(PROMPTS[1], GREEDY)
    assert one.stats()["running"] == 0 and one.stats()["requests"] == []


@pytest.mark.cpu
def test_an_abort_ends_generate_with_what_there_is(one):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    answers: list[llmpq.RequestOutput] = []
    caller = threading.Thread(target=lambda: answers.extend(one.generate(PROMPTS, params)))
    caller.start()
    while one.stats()["running"] < 3:
        time.sleep(0.01)
    for name in one.stats()["requests"]:
        one.abort(name)
    caller.join(60)
    assert [answer.outputs[0].finish_reason for answer in answers] == ["abort"] * 3
    one.abort("nobody")


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logprobs": -3}, "logprobs must be a whole number from 0 on"),
        ({"max_tokens": 0}, "max_tokens=0 asks for nothing"),
        ({"n": 2, "temperature": 0}, "n=2 greedy answers"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"temperature": -1}, "temperature must be 0"),
        ({"stop": ["a", ""]}, "stop must be a text or several"),
    ],
)
def test_parameters_that_cannot_be_met_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        SamplingParams(**options)


@pytest.mark.cpu
def test_prompts_that_can_never_run_are_refused_and_leave_the_engine_well(one, wanted):
    for prompt, said in (
        ([], "no tokens"),
        ("x y " * 900, "of the model is 1024 with the answer"),
        ([5, 99999], "token 99999 is not in the vocabulary"),
        ({"text": "a"}, r"prompt_token_ids \(and cache_salt\), got"),
        (3.5, "a text or a list of token ids"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            one.generate([prompt], GREEDY)
    with pytest.raises(ValueError, match="message 0: its content must be"):
        one.chat([{"role": "user"}])
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        one.generate(["a"], [GREEDY, GREEDY])
    assert one.generate(PROMPTS[0], GREEDY)[0].text == wanted[0]


@pytest.mark.cpu
def test_a_chat_is_a_prompt_by_the_models_template(demo_model, tmp_path, wanted):
    folder = shutil.copytree(demo_model, tmp_path / "model")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(folder, dtype="float32", max_num_seqs=2) as llm:
        talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        assert llm.chat(talks[0], GREEDY)[0].text == wanted[0]
        assert [answer.text for answer in llm.chat(talks, GREEDY)] == wanted
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(PROMPTS[0], GREEDY)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "nowhere"}, "no such model directory: 'nowhere'"),
        ({"model": ""}, "the model's name is empty"),
        ({"model": " ", "load_format": "dummy"}, "the model's name is empty"),
        ({"model": None, "plan": ""}, "the name of a JSON file is empty"),
        ({"cluster": ""}, "the name of a cluster file is empty"),
        ({}, "nothing to run"),
        ({"max_model_len": 5000}, "max_model_len must be at most 1024"),
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be"),
        ({"plan": "one", "max_model_len": 5000}, "max_model_len must be at most 1024"),
        ({"dtype": "int3"}, "dtype must be auto"),
        ({"speculate": "ngram"}, "without gamma=1..7 needs a cost model"),
        ({"gamma": 3}, "gamma=3 has no effect"),
        ({"plan": "one", "max_num_seqs": 3}, "max_num_seqs has no effect with plan="),
        ({"ray_address": "auto", "backend": "threads"}, "no effect with backend='threads'"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(demo_model, make_plan, options, said):
    options = dict(options)
    if options.get("plan") == "one":
        options["plan"] = make_plan(demo_model)
    model = options.pop("model", demo_model if options else None)
    with pytest.raises((ValueError, BadPlanError), match=said):
        LLM(model, **options)


@pytest.mark.cpu
def test_a_file_as_the_model_is_answered_with_what_to_give(demo_model, make_plan, tmp_path):
    plan = make_plan(demo_model)
    with pytest.raises(ValueError, match="^a plan is given by plan, not as the model$"):
        LLM(plan)
    path = tmp_path / "plan.json"
    plan.save_json(path)
    with pytest.raises(ValueError, match="or a model's directory; a plan is given by plan$"):
        LLM(path)
    with pytest.raises(ValueError, match=f"directory, such as its own, '{demo_model}'$"):
        LLM(demo_model / "config.json")


@pytest.mark.cpu
def test_a_plan_s_model_that_is_not_here_is_named_with_its_whole_path(
    demo_model, make_plan, tmp_path, monkeypatch
):
    """Planned by a path from another folder, which the hub knows nothing of."""
    made = make_plan(demo_model)
    for path in ("models/mine", "mine"):
        plan = made.model_copy(update={"model": made.model.model_copy(update={"path": path})})
        plan.save_json(tmp_path / "plan.json")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=f"there is no '{tmp_path}/{path}'"):
            LLM(plan=tmp_path / "plan.json")


@pytest.mark.cluster
# Three processes: test_front_door.py.
@pytest.mark.parametrize("backend", ["threads", pytest.param("auto", marks=pytest.mark.seldom)])
def test_three_stages_give_the_answers_of_one(demo_model, make_plan, wanted, tmp_path, backend):
    path = tmp_path / "plan.json"
    make_plan(demo_model, (2, 5), batch=4, prompt_len=64, gen_len=512).save_json(path)
    with LLM(plan=path, backend=backend) as llm:
        assert [answer.text for answer in llm.generate(PROMPTS, GREEDY)] == wanted
        assert "".join(streamed(llm, PROMPTS[0], GREEDY)) == wanted[0]
        pids = {stage["pid"] for stage in llm.stats()["stages"]}
        assert len(pids) == (1 if backend == "threads" else 3)


@pytest.mark.cluster
def test_a_cluster_is_planned_and_drafts_change_nothing(demo_model, wanted, tmp_path):
    cluster = tmp_path / "c.yaml"
    cluster.write_text(
        "schema: 1\nname: two\nnodes: [{name: here, devices: [{kind: CPU, count: 2, "
        "memory: 20 MiB}]}]\n"
    )
    options = {"max_model_len": 128, "max_num_seqs": 2, "dtype": "float32"}
    with LLM(demo_model, cluster=cluster, backend="threads", **options) as llm:
        assert len(llm.plan.stages) == 2 and llm.plan.predicted is not None
        plain = [answer.text for answer in llm.generate(PROMPTS, GREEDY)]
        plan = llm.plan
    with LLM(demo_model, plan=plan, backend="threads", speculate="ngram", gamma=3) as llm:
        assert [answer.text for answer in llm.generate(PROMPTS, GREEDY)] == plain


@pytest.mark.cpu
def test_plans_are_made_by_name(demo_model):
    plan = make_plan(demo_model, devices="cpu,cpu", batch=2, prompt_len=16, gen_len=8)
    assert isinstance(plan, Plan) and plan.model.path == str(demo_model)
    with pytest.raises(ValueError, match="unknown method 'best'"):
        make_plan(demo_model, devices="cpu", method="best")


@pytest.mark.cpu
def test_requests_of_any_lengths_share_a_pool_and_their_beginnings(demo_model, make_plan):
    """A plan for prompts of 32 tokens serves longer ones; a second round finds the first's."""
    trunk = [7 + n % 50 for n in range(140)]
    prompts = [trunk + [9 + n] * (1 + 30 * n) for n in range(5)]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plan = make_plan(demo_model, (3,), batch=4, prompt_len=32, gen_len=300)
    answers = []
    for on in (True, False):
        options = {"backend": "threads", "enable_prefix_caching": on, "max_num_batched_tokens": 48}
        with LLM(plan=plan, **options) as llm:
            end_s = time.monotonic() + 60
            while not llm.stats()["gauges"] and time.monotonic() < end_s:
                time.sleep(0.01)
            assert llm.stats()["cache"]["num_gpu_blocks"] == 4 * 3, "before any request"
            for _ in range(2):
                found = llm.generate(prompts, greedy)
                answers.append([answer.outputs[0].token_ids for answer in found])
            gauges = llm.stats()["gauges"]
            assert gauges["blocks"] == 4 * 3 and gauges["blocks_held"] == 0
            assert (gauges["prefix_hits"] >= 128 * 5) == on
    assert all(row == answers[0] for row in answers) and len(set(map(str, answers[0]))) == 5


@pytest.mark.cpu
def test_a_limit_of_length_goes_with_a_plan_on_cpus(demo_model, make_plan):
    plan = make_plan(demo_model, batch=2, prompt_len=32, gen_len=100)
    with LLM(plan=plan, max_model_len=40) as llm:
        (answer,) = llm.generate([[5] * 30], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 10
        with pytest.raises(ValueError, match="cache is 40 with the answer"):
            llm.generate([[5] * 40], GREEDY)


@pytest.mark.cpu
def test_answers_tell_what_was_cached_and_deadlines_end_them(one):
    prompt = [11 + n % 40 for n in range(300)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    one.generate([prompt], greedy)
    (answer,) = one.generate([prompt + [5]], greedy)
    (output,) = answer.outputs
    assert answer.num_cached_tokens == 256 and output.num_preemptions == 0
    assert 0 <= output.queue_s <= output.first_token_s <= output.total_s
    late = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, timeout_s=0.05)
    (answer,) = one.generate([[7, 8, 9]], late)
    assert answer.outputs[0].finish_reason == "abort" and len(answer.outputs[0].token_ids) < 1000
    assert one.stats()["gauges"]["blocks_held"] == 0
    with pytest.raises(ValueError, match="timeout_s must be"):
        SamplingParams(timeout_s=0)


@pytest.mark.cpu
def test_transformers_is_imported_once_it_is_open(demo_model, monkeypatch):
    """Else the caller's own import side_file it gets half a module."""
    read = []

    def slowly(directory, **options):
        time.sleep(1.0)
        read.append(directory)
        raise ValueError("no tokenizer here")

    monkeypatch.setattr("llmpq.runtime.text.request_factory.Tokenizer", slowly)
    with LLM(str(demo_model), backend="threads") as llm:
        assert len(read) == 1
        assert len(llm.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_seed_gives_its_tokens_where_steps_are_the_requests_own(demo_model, dtype):
    prompts = ["def f(x):\n"[: 3 + i] + "a " * i for i in range(8)]
    params = [SamplingParams(max_tokens=16, temperature=1.0, seed=i) for i in range(8)]
    with LLM(demo_model, dtype=dtype, max_num_seqs=1, enable_prefix_caching=False) as llm:
        together = [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]
        for i in (5, 2, 7, 0):
            assert llm.generate(prompts[i], params[i])[0].outputs[0].token_ids == together[i]


@pytest.mark.cpu
def test_prefixes_are_forgotten_and_counted_under_vllms_names(one):
    prompt = [17 + n % 23 for n in range(300)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def cached() -> int:
        (answer,) = one.generate([prompt], greedy)
        assert answer.outputs[0].token_ids == first.outputs[0].token_ids
        return answer.num_cached_tokens

    (first,) = one.generate([prompt], greedy)
    assert cached() == 256
    before = {metric.name: metric for metric in one.get_metrics()}
    assert one.reset_prefix_cache() is True
    assert cached() == 0 and cached() == 256, "it is computed again once"
    after = {metric.name: metric for metric in one.get_metrics()}
    gained = {
        name: metric.value - before[name].value
        for name, metric in after.items()
        if hasattr(metric, "value") and not name.endswith("_info")
    }
    assert gained["vllm:prefix_cache_queries"] == gained["vllm:prompt_tokens"] == 600
    assert gained["vllm:prefix_cache_hits"] == 256
    assert gained["vllm:generation_tokens"] == 8 and gained["vllm:request_success"] == 2
    assert after["vllm:num_requests_running"].value == 0
    steps = after["vllm:iteration_tokens_total"]
    assert steps.count == steps.buckets["+Inf"] and steps.sum > 600
    assert after["vllm:cache_config_info"].labels["block_size"] == "128"


@pytest.mark.cpu
def test_a_request_under_way_goes_on_while_prefixes_are_forgotten(one):
    prompt = [29 + n % 31 for n in range(140)]
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (whole,) = one.generate([prompt], greedy)
    one.reset_prefix_cache()

    async def streamed() -> str:
        text = ""
        async for new in one.stream(prompt, greedy):
            if not text:
                one.reset_prefix_cache()
            text += new
        return text

    assert asyncio.run(streamed()) == whole.outputs[0].text
    (again,) = one.generate([prompt], greedy)
    assert again.num_cached_tokens == 0, "what it computed before is not found"
    assert again.outputs[0].token_ids == whole.outputs[0].token_ids
