"""Every field of every body is obeyed, is refused, or asks for nothing."""

from __future__ import annotations

import json
import re
import threading
import time
import typing
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from llmpq.runtime.requests.guides import GrammarCompiler
from llmpq.runtime.serve.messages import MessagesBody

pytestmark = pytest.mark.cpu
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
DOORS = (CHATS, COMPLETIONS, MESSAGES, RESPONSES)
ANTHROPIC = {
    "model",
    "max_tokens",
    "messages",
    "system",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "tools",
    "tool_choice",
    "metadata",
    "service_tier",
    "thinking",
    "container",
    "mcp_servers",
    "context_management",
    "output_config",
    "cache_control",
    "inference_geo",
}
OTHERS = {  # of llama.cpp, Ollama and Transformers, as their clients send them
    *("n_keep", "id_slot", "t_max_predict_ms", "timings_per_token", "return_progress"),
    *("reasoning_format", "mirostat_tau", "repeat_last_n", "dry_base", "xtc_threshold"),
    *("keep_alive", "num_ctx", "num_predict", "max_new_tokens", "max_length", "do_sample"),
    *("num_beams", "extra_body", "lora", "adapter_id"),
}
VLLM = {
    "thinking_token_budget",
    "include_reasoning",
    "parallel_tool_calls",
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "bad_words",
    "prompt_logprobs",
    "prompt_embeds",
    "logprob_token_ids",
    "allowed_token_ids",
    "echo",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "documents",
    "chat_template",
    "request_id",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "structured_outputs",
    "priority",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "cache_salt",
    "return_prompt_text",
    "kv_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "best_of",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "response_format",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "logits_processors",
    "n",
    "logprobs",
}


def bodies():
    from llmpq.runtime.serve.bodies import ChatBody, CompletionBody
    from llmpq.runtime.serve.messages import MessagesBody
    from llmpq.runtime.serve.responses import ResponsesBody

    return {CHATS: ChatBody, COMPLETIONS: CompletionBody, MESSAGES: MessagesBody,
            RESPONSES: ResponsesBody}  # fmt: skip


def published():
    """Return the fields that each API publishes; vLLM's further ones are asked of every path."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params

    def names(kind):
        return {*typing.get_type_hints(kind)}

    return {
        CHATS: names(chat_params.CompletionCreateParamsStreaming),
        COMPLETIONS: names(completion_create_params.CompletionCreateParamsStreaming),
        MESSAGES: ANTHROPIC,
        RESPONSES: names(response_create_params.ResponseCreateParamsStreaming),
    }


def asked(door, **fields):
    """Return a least body of a path, with these fields."""
    messages = [{"role": "user", "content": "def f(x): "}]
    least = {
        CHATS: {"messages": messages, "max_tokens": 6},
        COMPLETIONS: {"prompt": "def f(x): ", "max_tokens": 6},
        MESSAGES: {"model": "demo-7m", "messages": messages, "max_tokens": 6},
        RESPONSES: {"input": "def f(x): ", "max_output_tokens": 6},
    }[door]
    return least | fields


@pytest.mark.parametrize("door", DOORS)
def test_every_published_field_is_known(door):
    from llmpq.runtime.serve.fields import HINTS, REFUSED

    declared = {field.alias or name for name, field in bodies()[door].model_fields.items()}
    every = {name for body in bodies().values() for name in body.model_fields}
    unknown = (published()[door] | VLLM | OTHERS | every) - declared - HINTS - REFUSED.keys()
    assert not unknown
    assert not HINTS & REFUSED.keys()


@pytest.mark.parametrize("door", DOORS)
def test_what_is_not_obeyed_is_refused_by_name_unless_it_changes_nothing(door):
    from llmpq.runtime.serve.errors import ApiError
    from llmpq.runtime.serve.fields import HINTS, REFUSED

    kind = bodies()[door]
    for name in sorted(HINTS - kind.model_fields.keys()):
        kind.model_validate(asked(door, **{name: {"any": "thing"}}))
    for name, (neutral, instead) in REFUSED.items():
        if name in kind.model_fields:
            continue
        for value in neutral:
            kind.model_validate(asked(door, **{name: value}))
        kind.model_validate(asked(door, **{name: None}))
        for value in ({"some": "thing"}, "other", 7):
            with pytest.raises(ApiError, match=f"'{name}' is not supported here: ") as caught:
                kind.model_validate(asked(door, **{name: value}))
            assert caught.value.status == 400 and caught.value.param == name
            assert instead in caught.value.message


def post(server, door, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + door, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def said(server, door, **fields):
    """Return an answer's text and how many tokens its prompt and it have."""
    status, reply = post(server, door, asked(door, **fields))
    assert status == 200, reply
    if door == CHATS:
        text = reply["choices"][0]["message"]["content"]
    elif door == COMPLETIONS:
        text = reply["choices"][0]["text"]
    else:
        blocks = reply["content"] if door == MESSAGES else reply["output"][0]["content"]
        text = "".join(block["text"] for block in blocks)
    used, older = reply["usage"], door in (CHATS, COMPLETIONS)
    length = used["prompt_tokens" if older else "input_tokens"]
    return text, length, used["completion_tokens" if older else "output_tokens"]


