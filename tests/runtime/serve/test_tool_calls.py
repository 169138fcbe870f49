"""Calls of tools through the server: forced ones fit, cut ones are none, histories are read."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import jsonschema
import pytest

pytestmark = pytest.mark.cpu
CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CLOCK = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'
LIST = {
    "type": "object",
    "properties": {"head": {"$ref": "#/$defs/node"}},
    "required": ["head"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}
TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
    "required": ["kids"],
    "additionalProperties": False,
}
SCHEMAS = {"list": LIST, "tree": TREE}


@pytest.fixture(scope="module")
def hermes(two_stages, running):
    with running(two_stages, tool_parser="hermes", reasoning_parser="think") as made:
        yield made


def post(server, path, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def tool(name, schema=None):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def chat(**more):
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 150} | more


def test_any_of_several_tools_is_called_with_arguments_of_its_own_schema(hermes):
    tools, called = [tool(name, schema) for name, schema in SCHEMAS.items()], set()
    for seed in range(6):
        body = chat(tools=tools, tool_choice="required", seed=seed, temperature=1.5)
        status, text = post(hermes, CHATS, body)
        (choice,) = json.loads(text)["choices"]
        assert status == 200
        if choice["finish_reason"] == "length":
            assert choice["message"]["content"] is None and "tool_calls" not in choice["message"]
            continue
        function = choice["message"]["tool_calls"][0]["function"]
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
        called.add(function["name"])
    assert called
    digit = {
        "type": "object",
        "properties": {"v": {"$ref": "#/$defs/d"}},
        "required": ["v"],
        "additionalProperties": False,
        "$defs": {"d": {"enum": [1, 2]}},
    }
    formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1]}}}
    both = chat(tools=[tool("go")], tool_choice="required", response_format=formatted)
    message = json.loads(post(hermes, CHATS, both)[1])["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "go", "arguments": "{}"}
    body = {
        "model": "demo-7m",
        "max_tokens": 150,
        "tool_choice": {"type": "any"},
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"name": name, "input_schema": digit} for name in ("one", "other")],
    }
    (block,) = json.loads(post(hermes, MESSAGES, body)[1])["content"]
    assert block["name"] in ("one", "other") and block["input"]["v"] in (1, 2)


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        (
            {"tools": [tool("a"), tool("b", {"$ref": "#"})], "tool_choice": "required"},
            "tools",
            "parameters of the tool 'b' cannot be followed: .* back to itself",
        ),
        ({"tools": [tool("a", {"not": {}})], "tool_choice": tool("a")}, "tools", "keywords not"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
            "response_format",
            "back to itself",
        ),
        ({"guided_json": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}, "guided_json", "anyOf"),
        ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs", "grammar cannot"),
        (
            {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
            "guided_choice",
            "both say what the text must be",
        ),
        (
            {"guided_choice": ["a"], "tools": [tool("a")], "tool_choice": "required"},
            "tool_choice",
            "leave one of them out",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_the_fields_name(hermes, change, field, said):
    import re

    for stream in (False, True):
        status, text = post(hermes, CHATS, chat(**change, stream=stream))
        error = json.loads(text)["error"]
        assert status == 400 and error["param"] == field, text
        assert re.search(said, error["message"])


@pytest.mark.parametrize("choice", ["required", tool("list")])
def test_a_forced_call_that_a_stop_text_cuts_is_none(hermes, choice):
    body = chat(tools=[tool("list", LIST)], tool_choice=choice, stop=[":"])
    for stream in (False, True):
        status, text = post(hermes, CHATS, body | {"stream": stream})
        assert status == 200 and "tool_calls" not in text, text
        ends = streamed(text)[-1]["choices"] if stream else json.loads(text)["choices"]
        assert ends[0]["finish_reason"] == "stop" and ends[0]["stop_reason"] == ":"
    kept = json.loads(post(hermes, CHATS, body | {"include_stop_str_in_output": True})[1])
    assert "tool_calls" not in kept["choices"][0]["message"]


@pytest.mark.parametrize("kind", ["named", "required"])
def test_a_forced_call_that_the_limit_cuts_is_none(hermes, kind):
    choice = tool("list") if kind == "named" else "required"
    body = chat(tools=[tool("list", LIST)], tool_choice=choice, max_tokens=3)
    (reply,) = json.loads(post(hermes, CHATS, body)[1])["choices"]
    assert reply["finish_reason"] == "length"
    assert reply["message"]["content"] is None and "tool_calls" not in reply["message"]
    anthropic = {"type": "tool", "name": "list"} if kind == "named" else {"type": "any"}
    body = {
        "model": "demo-7m",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"name": "list", "input_schema": LIST}],
        "tool_choice": anthropic,
    }
    reply = json.loads(post(hermes, MESSAGES, body)[1])
    assert reply["stop_reason"] == "max_tokens" and reply["content"] == []
    events = post(hermes, MESSAGES, body | {"stream": True})[1]
    assert '"stop_reason":"max_tokens"' in events and "tool_use" not in events
    parts = streamed(
        post(
            hermes,
            CHATS,
            chat(tools=[tool("list", LIST)], tool_choice=choice, max_tokens=3, stream=True),
        )[1]
    )
    assert not any("tool_calls" in c["delta"] for part in parts for c in part["choices"])
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    body = {
        "input": "a",
        "max_output_tokens": 3,
        "tools": [{"type": "function", "name": "list", "parameters": LIST}],
        "tool_choice": {"type": "function", "name": "list"} if kind == "named" else "required",
    }
    reply = json.loads(post(hermes, RESPONSES, body)[1])
    assert reply["status"] == "incomplete" and reply["output"] == []
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    events = streamed(post(hermes, RESPONSES, body | {"stream": True})[1])
    assert events[-1]["type"] == "response.incomplete"
    assert not any("function_call" in event["type"] for event in events)
    # A conversation goes on from it without the call.
    body = {"input": "b", "previous_response_id": events[-1]["response"]["id"]}
    assert post(hermes, RESPONSES, body | {"max_output_tokens": 1})[0] == 200


def says(text, **more):
    return chat(guided_choice=[text], tools=[tool("clock")], **more)


def streamed(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_thoughts_leave_apart_from_the_text_whole_and_streamed(hermes):
    thought = f"I could write {CLOCK} here"
    said = f"<think>\n{thought}\n</think>\n\ndone"
    for choice in ("auto", "none"):
        body = says(said, tool_choice=choice)
        answer = json.loads(post(hermes, CHATS, body)[1])
        (reply,) = answer["choices"]
        message, spent = reply["message"], answer["usage"]["completion_tokens_details"]
        assert message["content"] == "done" and reply["finish_reason"] == "stop"
        assert message["reasoning_content"] == thought and "tool_calls" not in message
        assert 0 < spent["reasoning_tokens"] < answer["usage"]["completion_tokens"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        parts = streamed(post(hermes, CHATS, body | options)[1])
        assert parts[-1]["usage"]["completion_tokens_details"] == spent
        deltas = [choice["delta"] for part in parts for choice in part["choices"]]
        assert "".join(d.get("content") or "" for d in deltas) == "done"
        assert "".join(d.get("reasoning_content") or "" for d in deltas) == thought
        assert not any("tool_calls" in delta for delta in deltas)
    (reply,) = json.loads(post(hermes, CHATS, says(said, include_reasoning=False))[1])["choices"]
    assert reply["message"]["content"] == "done" and "reasoning_content" not in reply["message"]
    (reply,) = json.loads(post(hermes, CHATS, says(said, separate_reasoning=False))[1])["choices"]
    assert reply["message"]["content"] == said and "reasoning_content" not in reply["message"]


def test_thoughts_are_blocks_of_anthropics_api(hermes):
    said = f"<think>hm</think>\n\nso{CLOCK}"
    body = {
        "model": "demo-7m", "max_tokens": 150, "messages": [{"role": "user", "content": "a"}],
        "tools": [{"name": "clock", "input_schema": {"type": "object"}}],
        "guided_choice": [said],
    }  # fmt: skip
    content = json.loads(post(hermes, MESSAGES, body)[1])["content"]
    assert content[0] == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert content[1] == {"type": "text", "text": "so"} and content[2]["type"] == "tool_use"
    text = post(hermes, MESSAGES, body | {"stream": True})[1]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    kinds = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d["thinking"] for d in deltas if d["type"] == "thinking_delta") == "hm"
    assert [d["type"] for d in deltas].count("signature_delta") == 1


def test_deltas_of_calls_are_what_clients_join(hermes):
    import openai

    said = f"two: {CLOCK}\n{CLOCK}"
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none") as client:
        ask = {
            "model": "demo-7m",
            "messages": [{"role": "user", "content": "a"}],
            "tools": [tool("clock", {"type": "object", "properties": {}})],
            "extra_body": {"guided_choice": [said]},
        }
        whole = client.chat.completions.create(**ask).choices[0]
        with client.chat.completions.stream(**ask) as stream:
            joined = stream.get_final_completion().choices[0]
    assert joined.message.content.strip() == whole.message.content.strip() == "two:"
    calls = [[c.function.arguments for c in m.message.tool_calls] for m in (joined, whole)]
    assert calls[0] == calls[1] == ['{"zone": "UTC"}'] * 2
    assert joined.finish_reason == whole.finish_reason == "tool_calls"
    parts = streamed(post(hermes, CHATS, says(said, stream=True))[1])
    assert len({part["id"] for part in parts}) == 1
    deltas = [choice["delta"] for part in parts for choice in part["choices"]]
    assert deltas[0]["role"] == "assistant" and deltas[-1] == {}
    seen = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in seen] == [0, 1]
    assert len({call["id"] for call in seen}) == 2
    digit = {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"]}
    digit |= {"additionalProperties": False}
    named = chat(tools=[tool("pick", digit)], tool_choice=tool("pick"), stream=True)
    parts = streamed(post(hermes, CHATS, named)[1])
    (call,) = [
        call
        for part in parts
        for choice in part["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert call["id"] and call["type"] == "function" and call["function"]["name"] == "pick"
    jsonschema.validate(json.loads(call["function"]["arguments"]), digit)


def test_one_call_is_answered_where_no_more_are_wanted(hermes):
    said = f"{CLOCK}{CLOCK}"
    for wanted, count in ((False, 1), (True, 2)):
        body = says(said, parallel_tool_calls=wanted)
        message = json.loads(post(hermes, CHATS, body)[1])["choices"][0]["message"]
        assert len(message["tool_calls"]) == count


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_the_allowed_tools_are_called(hermes):
    tools = [tool(name) for name in ("clock", "list", "tree")]
    for seed in range(4):
        body = chat(tools=tools, seed=seed, temperature=1.5)
        only = post(hermes, CHATS, body | {"tool_choice": allowed("required", "list")})
        twin = post(hermes, CHATS, body | {"tools": [tool("list")], "tool_choice": "required"})
        (one,), (two,) = (json.loads(text)["choices"] for _, text in (only, twin))
        assert one["finish_reason"] == two["finish_reason"]
        called = [
            [call["function"] for call in choice["message"].get("tool_calls", ())]
            for choice in (one, two)
        ]
        assert called[0] == called[1] and all(call["name"] == "list" for call in called[0])
    answer = post(hermes, CHATS, says(CLOCK, tool_choice=allowed("auto", "clock")))[1]
    assert json.loads(answer)["choices"][0]["message"]["tool_calls"]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (allowed("required", "nope"), "names 'nope', which is not one of the tools clock"),
        (allowed("auto", "clock", "nope"), "names 'nope', which is not one of the tools clock"),
        (allowed("auto"), "at least 1"),
        (allowed("none", "clock"), "needs a mode, auto or required"),
    ],
)
def test_a_choice_of_tools_that_are_not_there_is_refused(hermes, choice, said):
    status, text = post(hermes, CHATS, chat(tools=[tool("clock")], tool_choice=choice))
    assert status == 400 and said in json.loads(text)["error"]["message"], text
    answer = {"model": "demo-7m", "input": "a", "tools": [{"type": "function", "name": "clock"}]}
    names = [one["function"]["name"] for one in choice["allowed_tools"]["tools"]]
    answer["tool_choice"] = {
        "type": "allowed_tools",
        "mode": choice["allowed_tools"]["mode"],
        "tools": [{"type": "function", "name": name} for name in names],
    }
    status, text = post(hermes, RESPONSES, answer)
    assert status == 400 and said in json.loads(text)["error"]["message"], text


STRING = {"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string"}, "type 'string'"),
        ({"type": ["string", "null"]}, "type ['string', 'null']"),
        ({"type": "array", "items": {}}, "type 'array'"),
        (STRING, "type 'string'"),
        ({"anyOf": [{"type": "string"}, {"enum": [1, 2]}]}, "type 'string' or values [1, 2]"),
        ({"allOf": [{"type": "object"}, {"const": 3}]}, "values [3]"),
        (True, "expected an object, got true"),
        ([], "expected an object, got []"),
    ],
)
@pytest.mark.parametrize("forced", [False, True])
def test_arguments_of_a_tool_are_an_object_at_every_door(hermes, schema, said, forced):
    choice = {
        CHATS: tool("a") if forced else "auto",
        RESPONSES: {"type": "function", "name": "a"} if forced else "auto",
        MESSAGES: {"type": "tool", "name": "a"} if forced else {"type": "auto"},
    }
    tools = {
        CHATS: tool("a", schema),
        RESPONSES: {"type": "function", "name": "a", "parameters": schema},
        MESSAGES: {"name": "a", "input_schema": schema},
    }
    for path in (CHATS, RESPONSES, MESSAGES):
        own = {"input": "a"} if path == RESPONSES else chat()
        body = {**own, "model": "demo-7m", "tools": [tools[path]], "tool_choice": choice[path]}
        status, text = post(hermes, path, body)
        assert status == 400 and said in json.loads(text)["error"]["message"], text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["object", "null"], "properties": {"n": {"const": 1}}, "required": ["n"]},
        {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]},
        {"$ref": "#/$defs/n"},
    ],
)
def test_a_forced_tools_arguments_are_the_object_that_its_schema_allows(hermes, schema):
    one = {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"]}
    schema = {**schema, "additionalProperties": False} if "type" in schema else schema
    schema = {**schema, "$defs": {"n": {**one, "additionalProperties": False}}}
    status, text = post(hermes, CHATS, chat(tools=[tool("a", schema)], tool_choice=tool("a")))
    (choice,) = json.loads(text)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert status == 200 and json.loads(call["function"]["arguments"]) == {"n": 1}


@pytest.mark.parametrize(
    ("path", "kind"),
    [(RESPONSES, "custom"), (RESPONSES, "local_shell"), (MESSAGES, "web_search_20250305")],
)
def test_tools_that_are_no_functions_are_named(hermes, path, kind):
    body = {"model": "demo-7m", "tools": [{"type": kind, "name": "a"}]}
    status, text = post(hermes, path, body | ({"input": "a"} if path == RESPONSES else chat()))
    assert status == 400
    assert f"tools of type '{kind}' are not known here" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ({"content": None, "tool_calls": []}, 200),
        ({"content": "x", "tool_calls": None}, 200),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": '{"a": 1}'}}]}, 200),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": {"a": 1}}}]}, 200),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": ""}}]}, 200),
        ({"tool_calls": [{"function": {"name": "clock"}}]}, 200),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": None}}]}, 200),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": "null"}}]}, 200),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": "[1]"}}]}, 400),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": '"zone"'}}]}, 400),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": r'"{\"a\": 1}"'}}]}, 400),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": "{"}}]}, 400),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": "zone=UTC"}}]}, 400),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": "[" * 9999}}]}, 400),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": "{'a': 1}"}}]}, 400),
        ({"tool_calls": [{"function": {"name": "clock", "arguments": '{"a": NaN}'}}]}, 400),
    ],
)
def test_calls_of_a_history_are_read_or_refused(hermes, message, status):
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", **message},
        {"role": "tool", "content": "5", "tool_call_id": "x"},
    ]
    for stream in (False, True):
        got, text = post(hermes, CHATS, chat(messages=talk, max_tokens=1, stream=stream))
        assert got == status, text
        if status == 400:
            assert "must be a JSON object, got" in json.loads(text)["error"]["message"]
    inputs = {"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": "{"}]}
    body = {"model": "demo-7m", "max_tokens": 1, "messages": [inputs]}
    assert post(hermes, MESSAGES, body)[0] == 400


TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock"}}]},
    {"role": "tool", "name": "clock", "content": "noon"},
]


@pytest.mark.parametrize("arguments", ["", "{}", '{"zone": "UTC"}', {"zone": "UTC"}])
def test_the_older_form_of_a_call_in_a_history_is_a_call(hermes, arguments):
    old = {"name": "clock", "arguments": arguments}
    new = {"tool_calls": [{"type": "function", "function": old}]}
    turns = [
        {"role": "assistant", "content": None} | said for said in ({"function_call": old}, new)
    ]
    result = [{"role": role, "name": "clock", "content": "noon"} for role in ("function", "tool")]
    tokens = [
        post(hermes, "/tokenize", {"model": "demo-7m", "messages": [TALK[0], turn, answer]})
        for turn, answer in zip(turns, result, strict=True)
    ]
    assert tokens[0] == tokens[1] and tokens[0][0] == 200
    without = [TALK[0], {"role": "assistant", "content": None}, result[1]]
    assert post(hermes, "/tokenize", {"model": "demo-7m", "messages": without}) != tokens[0]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"function_call": {"name": "clock", "arguments": "{"}}, "must be a JSON object, got '{'"),
        ({"function_call": {"arguments": "{}"}}, "name"),
        ({"function_call": "clock"}, "function_call"),
        ({**TALK[1], "function_call": {"name": "clock"}}, "both tool_calls and function_call"),
        ({"audio": {"id": "audio_1"}}, "'audio' of a message is not supported here"),
        ({"content": "b", "images": ["aGk="]}, "'images' of a message is not supported here"),
        ({"content": "b", "prefix": True}, "set 'continue_final_message': true"),
        ({"content": "b", "partial": True}, "set 'continue_final_message': true"),
    ],
)
def test_what_a_turn_has_and_no_template_sees_is_refused(hermes, turn, said):
    talk = [TALK[0], {"role": "assistant", **turn}, TALK[0]]
    for stream in (False, True):
        status, text = post(hermes, CHATS, chat(messages=talk, max_tokens=1, stream=stream))
        assert status == 400 and said in json.loads(text)["error"]["message"]


def test_turns_come_back_with_all_fields_of_an_answer(hermes):
    nothing = {
        "audio": None,
        "function_call": None,
        "annotations": [],
        "images": [],
        "refusal": None,
    }
    asked = [
        [TALK[0], {"role": "assistant", "content": "no"} | more | {"prefix": False}]
        for more in ({}, nothing, {"content": None, "refusal": "no"})
    ]
    tokens = [post(hermes, "/tokenize", {"model": "demo-7m", "messages": talk}) for talk in asked]
    assert tokens[0] == tokens[1] == tokens[2] and tokens[0][0] == 200


@pytest.mark.parametrize("given", [[], 0, False, ""])
def test_arguments_that_are_no_object_are_not_taken_for_none(hermes, given):
    use = {"type": "tool_use", "id": "c", "name": "clock", "input": given}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [use]}]
    assert post(hermes, MESSAGES, {"model": "demo-7m", "max_tokens": 1, "messages": talk})[0] == 400
    if given != "":
        call = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": given}
        body = {"model": "demo-7m", "max_output_tokens": 1, "input": [talk[0], call]}
        assert post(hermes, RESPONSES, body)[0] == 400


@pytest.mark.parametrize("said", [CLOCK, CLOCK * 2, f"two: {CLOCK}", "none", "!nothing"])
def test_a_streams_content_is_the_whole_answers(hermes, said):
    ask = says(said, stop=["!"])
    whole = json.loads(post(hermes, CHATS, ask)[1])["choices"][0]["message"]
    parts = streamed(post(hermes, CHATS, ask | {"stream": True})[1])
    texts = [
        choice["delta"]["content"]
        for part in parts
        for choice in part["choices"]
        if "content" in choice["delta"]
    ]
    assert ("".join(texts) if texts else None) == whole["content"]


def test_a_template_that_raises_is_a_refusal_and_the_next_is_answered(two_stages, running):
    template = (
        "{%- for m in messages %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{%- endif %}{{ m['content'] }}{%- endfor %}"
    )
    with running(two_stages, chat_template=template) as server:
        twice = [{"role": "user", "content": "a"}] * 2
        for stream in (False, True):
            status, text = post(server, CHATS, chat(messages=twice, stream=stream))
            error = json.loads(text)["error"]
            assert status == 400 and error["type"] == "invalid_request_error"
            assert "roles must alternate" in error["message"]
        assert post(server, CHATS, chat(max_tokens=1))[0] == 200
        broken = chat(messages=[{"role": "user", "content": "a"}], max_tokens=1)
        assert post(server, CHATS, broken | {"chat_template_kwargs": {"a": 1}})[0] == 200
