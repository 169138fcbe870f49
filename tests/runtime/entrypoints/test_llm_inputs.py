"""What `LLM` takes and refuses: conversations, prompts, parameters, one sentence for each error."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmpq import LLM, SamplingParams, StructuredOutputsParams, errors
from llmpq.runtime.requests.request_output import NO_ROOM

pytestmark = pytest.mark.cpu
SHORT = SamplingParams(temperature=0, max_tokens=3)
TEMPLATE = (
    "{% if tools %}<tools>{{ tools[0].function.name }}</tools>{% endif %}"
    "{% if not enable_thinking|default(true) %}<fast>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [{"role": "user", "content": "hi"}]
CALL = {"type": "function", "function": {"name": "find", "arguments": '{"a": 7}'}}


@pytest.fixture(scope="module")
def llm(demo_model, tmp_path_factory):
    """Return the model with a chat template."""
    folder = shutil.copytree(demo_model, tmp_path_factory.mktemp("talks") / "model")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(folder, dtype="float32", max_num_seqs=4, backend="threads") as made:
        yield made


def prompt_of(llm: LLM, messages, **how) -> str:
    (answer,) = llm.chat(messages, SHORT, **how)
    assert llm.tokenizer.encode(answer.prompt, special=False) == answer.prompt_token_ids
    return answer.prompt


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "hi"}]}, "<user>hi"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, "<user>ab"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, "<user>a"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "<assistant>no"),
        ({"role": "user", "content": []}, "<user>"),
        ({"role": "critic", "content": "a"}, "<critic>a"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "<assistant>[find 7]"),
        ({"role": "assistant", "tool_calls": [CALL]}, "<assistant>[find 7]"),
    ],
)
def test_messages_reach_the_template_as_texts(llm, message, shown):
    assert prompt_of(llm, [message]) == shown + "<assistant>"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"content": "a"}], "message 0: it needs a role"),
        ([*TALK, {"role": "", "content": "a"}], "message 1: it needs a role"),
        ([{"role": "user"}], "message 0: its content must be a text"),
        ([{"role": "user", "content": None}], "its content must be a text"),
        ([{"role": "user", "content": 5}], "its content must be a text .*got 5"),
        ([{"role": "user", "content": b"a"}], "its content must be a text"),
        ([{"role": "user", "content": {"type": "text", "text": "a"}}], "its content must be"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part needs its text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "part needs its text"),
        ([{"role": "user", "content": [5]}], "part must be a mapping"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
            "reads text only, got a content part of type 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "audio"}]}], "reads text only"),
        ([{"role": "assistant", "tool_calls": "find"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], "needs a function with a name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments of a call of 'f' must be a JSON object",
        ),
        ("hi", "a conversation is a list of messages .*got 'hi'"),
        (TALK[0], "a conversation is a list of messages"),
        (["hi"], "message 0: it must be a mapping .*got 'hi'"),
        ([], "at least one message"),
        (5, "a conversation is a list of messages .*got 5"),
        (None, "a conversation is a list of messages"),
        ([TALK, [{"role": "user", "content": 5}]], "conversation 1: message 0: its content"),
        ([TALK, []], "conversation 1: a conversation needs"),
    ],
)
def test_what_is_no_conversation_is_refused(llm, messages, said):
    with pytest.raises(ValueError, match=said):
        llm.chat(messages, SHORT)
    if isinstance(messages, list) and said.startswith("message"):
        with pytest.raises(ValueError, match=said):
            llm.tokenizer.encode_chat(messages)


def test_a_chat_takes_what_vllms_takes(llm):
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    assert prompt_of(llm, TALK, tools=tools) == "<tools>find</tools><user>hi<assistant>"
    assert prompt_of(llm, TALK, add_generation_prompt=False) == "<user>hi"
    fast = {"enable_thinking": False}
    assert prompt_of(llm, TALK, chat_template_kwargs=fast) == "<fast><user>hi<assistant>"
    own = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    assert prompt_of(llm, TALK, chat_template=own) == "hi!"
    begun = [*TALK, {"role": "assistant", "content": "Well"}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(llm, begun, **how) == "<user>hi<assistant>Well"
    with pytest.raises(ValueError, match="cannot be called 'tools'"):
        llm.chat(TALK, SHORT, chat_template_kwargs={"tools": []})


def test_several_conversations_take_parameters_each(llm):
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 4)]
    answers = llm.chat([TALK, TALK], each)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [1, 4]
    with pytest.raises(ValueError, match="got 3 sampling_params for 2 prompts"):
        llm.chat([TALK, TALK], [SHORT] * 3)


def test_a_model_without_a_template_says_so_in_python(demo_model, tmp_path):
    folder = shutil.copytree(demo_model, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with LLM(folder, backend="threads") as llm:
        with pytest.raises(ValueError, match="has no chat template") as caught:
            llm.chat(TALK)
        assert "by chat_template" in str(caught.value) and "--" not in str(caught.value)
        assert llm.chat(TALK, SHORT, chat_template="{{ messages[0].content }}")[0].prompt == "hi"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (5, "a text or a list of token ids, got 5"),
        (None, "a text or a list of token ids, got None"),
        (b"abc", "a text or a list of token ids, got b'abc'; decode it"),
        (2.5, "a text or a list of token ids"),
        (True, "a text or a list of token ids"),
        ([5, True], "prompt 0: a prompt is a text"),
        ({"prompt": 5}, "'prompt' must be a text, got 5"),
        ({"prompt_token_ids": "abc", "x": 1}, "a prompt has one of prompt, prompt_token_ids"),
        ({}, "a prompt has one of"),
        ({"prompt": None}, "a prompt has one of"),
        ({"prompt": "a", "multi_modal_data": {}}, "got .*'multi_modal_data'"),
        ({"prompt": "a", "cache_salt": 5}, "a prompt's 'cache_salt' must be a text, got 5"),
        (np.array([[0.5]]), "a text or a list of token ids"),
        (np.array(5), "a text or a list of token ids"),
        (["a", 2.5], "prompt 1: a prompt is a text"),
        (["a", "b", []], "prompt 2: the prompt has no tokens"),
        ({"prompt_token_ids": []}, "the prompt has no tokens"),
        (["a", [5, 99999]], "prompt 1: token 99999 is not in the vocabulary"),
        (["a", [5] * 2000], "prompt 1: the prompt is too long"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(llm, prompt, said):
    with pytest.raises(ValueError, match=said):
        llm.generate(prompt, SHORT)
    with pytest.raises(ValueError, match=r"^(a prompt|'prompt'|the prompt|token)"):
        llm.generate(prompt[-1:] if isinstance(prompt, list) else prompt, SHORT)
    assert llm.stats()["requests"] == []


def test_a_text_of_nothing_begins_with_the_token_that_begins_a_text(llm, demo_model):
    """As over HTTP: of demo-7m its end of text; a tokenizer that names neither has none."""
    other = LLM(demo_model, start=False)
    start = other.tokenizer.start_token_id
    for prompt in ("", {"prompt": ""}):
        prepared = other.prepare(prompt, SHORT)
        assert (prepared.prompt, prepared.tokens) == ("", (start,))
    other.close()
    assert llm.tokenizer.start_token_id is None
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        llm.generate("", SHORT)


def test_a_prompt_as_vllm_has_them_comes_with_a_salt_and_keys_that_are_none(llm):
    unused = {"multi_modal_data": None, "prompt_token_ids": None}
    for given, salt in (({"cache_salt": "x"}, "x"), ({"cache_salt": None}, "y"), ({}, "y")):
        ours = llm.prepare({"prompt": "def f(", **unused, **given}, SHORT, cache_salt="y")
        assert [request.cache_salt for request in ours.requests] == [salt]
        assert ours.tokens == llm.prepare("def f(", SHORT).tokens


def test_messages_given_as_a_prompt_are_shown_where_they_go(llm):
    async def streamed(prompt) -> str:
        return "".join([text async for text in llm.stream(prompt, SHORT)])

    said = r"; messages go to LLM.chat, or as LLM.tokenizer.encode_chat\(messages\)"
    for prompts in (TALK, [TALK], TALK[0], ["a", TALK], [TALK, TALK]):
        with pytest.raises(ValueError, match=said):
            llm.generate(prompts, SHORT)
    for prompt in (TALK, TALK[0]):
        with pytest.raises(ValueError, match=said):
            asyncio.run(streamed(prompt))
    for prompt in ([{"prompt": "a"}], {"text": "a"}, []):
        with pytest.raises(ValueError, match="prompt") as caught:
            asyncio.run(streamed(prompt))
        assert "chat" not in str(caught.value)
    (answer,) = llm.chat(TALK, SHORT)
    assert asyncio.run(streamed(llm.tokenizer.encode_chat(TALK))) == answer.outputs[0].text


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        [np.int64(5), 6, np.int32(7)],
        [np.array([5, 6, 7])],
        (5, 6, 7),
        range(5, 8),
        {"prompt_token_ids": np.array([5, 6, 7])},
        {"prompt_token_ids": [5, 6, 7], "prompt": "shown"},
        torch.tensor([[5, 6, 7], [5, 6, 7]]),
        (ids for ids in [[5, 6, 7]]),
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_token_ids_of_any_sequence_are_taken(llm, prompts):
    wanted = llm.generate([5, 6, 7], SHORT)[0].outputs[0].token_ids
    for answer in llm.generate(prompts, SHORT):
        assert answer.outputs[0].token_ids == wanted and answer.prompt_token_ids == [5, 6, 7]
        shown = prompts.get("prompt") if isinstance(prompts, dict) else None
        assert answer.prompt == shown


def test_parameters_of_tensors_are_pythons_own():
    given = {"max_tokens": 3, "seed": 7, "temperature": 0.5, "stop_token_ids": [3, 4]}
    params = SamplingParams(**{name: torch.tensor(value) for name, value in given.items()})
    assert params == SamplingParams(**given) and type(params.max_tokens) is int
    with pytest.raises(ValueError, match="temperature must be a number"):
        SamplingParams(temperature=torch.tensor([0.5, 0.7]))


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "greedy", 5, [{"max_tokens": 3}], [None, 5]])
def test_other_parameters_than_sampling_params_are_refused(llm, params):
    for door in (
        lambda: llm.generate(
            ["a"] if not isinstance(params, list) else ["a"] * len(params), params
        ),
        lambda: llm.chat(TALK if not isinstance(params, list) else [TALK] * len(params), params),
        lambda: llm.prepare("a", params),
        lambda: asyncio.run(llm.submit("a", params)),
        lambda: asyncio.run(anext(llm.stream("a", params))),
    ):
        with pytest.raises(ValueError, match="sampling_params must be a SamplingParams"):
            door()


def test_an_abort_takes_several_names(llm):
    long = SamplingParams(max_tokens=900, ignore_eos=True)

    async def work() -> list[str | None]:
        begun = [await llm.submit("a", long, request_id=name) for name in "kl"]
        llm.abort(["k", "l", "ended"])
        return [[d.finish_reason async for d in one.deltas()][-1] for one in begun]

    assert asyncio.run(work()) == ["abort", "abort"]
    for wrong in (5, None, [5]):
        with pytest.raises(ValueError, match="request_id must be a text or a list"):
            llm.abort(wrong)


def test_stop_tokens_outside_the_vocabulary_are_refused(llm):
    for wrong in (99999, -1, llm.model_spec.vocab):
        with pytest.raises(ValueError, match=f"stop_token_ids names token {wrong}"):
            llm.generate("a", SamplingParams(stop_token_ids=[wrong]))


def test_the_longest_request_is_what_may_be_asked_for(demo_model, make_plan, llm):
    most = llm.max_model_len
    assert most == llm.model_spec.max_positions == 1024
    (answer,) = llm.generate([[5] * (most - 2)], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 2
    with pytest.raises(ValueError, match="is 1024 with the answer"):
        llm.generate([[5] * most], SHORT)
    plan = make_plan(demo_model, batch=32, prompt_len=32, gen_len=100)
    with LLM(plan=plan, start=False) as planned:
        assert planned.max_model_len == most


@pytest.mark.parametrize("limit", [1024, 100])
def test_what_gives_a_long_prompt_room_is_said_where_anything_does(demo_model, limit):
    """Not where the model has no more positions: tokens, texts, conversations and scored ones."""
    said = r"\(it has so many positions\); shorten it$"
    if limit < 1024:
        said = "; shorten it, or give more with max_model_len or another plan$"
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    long = "word " * 9000
    with LLM(demo_model, max_model_len=limit, start=False) as other:
        assert other.max_model_len == limit
        for prompt, params in (([5] * limit, SHORT), (long, SHORT), ([5] * (limit + 2), scored)):
            with pytest.raises(ValueError, match=rf"is {limit} with the answer.*{said}"):
                other.prepare(prompt, params)
        with pytest.raises(ValueError, match=rf"is {limit} with the answer.*{said}"):
            other.chat([{"role": "user", "content": long}], chat_template=TEMPLATE)
        assert other.prepare([5] * (limit - 1), SHORT).tokens


def test_a_model_without_tokenizer_files_runs_on_token_ids(demo_model, tmp_path):
    folder = shutil.copytree(demo_model, tmp_path / "model")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with LLM(folder, backend="threads") as llm:
        scored = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
        (answer,) = llm.generate([5, 6, 7], scored)
        assert len(answer.outputs[0].logprobs) == 3 and len(answer.prompt_logprobs) == 3
        assert answer.text == ""
        guided = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
        for params in (guided, SamplingParams(bad_words=["a"]), SamplingParams(stop="a")):
            with pytest.raises(ValueError, match="no tokenizer.json, nor") as caught:
                llm.generate([5, 6, 7], params)
            assert "Errno" not in str(caught.value)


@pytest.mark.parametrize("priority", ["x", 1.5, True, None])
def test_a_priority_that_is_no_whole_number_is_refused_and_the_engine_goes_on(demo_model, priority):
    async def ask() -> None:
        await llm.submit("a", SHORT, priority=priority)

    with LLM(demo_model, backend="threads", max_num_seqs=1) as llm:
        said = "priority must be a whole number, got"
        with pytest.raises(ValueError, match=f"prompt 1: {said}"):
            llm.generate(["a", "b"], SHORT, priority=[1, priority])
        with pytest.raises(ValueError, match=said):
            asyncio.run(ask())
        with pytest.raises(ValueError, match=said):
            llm.prepare("a", SHORT, priority=priority)
        with pytest.raises(ValueError, match="priority must be a list, one for each prompt, got 3"):
            llm.generate("a", SHORT, priority=3)
        ranks = np.array([2, 1])
        assert [answer.prompt for answer in llm.generate(["a", "b"], SHORT, priority=ranks)]


@pytest.mark.parametrize("given", [5, b"z", ["a"]])
@pytest.mark.parametrize("name", ["request_id", "cache_salt"])
def test_what_names_a_request_is_a_text(demo_model, name, given):
    llm = LLM(demo_model, start=False)
    with pytest.raises(ValueError, match=f"{name} must be a text, got "):
        llm.prepare("a", SHORT, **{name: given})


def test_a_text_is_no_list_of_token_ids(demo_model):
    llm = LLM(demo_model, start=False)
    with pytest.raises(ValueError, match="'prompt_token_ids' must be a list of .* got 'a'; a text"):
        llm.prepare({"prompt_token_ids": "a"}, SHORT)
    assert llm.prepare({"prompt": "a", "prompt_token_ids": None}, SHORT).prompt == "a"
    with pytest.raises(ValueError, match="'prompt_token_ids' must be"):
        llm.prepare({"prompt": "a", "prompt_token_ids": "a"}, SHORT)


class Frame:
    """A table as pandas and polars have it: it yields the names of its columns, or columns."""

    columns = ("prompt",)

    def __iter__(self):
        """Yield the names."""
        return iter(self.columns)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (Frame(), "a table is no list of prompts"),
        ({"a", "b"}, "a set of prompts has no order"),
        (frozenset({"a"}), "a set of prompts has no order"),
    ],
)
def test_what_has_no_order_of_prompts_is_refused(llm, prompts, said):
    with pytest.raises(ValueError, match=said):
        llm.generate(prompts, SHORT)


def test_answers_are_drawn_without_the_random_numbers_of_the_program(llm):
    random.seed(0)
    before, drawn = random.getstate(), SamplingParams(max_tokens=2)
    seeds = {llm.prepare("a", drawn).requests[0].sampling.seed for _ in range(4)}
    assert random.getstate() == before and len(seeds) == 4


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"chat_template": "templates/chat.jinja"}, "a chat template is Jinja"),
        ({"chat_template": 5}, "a chat template is Jinja"),
        ({"chat_template_kwargs": "fast"}, "a chat template's options are a mapping"),
    ],
)
def test_a_template_that_shows_no_message_is_refused(llm, how, said):
    with pytest.raises(ValueError, match=said):
        llm.chat(TALK, SHORT, **how)


def test_what_was_not_prepared_is_refused(llm):
    with pytest.raises(ValueError, match="prompts must come from LLM.prepare, got 'a'"):
        list(llm.as_completed(["a"]))


@pytest.mark.parametrize("start", [False, True])
def test_a_closed_llm_stays_closed(demo_model, start):
    made = LLM(demo_model, start=start, backend="threads")
    made.close()
    assert "closed" in repr(made)
    for call in (made.start, lambda: made.generate("a", SHORT)):
        with pytest.raises(RuntimeError, match="this LLM is closed; make another one"):
            call()


def test_errors_that_services_answer_are_where_errors_are(llm):
    with pytest.raises(errors.ContextLengthError, match="too long"):
        llm.generate([[1] * 5000], SHORT)
    broken = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(errors.GuideError, match="the regex cannot be followed"):
        llm.generate("a", broken)


@pytest.mark.parametrize("most", [5000, None])
def test_an_answer_that_finds_no_more_room_says_so(llm, most):
    prompt = [5] * (llm.max_model_len - 3)
    params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
    (cut,), (enough,) = (
        llm.generate([prompt], own)[0].outputs for own in (params, replace(params, max_tokens=3))
    )
    assert (len(cut.token_ids), cut.finish_reason, cut.stop_reason) == (3, "length", NO_ROOM)
    assert (enough.finish_reason, enough.stop_reason) == ("length", None)