GREEDY = {"temperature": 0}
GUIDES = [
    ({"guided_choice": ["red", "blue"]}, "red|blue"),
    ({"guided_regex": "[xyz]{4}"}, "[xyz]{4}"),
    ({"guided_json": {"enum": [12, 34]}}, "12|34"),
    ({"guided_grammar": 'start: "q" "r"'}, "qr"),
    ({"structured_outputs": {"choice": ["green"]}}, "green"),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-3]'}}, "a[0-3]"),
]


@pytest.mark.parametrize("door", DOORS)
def test_every_path_obeys_how_tokens_are_chosen(server, door):
    from llmpq.runtime.serve.bodies import ChoiceBody

    plain, length, count = said(server, door, **GREEDY)
    assert count == 6
    tokens = server.llm.tokenizer.encode(plain, special=False)
    named = server.llm.tokenizer.text_of
    seen = {name for fields, _ in GUIDES for name in fields}
    for fields, wanted in GUIDES:
        assert re.fullmatch(wanted, said(server, door, **fields)[0]), fields

    def check(right, **fields):
        seen.update(fields)
        text, prompt, answer = said(server, door, **fields)
        assert right(text, prompt, answer), (fields, text, prompt, answer)

    same, other = lambda text, *_: text == plain, lambda text, *_: text != plain
    end = server.llm.tokenizer.encode("", special=False) or [0]
    check(lambda t, p, n: t == named(50) * 6, logit_bias={"50": 100}, **GREEDY)
    check(lambda t, p, n: t == named(51) * 6, allowed_token_ids=[51])
    special = {"logit_bias": {"0": 100}, "ignore_eos": True, **GREEDY}
    check(lambda t, p, n: t == "", skip_special_tokens=True, **special)
    check(lambda t, p, n: t == named(0) * 6, skip_special_tokens=False, **special)
    # The model has no marks of thoughts: none could be closed.
    status, reply = post(server, door, asked(door, thinking_token_budget=2))
    assert status == 400 and "thinking_token_budget" in json.dumps(reply)
    seen.add("thinking_token_budget")
    check(same, top_k=1)
    check(same, min_p=1.0)
    check(other, bad_words=[named(tokens[0]).strip() or named(tokens[0])], **GREEDY)
    for penalty in ("frequency_penalty", "presence_penalty"):
        more = {"logit_bias": {"50": 30, "51": 29.5}}
        check(lambda t, p, n: named(51) in t, **{penalty: 2.0}, **more, **GREEDY)
    more = {"logit_bias": {"50": 30, "51": 29}}
    check(lambda t, p, n: named(51) in t, repetition_penalty=3.0, **more, **GREEDY)
    check(lambda t, p, n: n == 1, stop_token_ids=[tokens[0]], **GREEDY)
    check(lambda t, p, n: n > 1, stop_token_ids=[tokens[0]], min_tokens=3, **GREEDY)
    check(lambda t, p, n: n == 1 and t == "", logit_bias={str(end[0]): 100}, **GREEDY)
    check(lambda t, p, n: n == 6, logit_bias={str(end[0]): 100}, ignore_eos=True, **GREEDY)
    check(lambda t, p, n: p == 3, truncate_prompt_tokens=3)
    drawn = said(server, door, seed=4)[0]
    check(lambda t, p, n: t == drawn, seed=4)
    assert len({said(server, door, seed=seed)[0] for seed in range(4)}) > 1
    stop = {"stop_sequences" if door == MESSAGES else "stop": [plain[2]]}
    assert said(server, door, **stop, **GREEDY)[0] == plain[: plain.index(plain[2])]
    seen.update(stop)
    check(
        lambda t, p, n: t == plain[: plain.index(plain[2]) + 1],
        include_stop_str_in_output=True,
        **stop,
        **GREEDY,
    )
    long = " ".join(["word"] * 200)
    body = {
        CHATS: {"messages": [{"role": "user", "content": long}]},
        COMPLETIONS: {"prompt": long},
        MESSAGES: {"messages": [{"role": "user", "content": long}]},
        RESPONSES: {"input": long},
    }[door]
    used = [
        post(server, door, asked(door, **body, cache_salt=salt))[1]["usage"]
        for salt in (door, door, "another" + door)
    ]
    cached = [json.dumps(one) for one in used]
    found = [max(map(int, re.findall(r'cache[a-z_]*": (\d+)', one))) for one in cached]
    assert found[0] == found[2] == 0 < found[1]
    check(same, priority=-5, **GREEDY)  # no other request is there to overtake
    assert ChoiceBody.model_fields.keys() <= seen | {"cache_salt"}


