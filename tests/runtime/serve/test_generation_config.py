"""What generation_config.json says holds at every door: ends of answers, default sampling."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from pathlib import Path

import pytest

from llmpq import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory) -> Path:
    """The demo model with four ends, and greedy where nothing else is said."""
    folder = tmp_path_factory.mktemp("ends") / "demo"
    shutil.copytree(demo_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [0, 7, 11]}))
    said = {"eos_token_id": [0, 9], "temperature": 0.0, "top_k": 3, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module")
def served(model: Path, running):
    with running(lambda: LLM(model, backend="threads", dtype="float32")) as made:
        yield made


def post(served, path, body):
    request = urllib.request.Request(
        served.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


async def pieces(llm, params):
    return "".join([piece async for piece in llm.stream("def", params)])


@pytest.mark.parametrize("end", [0, 7, 9, 11])
def test_each_end_ends_an_answer(served, end):
    forced = {"logit_bias": {end: 100.0}, "max_tokens": 20, "min_tokens": 2, "temperature": 0}
    params = SamplingParams(**forced)
    [answer] = served.llm.generate("def", params)[0].outputs
    assert answer.finish_reason == "stop" and answer.token_ids[-1] == end
    assert len(answer.token_ids) == 3
    assert asyncio.run(pieces(served.llm, params)) == answer.text
    reply = post(served, "/v1/completions", {"prompt": "def", **forced})["choices"][0]
    assert (reply["text"], reply["finish_reason"]) == (answer.text, "stop")
    going_on = SamplingParams(logit_bias={end: 100.0}, max_tokens=4, temperature=0, ignore_eos=True)
    assert served.llm.generate("def", going_on)[0].outputs[0].token_ids == [end] * 4
    guided = SamplingParams(
        max_tokens=20, temperature=0, logit_bias={end: 100.0},
        structured_outputs=StructuredOutputsParams(choice=["ab cd"]),
    )  # fmt: skip
    [answer] = served.llm.generate("def", guided)[0].outputs
    assert (answer.text, answer.finish_reason, answer.token_ids[-1]) == ("ab cd", "stop", end)


def test_sampling_is_the_files_where_nothing_else_is_said(served):
    llm = served.llm
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.0, top_k=3, max_tokens=5
    )
    prompt = "def f(x):\n"
    greedy = SamplingParams(temperature=0, max_tokens=5)
    wanted = llm.generate(prompt, greedy)[0].text
    assert llm.generate(prompt)[0].text == wanted  # drawn twice, it would not be
    assert asyncio.run(pieces(llm, None)) == asyncio.run(pieces(llm, greedy))
    assert post(served, "/v1/completions", {"prompt": prompt})["choices"][0]["text"] == wanted
    talk = [{"role": "user", "content": "hi"}]
    wanted = llm.chat(talk, greedy)[0].text
    assert llm.chat(talk)[0].text == wanted
    chat = post(served, "/v1/chat/completions", {"messages": talk})
    assert chat["choices"][0]["message"]["content"] == wanted
    assert chat["usage"]["completion_tokens"] == 5
    reply = post(served, "/v1/responses", {"input": "hi"})
    assert reply["temperature"] == 0.0 and reply["output"][0]["content"][0]["text"] == wanted
    body = {"model": "demo-7m", "messages": talk, "max_tokens": 5}
    assert post(served, "/v1/messages", body)["content"][0]["text"] == wanted
    longer = post(served, "/v1/chat/completions", {"messages": talk, "max_tokens": 9})
    assert longer["usage"]["completion_tokens"] == 9
    drawn = {"messages": talk, "temperature": 2.0, "top_k": 0, "n": 8}
    texts = [
        c["message"]["content"] for c in post(served, "/v1/chat/completions", drawn)["choices"]
    ]
    assert len(set(texts)) > 1


def test_the_file_is_ignored_or_refused(model: Path, tmp_path: Path):
    with LLM(model, backend="threads", generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        forced = SamplingParams(logit_bias={9: 100.0}, max_tokens=4, temperature=0)
        assert llm.generate("def", forced)[0].outputs[0].finish_reason == "length"
    folder = tmp_path / "bad"
    shutil.copytree(model, folder)
    for wrong in ({"top_p": 3}, {"temperature": "hot"}, {"top_k": 1.5}):
        (folder / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=f"generation_config.json': {next(iter(wrong))} must"):
            LLM(folder)


@pytest.fixture(scope="module")
def suppressing(demo_model: Path, tmp_path_factory) -> tuple[Path, list[int]]:
    """The demo model without two tokens that it would choose, and Transformers' answer."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt = torch.tensor([[40 + n % 7 for n in range(40)]])
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    how = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(prompt, **how)[0, 40:].tolist()
    suppressed = list(dict.fromkeys(plain))[:2]
    answer = model.generate(prompt, suppress_tokens=suppressed, **how)[0, 40:].tolist()
    assert len(suppressed) == 2 and not set(suppressed) & set(answer)
    folder = tmp_path_factory.mktemp("suppressing") / "demo"
    shutil.copytree(demo_model, folder)
    said = {"suppress_tokens": suppressed, "no_repeat_ngram_size": 3}
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder, answer


@pytest.mark.parametrize(
    ("splits", "how", "drafts"),
    [
        ((), {}, None),
        ((3,), {}, "ngram"),
        pytest.param((), {"shares": [(2, 1)]}, None, marks=pytest.mark.seldom),
        ((3,), {"shares": [(1, 1), (3, 1)]}, None),
    ],
)
def test_suppressed_tokens_are_in_no_answer(suppressing, make_plan, caplog, splits, how, drafts):
    folder, wanted = suppressing
    prompt = {"prompt_token_ids": [40 + n % 7 for n in range(40)]}
    plan = make_plan(folder, splits, batch=2, prompt_len=40, gen_len=20, **how)
    asked = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    more = {"speculate": drafts, "gamma": 3} if drafts else {}
    with LLM(plan=plan, backend="threads", **more) as llm:
        found = llm.generate(prompt, asked)[0].outputs[0].token_ids
        scored = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=5)
        rows = llm.generate(prompt, scored)[0].outputs[0].logprobs
    assert found == wanted
    suppressed = json.loads((folder / "generation_config.json").read_text())["suppress_tokens"]
    assert not any(set(suppressed) & set(row) for row in rows)
    assert "no_repeat_ngram_size=3: not obeyed" in caplog.text
    with LLM(plan=plan, backend="threads", generation_config="vllm") as llm:
        assert llm.generate(prompt, asked)[0].outputs[0].token_ids != wanted
