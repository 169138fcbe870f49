"""Anthropic's messages and OpenAI's responses: the same answers in their forms."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from llmpq import SamplingParams

pytestmark = pytest.mark.cpu
ASK = {
    "model": "demo-7m", "max_tokens": 8, "temperature": 0, "system": "You code.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
}  # fmt: skip
PERSON = {
    "type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"], "additionalProperties": False,
}  # fmt: skip


def wanted(server) -> str:
    talk = [{"role": "system", "content": "You code."}, {"role": "user", "content": "hi"}]
    tokens = server.llm.tokenizer.encode_chat(talk)
    return server.llm.generate([tokens], SamplingParams(temperature=0, max_tokens=8))[0].text


def post(server, body, path="/v1/messages"):
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(text):
    pairs = [block.split("\n") for block in text.strip().split("\n\n")]
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in pairs)
    return [json.loads(data[6:]) for _, data in pairs]


def test_a_message_is_a_chat(server):
    status, text = post(server, ASK)
    reply = json.loads(text)
    assert status == 200 and reply["content"] == [{"type": "text", "text": wanted(server)}]
    assert reply["stop_reason"] == "max_tokens" and reply["usage"]["output_tokens"] == 8
    status, text = post(server, ASK | {"stream": True})
    got = events(text)
    assert [got[0]["type"], got[-1]["type"]] == ["message_start", "message_stop"]
    pieces = [e["delta"]["text"] for e in got if e["type"] == "content_block_delta"]
    assert "".join(pieces) == wanted(server) and got[-2]["usage"]["output_tokens"] == 8
    stop = wanted(server)[2:4]
    ended = json.loads(post(server, ASK | {"stop_sequences": [stop]})[1])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)


def test_tokens_are_counted_before_and_where_they_were_found_after(server):
    long = ASK | {"system": "You count. " * 40}
    status, text = post(server, long | {"max_tokens": None}, "/v1/messages/count_tokens")
    count = json.loads(text)["input_tokens"]
    assert status == 200
    post(server, long)
    whole = json.loads(post(server, long)[1])["usage"]
    ended = events(post(server, long | {"stream": True})[1])[-2]["usage"]
    assert whole == ended and whole["cache_read_input_tokens"] > 0
    assert whole["cache_read_input_tokens"] + whole["input_tokens"] == count
    ask = {"input": "hi", "instructions": "You code."}
    reply = json.loads(post(server, ask, "/v1/responses/input_tokens")[1])
    plain = json.loads(post(server, ASK, "/v1/messages/count_tokens")[1])
    assert reply == {"object": "response.input_tokens", **plain}
    assert post(server, ASK | {"model": "other"}, "/v1/messages/count_tokens")[0] == 404


@pytest.mark.parametrize("form", ["output_config", "output_format"])
def test_a_messages_format_is_kept(server, form):
    wanted = {"type": "json_schema", "schema": PERSON}
    given = {"format": wanted} if form == "output_config" else wanted
    reply = json.loads(post(server, ASK | {form: given, "max_tokens": 60})[1])
    assert 0 <= json.loads(reply["content"][0]["text"])["age"] <= 9
    given = {"format": {"type": "xml"}} if form == "output_config" else {"type": "xml"}
    status, text = post(server, ASK | {form: given})
    assert status == 400 and "json_schema" in json.loads(text)["error"]["message"]


def test_a_tool_that_must_be_called_is(server):
    tool = {"name": "find", "description": "finds", "input_schema": PERSON}
    ask = ASK | {"tools": [tool], "tool_choice": {"type": "tool", "name": "find"}, "max_tokens": 60}
    reply = json.loads(post(server, ask)[1])
    (block,) = reply["content"]
    assert block["type"] == "tool_use" and 0 <= block["input"]["age"] <= 9
    assert reply["stop_reason"] == "tool_use"
    got = events(post(server, ask | {"stream": True})[1])
    start = next(e for e in got if e["type"] == "content_block_start")
    assert start["content_block"]["name"] == "find"
    parts = [e["delta"]["partial_json"] for e in got if e["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == block["input"]
    talk = [*ASK["messages"], {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [{"type": "tool_result", "content": "42",
                                          "tool_use_id": block["id"]}]}]  # fmt: skip
    assert post(server, ASK | {"messages": talk})[0] == 200


def test_errors_are_anthropics(server):
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    for change, status, said in (
        ({"model": "other"}, 404, "does not exist"),
        ({"messages": []}, 400, "'messages'"),
        ({"messages": image}, 400, "reads text only"),
        ({"temperature": 2}, 400, "'temperature'"),
        ({"tool_choice": {"type": "some"}}, 400, "tool_choice.type"),
    ):
        got, text = post(server, ASK | change)
        reply = json.loads(text)
        assert got == status and reply["type"] == "error" and said in reply["error"]["message"]


def test_a_response_is_a_chat(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        ask = {"model": "demo-7m", "input": "hi", "instructions": "You code.", "temperature": 0}
        whole = client.responses.create(**ask, max_output_tokens=8)
        assert whole.output_text == wanted(server) and whole.status == "incomplete"
        assert whole.usage.output_tokens == 8
        parts = list(client.responses.create(**ask, max_output_tokens=8, stream=True))
        assert "usage" not in parts[0].response.model_fields_set  # OpenAI's schema has no null
        pieces = [p.delta for p in parts if p.type == "response.output_text.delta"]
        assert "".join(pieces) == wanted(server)
        assert parts[-1].response.output_text == wanted(server)
        schema = {"type": "json_schema", "name": "x", "schema": PERSON, "strict": True}
        fits = client.responses.create(model="demo-7m", input="a", text={"format": schema})
        assert 0 <= json.loads(fits.output_text)["age"] <= 9
        with pytest.raises(openai.BadRequestError, match="no response .resp_1. is stored"):
            client.responses.create(**ask, previous_response_id="resp_1")