@pytest.mark.parametrize("door", [CHATS, COMPLETIONS])
def test_scores_of_a_prompt_are_told(server, door):
    status, reply = post(server, door, asked(door, prompt_logprobs=2, **GREEDY))
    rows = (reply if door == CHATS else reply["choices"][0])["prompt_logprobs"]
    assert status == 200 and rows[0] is None and len(rows) == reply["usage"]["prompt_tokens"]
    for row in rows[1:]:
        assert 2 <= len(row) <= 3
        assert {score["rank"] for score in row.values()} >= {1, 2}
        assert all(score["logprob"] <= 0 and score["decoded_token"] for score in row.values())
    status, reply = post(server, door, asked(door, prompt_logprobs=2, stream=True))
    assert status == 400 and reply["error"]["param"] == "prompt_logprobs"
    status, reply = post(server, door, asked(door))
    assert "prompt_logprobs" not in json.dumps(reply)


@pytest.mark.parametrize("door", [CHATS, COMPLETIONS])
def test_a_streams_usage_comes_once_at_its_end_where_it_is_asked_for(server, door):
    for options in (None, {"include_usage": True}):
        body = asked(door, n=2, stream=True, stream_options=options, ignore_eos=True)
        request = urllib.request.Request(
            server.url + door, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            *chunks, done, nothing = answer.read().decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        reply = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
        empty = [chunk for chunk in reply if not chunk["choices"]]
        assert empty == ([] if options is None else reply[-1:])
        if options is not None:
            assert empty[0]["usage"]["completion_tokens"] == 12
            assert all(chunk["usage"] is None for chunk in reply[:-1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129}, "n"),
        ({"best_of": 129}, "best_of"),
        ({"n": 3, "best_of": 129}, "best_of"),
        ({"n": 129, "best_of": 129}, "n"),
        ({"n": 129, "best_of": 2}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"prompt": ["a"] * 64, "n": 9}, "n"),
        ({"prompt": ["a"] * 64, "best_of": 9}, "best_of"),
        ({"prompt": ["a"] * 64, "n": 9, "best_of": 1}, "n"),
        ({"prompt": ["a"] * 65}, "prompt"),
    ],
)
def test_answers_of_one_request_are_bounded_together(server, fields, param):
    status, reply = post(server, COMPLETIONS, asked(COMPLETIONS, **fields))
    assert status == 400 and reply["error"]["param"] == param
    message = reply["error"]["message"]
    assert (
        message.startswith(f"{param} may")
        or f"{param}={fields.get(param)}" in message
        or (param == "prompt")
    )


@pytest.mark.parametrize("door", [CHATS, COMPLETIONS, RESPONSES])
def test_options_of_a_stream_need_a_stream(server, door):
    for options in ({"include_usage": True}, {}):
        status, reply = post(server, door, asked(door, stream_options=options))
        assert status == 400 and reply["error"]["param"] == "stream_options"
    assert post(server, door, asked(door, stream_options=None))[0] == 200


def test_a_completions_format_is_kept(server):
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": [77]}}}
    assert said(server, COMPLETIONS, response_format=schema)[0] == "77"
    both = asked(COMPLETIONS, response_format=schema, guided_choice=["a"])
    status, reply = post(server, COMPLETIONS, both)
    assert status == 400 and "both say what the text must be" in reply["error"]["message"]


@pytest.mark.parametrize("door", [CHATS, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    ("field", "value"),
    [("guided_choice", []), ("guided_grammar", ""), ("structured_outputs", {"json": "{"})],
)
def test_a_guide_that_cannot_be_is_said_of_the_field_that_has_it(server, door, field, value):
    status, reply = post(server, door, asked(door, **{field: value}))
    assert (status, reply["error"]["param"]) == (400, field)
    assert reply["error"]["message"].startswith(f"{field}: ")


def test_an_answer_goes_on_with_the_last_message(server):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I say"}]
    encode = server.llm.tokenizer.encode_chat
    wanted = encode(talk, add_generation_prompt=False, continue_final_message=True)
    assert wanted != encode(talk) and server.llm.tokenizer.decode(wanted).endswith("I say")
    ask = {"messages": talk, "guided_choice": [" so"], "max_tokens": 9}
    text, length, _ = said(server, CHATS, **ask, continue_final_message=True)
    assert (text, length) == (" so", len(wanted))
    echoed = said(server, CHATS, **ask, continue_final_message=True, echo=True)
    assert echoed[0] == "I say so"
    assert said(server, MESSAGES, **ask)[:2] == (" so", len(wanted))
    counted = post(server, "/tokenize", {"messages": talk, "continue_final_message": True})[1]
    assert counted["tokens"] == wanted
    for change in (
        {"echo": True},
        {"messages": talk[:1], "continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": True},
    ):
        assert post(server, CHATS, asked(CHATS, **ask | change))[0] == 400


def test_tokens_of_messages_are_counted_as_a_chat_has_them(server):
    tool = {"type": "function", "function": {"name": "find", "description": "finds"}}
    talk = [{"role": "user", "content": "hello"}]
    for more in ({}, {"tools": [tool]}, {"add_generation_prompt": False}):
        chat = post(server, CHATS, asked(CHATS, messages=talk, **more))[1]
        reply = post(server, "/tokenize", {"messages": talk, **more, "return_token_strs": True})[1]
        assert reply["count"] == chat["usage"]["prompt_tokens"] == len(reply["token_strs"])
    assert post(server, "/tokenize", {"messages": talk, "add_special_tokens": True})[0] == 400


@pytest.mark.parametrize(
    ("door", "fields", "param"),
    [
        (CHATS, {"functions": [{"name": "a"}]}, "functions"),
        (CHATS, {"modalities": ["text", "audio"]}, "modalities"),
        (CHATS, {"allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [5], "min_tokens": 2}, "min_tokens"),
        (COMPLETIONS, {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        (COMPLETIONS, {"include_reasoning": False}, "include_reasoning"),
        (CHATS, {"thinking_token_budget": 9}, "thinking_token_budget"),
        (CHATS, {"thinking": {"type": "enabled"}}, "thinking"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"max_tokens": 5}, "max_tokens"),
        (RESPONSES, {"n": 2}, "n"),
        (RESPONSES, {"include": ["file_search_call.results"]}, "include"),
        (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text"),
        (CHATS, {"guided_json": {"$ref": "#"}}, "guided_json"),
    ],
)
def test_refusals_are_openais(server, door, fields, param):
    for stream in (False, True):
        status, reply = post(server, door, asked(door, **fields, stream=stream))
        assert status == 400 and reply["error"]["param"] == param, reply


def test_thoughts_may_be_switched_on_and_off(server):
    for kind in ("disabled", "enabled", "adaptive"):
        assert post(server, MESSAGES, asked(MESSAGES, thinking={"type": kind}))[0] == 200
    # The demo model has no marks of thoughts, so that none can be closed.
    bounded = asked(MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024})
    status, reply = post(server, MESSAGES, bounded)
    said = reply["error"]["message"]
    assert status == 400 and "<think>" in said
    assert said.startswith("thinking.budget_tokens needs") and "thinking_token_budget" not in said
    assert post(server, MESSAGES, asked(MESSAGES, thinking={"type": "on"}))[0] == 400
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "yes"},
    ]
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "b"},
    ]
    assert post(server, MESSAGES, asked(MESSAGES, messages=talk))[0] == 200
    # A turn that was cut while it thought stays a turn: templates want roles to alternate.
    for cut in (blocks[:1], blocks[:2], []):
        talk[1]["content"] = cut
        chat = MessagesBody.model_validate(asked(MESSAGES, messages=talk)).as_chat()
        thoughts = [message.reasoning_content for message in chat.messages]
        assert [message.role for message in chat.messages] == ["user", "assistant", "user"]
        assert thoughts == [None, "hm" if cut else None, None]
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    assert post(server, MESSAGES, asked(MESSAGES, tools=[server_tool]))[0] == 400


def test_a_field_that_no_api_has_is_ignored_and_logged_once(server, caplog):
    for door in (*DOORS, *DOORS):
        assert post(server, door, asked(door, quux_of_mine=1, user="me", quuz=None))[0] == 200
        assert post(server, door, asked(door, quux_of_yours=1, seed="x"))[0] == 400
    said = [r.getMessage() for r in caplog.records if "is ignored" in r.getMessage()]
    assert said == ["the field 'quux_of_mine' of a request is ignored: no API known here has it"]


def test_schemas_that_compile_for_long_hold_nobody_up(server, monkeypatch):
    began, opened, check = threading.Semaphore(0), threading.Event(), GrammarCompiler._check

    def late(self, guide):
        began.release()
        assert opened.wait(60)
        check(self, guide)

    monkeypatch.setattr(GrammarCompiler, "_check", late)
    schemas = [{"enum": [f"held {i}"]} for i in range(6)]
    with ThreadPoolExecutor(len(schemas)) as pool:
        held = [
            pool.submit(post, server, CHATS, asked(CHATS, guided_json=schema, max_tokens=30))
            for schema in schemas
        ]
        assert all(began.acquire(timeout=60) for _ in range(4))
        assert post(server, COMPLETIONS, asked(COMPLETIONS))[0] == 200
        longer = asked(COMPLETIONS, prompt="a " * 5000, truncate_prompt_tokens=5)
        assert post(server, COMPLETIONS, longer)[0] == 200, "one that is read beside the loop, too"
        opened.set()
        for schema, one in zip(schemas, held, strict=True):
            status, reply = one.result()
            assert status == 200
            assert json.loads(reply["choices"][0]["message"]["content"]) in schema["enum"]


def test_no_step_waits_for_the_last_stage_to_compile(server, monkeypatch):
    opened, began, begin = threading.Event(), threading.Event(), GrammarCompiler._begin

    def late(self, guide):
        began.set()
        return self._makers.submit(lambda: opened.wait(60) and begin(self, guide).result())

    monkeypatch.setattr(GrammarCompiler, "_begin", late)
    with ThreadPoolExecutor(1) as pool:
        guided = asked(CHATS, guided_choice=["compiled late"], max_tokens=40)
        held = pool.submit(post, server, CHATS, guided)
        assert began.wait(60)
        assert post(server, COMPLETIONS, asked(COMPLETIONS))[0] == 200
        assert not held.done()
        opened.set()
        status, reply = held.result()
        assert status == 200 and reply["choices"][0]["message"]["content"] == "compiled late"


def test_keys_of_a_pattern_end_in_json_that_fits_or_are_cut(server):
    schema = {
        "type": "object",
        "patternProperties": {"^x-[a-z]+$": {"type": "integer"}},
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "additionalProperties": False,
    }
    ends = set()
    for seed in range(8):
        body = asked(CHATS, guided_json=schema, max_tokens=64, seed=seed, temperature=1.5)
        (choice,) = post(server, CHATS, body)[1]["choices"]
        ends.add(choice["finish_reason"])
        text = choice["message"]["content"]
        assert text.startswith('{"id": ') and "  " not in text
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(text), schema)
    assert "stop" in ends


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_more_texts_than_are_looked_for_are_refused_at_once(server, field):
    many = [f"w{i}" for i in range(600_000)]
    began_s = time.monotonic()
    for door in DOORS:
        name = "stop_sequences" if (door, field) == (MESSAGES, "stop") else field
        status, reply = post(server, door, asked(door, **{name: many}))
        assert status == 400 and "may have 1024 texts, got 600000" in str(reply), reply
    biases = {"logit_bias": {f"w{i}": 1 for i in range(100_000)}}
    status, reply = post(server, CHATS, asked(CHATS, **biases))
    assert status == 400 and "1024 texts beside token ids" in str(reply), reply
    assert time.monotonic() - began_s < 60  # it took minutes
    assert post(server, COMPLETIONS, asked(COMPLETIONS, **{field: many[:1024]}))[0] == 200


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": {"enum": ["one", "two"]}},
        {"type": "json_schema", "schema": {"enum": ["one", "two"]}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["one", "two"]}}},
    ],
)
@pytest.mark.parametrize("door", [CHATS, COMPLETIONS, RESPONSES])
def test_a_format_with_a_schema_is_held_to_it(server, door, form):
    field = {"text": {"format": form}} if door == RESPONSES else {"response_format": form}
    status, reply = post(server, door, asked(door, **field))
    assert status == 200 and re.search(r'\\"(one|two)\\"', json.dumps(reply))


@pytest.mark.parametrize("form", ["json", {"type": "xml"}, {"type": "json_schema"}, {"schema": {}}])
def test_a_format_that_is_none_is_refused_by_its_name(server, form):
    status, reply = post(server, RESPONSES, asked(RESPONSES, text={"format": form}))
    assert status == 400 and reply["error"]["param"] == "text"
    assert reply["error"]["message"].startswith("'text.format' ")
