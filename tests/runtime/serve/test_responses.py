"""/v1/responses: calls of tools, and conversations that go on from a stored one."""

from __future__ import annotations

import json
from functools import partial

import pytest

from llmpq.runtime.serve.response_store import ResponseStore
from llmpq.runtime.serve.responses import _Output, messages_of

pytestmark = pytest.mark.cpu
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'
CLOCK = {
    "type": "function",
    "name": "clock",
    "description": "tells the time",
    "strict": None,
    "parameters": {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server(two_stages, running):
    parsers = {"tool_parser": "hermes", "reasoning_parser": "think"}
    with running(two_stages, **parsers, max_stored_responses=3) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def says(text, **more):
    ask = {"model": "demo-7m", "input": "what time is it?", "tools": [CLOCK]}
    return ask | {"extra_body": {"guided_choice": [text]}} | more


def content_of(response):
    """Return an answer's items as what they say."""
    return [
        (item.type, item.content[0].text)
        if item.type in ("message", "reasoning")
        else (item.type, item.name, json.loads(item.arguments))
        for item in response.output
    ]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("just text", [("message", "just text")]),
        pytest.param(CALL, [("function_call", "clock", {"zone": "UTC"})], marks=pytest.mark.seldom),
        (
            f"I look: {CALL}{CALL}",
            [("message", "I look: "), *[("function_call", "clock", {"zone": "UTC"})] * 2],
        ),
        (f"<think>or {CALL}?</think>no", [("reasoning", f"or {CALL}?"), ("message", "no")]),
        pytest.param(
            f"<think>\nhm\n</think>\n\n{CALL}",
            [("reasoning", "hm"), ("function_call", "clock", {"zone": "UTC"})],
            marks=pytest.mark.seldom,
        ),
    ],
)
def test_items_are_the_same_whole_and_streamed(client, text, wanted):
    whole = client.responses.create(**says(text))
    assert content_of(whole) == wanted and whole.status == "completed"
    with client.responses.stream(**says(text)) as stream:
        events = [*stream]
        assert content_of(stream.get_final_response()) == wanted
    assert [event.sequence_number for event in events] == [*range(len(events))]
    added = [e.item.id for e in events if e.type == "response.output_item.added"]
    done = [e.item.id for e in events if e.type == "response.output_item.done"]
    assert added == done == [item.id for item in events[-1].response.output]
    assert len({*added}) == len(wanted)
    assert all(item.status == "completed" for item in events[-1].response.output)
    assert whole.tools[0].name == "clock" and whole.tool_choice == "auto"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "clock"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "clock"}],
        },
    ],
    ids=["any", "named", "allowed"],
)
def test_a_forced_tool_is_called(client, choice):
    other = {"type": "function", "name": "other", "parameters": {"type": "object"}}
    tools = [CLOCK, other] if isinstance(choice, dict) else [CLOCK]
    ask = {"model": "demo-7m", "input": "a", "tools": tools, "tool_choice": choice}
    (call,) = client.responses.create(**ask).output
    assert call.name == "clock" and json.loads(call.arguments)["zone"] in ("UTC", "CET")
    last = [*client.responses.create(**ask, stream=True)][-1].response
    assert last.output[0].name == "clock" and json.loads(last.output[0].arguments)
    cut = client.responses.create(**ask, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.output == []


def test_results_of_tools_are_read_as_a_chat_reads_them(server, client):
    call = client.responses.create(**says(f"<think>hm</think>{CALL}")).output
    result = {"type": "function_call_output", "call_id": call[1].call_id, "output": "noon"}
    talk = [
        {"role": "user", "content": "what time is it?"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}]},
        *[item.model_dump(exclude_none=True) for item in call],
        result,
    ]
    whole = client.responses.create(**says("noon", input=talk))
    chat = [
        {"role": "user", "content": "what time is it?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": call[1].call_id,
                    "type": "function",
                    "function": {"name": "clock", "arguments": '{"zone": "UTC"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call[1].call_id, "content": "noon"},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in CLOCK.items() if k != "type"}}]
    same = client.chat.completions.create(
        model="demo-7m", messages=chat, tools=tools, extra_body={"guided_choice": ["noon"]}
    )
    assert whole.output_text == "noon"
    assert whole.usage.input_tokens == same.usage.prompt_tokens


def test_an_answer_that_was_cut_while_it_thought_stays_a_turn():
    user = {"role": "user", "content": "a"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert messages_of([user, thought, user], ResponseStore(1)) == [user, turn, user]
    assert messages_of([user, thought], ResponseStore(1)) == [user, turn]
    said = {"role": "assistant", "content": "b"}
    both = {**said, "reasoning_content": "hm"}
    assert messages_of([user, thought, said, user], ResponseStore(1)) == [user, both, user]


def test_an_output_without_its_call_is_refused(client):
    import openai

    call = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "noon"}
    other = {**output, "call_id": "d"}
    for talk in ([output], [output, call], [call, other], [call, output, other]):
        with pytest.raises(openai.BadRequestError, match="no function call '[cd]'") as caught:
            client.responses.create(model="demo-7m", input=talk)
        assert caught.value.param == "input"
    client.responses.create(**says("ok", input=[call, output, output]))


def test_a_forced_call_that_was_cut_is_a_turn_of_nothing(server, client):
    ask = {"model": "demo-7m", "input": "a", "tools": [CLOCK], "tool_choice": "required"}
    cut = client.responses.create(**ask, max_output_tokens=2)
    assert (cut.status, cut.output) == ("incomplete", [])
    (*_, turn) = server.service.responses.get(cut.id).messages
    assert turn == {"role": "assistant", "content": ""}
    client.responses.create(**says("ok", previous_response_id=cut.id))


@pytest.mark.parametrize("arguments", ["{", "[1]", '"zone"'])
def test_a_broken_call_of_the_history_is_said_of_the_input(client, arguments):
    import openai

    call = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": arguments}
    talk = [{"role": "user", "content": "a"}, call]
    doors = (
        client.responses.create,
        partial(client.responses.create, stream=True),
        client.responses.input_tokens.count,
    )
    for door in doors:
        with pytest.raises(openai.BadRequestError, match="must be a JSON object") as caught:
            door(model="demo-7m", input=talk)
        assert caught.value.param == "input"


def test_conversations_go_on_from_what_is_stored(client):
    import openai

    first = client.responses.create(**says(CALL), instructions="Be short.", metadata={"a": "b"})
    assert first.metadata == {"a": "b"} and first.store is True
    got = client.responses.retrieve(first.id)
    assert got.output == first.output and got.usage == first.usage
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "noon"}
    then = client.responses.create(**says("ok", input=[result], previous_response_id=first.id))
    talk = [{"role": "user", "content": "what time is it?"}, first.output[0].to_dict(), result]
    same = client.responses.create(**says("ok", input=talk))
    assert then.usage.input_tokens == same.usage.input_tokens  # instructions do not go on
    assert then.previous_response_id == first.id
    references = [talk[0], {"type": "item_reference", "id": first.output[0].id}, result]
    again = client.responses.create(**says("ok", input=references), store=False)
    assert again.usage.input_tokens == same.usage.input_tokens and again.store is False
    items = client.responses.input_items.list(then.id).data
    assert [item.type for item in items] == ["function_call_output"]
    # Three are stored: a fourth makes room by the oldest.
    (streamed,) = [
        e.response
        for e in client.responses.create(**says("new"), stream=True)
        if e.type == "response.completed"
    ]
    assert client.responses.retrieve(streamed.id).output_text == "new"
    for gone in (first.id, again.id, "resp_0"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError, match="max-stored-responses") as caught:
            client.responses.create(**says("x"), previous_response_id=gone)
        assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="no item"):
        client.responses.create(**says("x", input=references))
    client.responses.delete(then.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(then.id)


def test_tokens_are_told_with_their_logprobs(client):
    ask = {
        "model": "demo-7m",
        "input": "a",
        "max_output_tokens": 4,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    }
    part = client.responses.create(**ask, temperature=0).output[0].content[0]
    assert len(part.logprobs) == 4 and all(len(t.top_logprobs) == 2 for t in part.logprobs)
    assert "".join(token.token for token in part.logprobs) == part.text
    events = [*client.responses.create(**ask, temperature=0, stream=True)]
    scores = [s for e in events if e.type == "response.output_text.delta" for s in e.logprobs]
    assert [s.token for s in scores] == [s.token for s in part.logprobs]
    assert client.responses.create(model="demo-7m", input="a", max_output_tokens=1).output


def near(value, within=1e-3):
    """Return a value of lists whose numbers equal those that are `within` so much; 0: numbers."""
    if isinstance(value, dict):
        return {key: near(part, within) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [near(part, within) for part in value]
    return pytest.approx(value, abs=within) if within and isinstance(value, float) else value


@pytest.mark.thin(2)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("limit", [1, 3, 64])
@pytest.mark.parametrize(
    "text", [CALL, f"hm{CALL}", f"<think>so</think>{CALL}", "<think>so</think>x"]
)
def test_logprobs_beside_thoughts_and_calls_are_those_of_a_text_alone(client, choice, limit, text):
    ask = {"top_logprobs": 1, "max_output_tokens": limit, "tool_choice": choice, "temperature": 0}
    ask = says(text, **ask) if choice == "auto" else says(text, **ask) | {"extra_body": {}}
    whole = client.responses.create(**ask)
    last = [*client.responses.create(**ask, stream=True)][-1].response

    def kinds(response):
        return [
            (
                item.type,
                item.status,
                *(part.to_dict() for part in getattr(item, "content", None) or ()),
            )
            for item in response.output
        ]

    # A prompt that is found in the prefix cache is summed in another order.
    assert near(kinds(whole)) == near(kinds(last), within=0) and last.usage == whole.usage
    texts = [item.content[0].text for item in whole.output if item.type == "message"]
    assert texts in ([], ["hm"], ["x"]) or text.startswith(texts[0])
    if texts == ["hm"]:  # not those of the call behind it
        (part,) = next(item.content for item in whole.output if item.type == "message")
        assert "".join(score.token for score in part.logprobs) == "hm"


class Marks:
    """A tokenizer whose special tokens begin with <|."""

    def names_special(self, tokens):
        return [token for token in tokens if token.startswith("<|")]


@pytest.mark.parametrize("ends", [(3,), (4,), (5,), (6,), (3, 5), (3, 4, 5), (3, 4, 5, 6)])
def test_scores_are_those_of_the_tokens_of_a_text_however_many_come_at_once(ends):
    """A thought, a text and a call: the reader holds the call's mark back until it knows it."""
    tokens = ["<|think|>", "so", "<|/think|>", "h", "m", "<call", ">f", "<|end|>"]
    shown = {1: {"reasoning_content": "so"}, 3: {"content": "h"}, 4: {"content": "m"}}
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    shown[6] = {"tool_calls": [call]}
    output = _Output(Marks(), with_logprobs=True, forces_call=False)
    begin = 0
    for end in (*ends, len(tokens)):
        scores = [{"token": t, "bytes": [*t.encode()], "logprob": -1.0} for t in tokens[begin:end]]
        deltas = [shown[k] for k in range(begin, end) if k in shown]
        texts = "".join(delta.get("content", "") for delta in deltas)
        deltas = [delta for delta in deltas if "content" not in delta]
        if texts:  # one delta of a kind, in the order of their kinds
            deltas.insert(bool(deltas and "reasoning_content" in deltas[0]), {"content": texts})
        for delta in deltas or [{"content": ""}]:
            [*output.take({"delta": delta, "logprobs": {"content": scores}})]
            scores = []
        begin = end
    [*output.end("completed")]
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call"]
    (part,) = output.items[1]["content"]
    assert [score["token"] for score in part["logprobs"]] == ["h", "m"]


def test_the_end_of_a_text_keeps_its_score():
    output = _Output(Marks(), with_logprobs=True, forces_call=False)
    scores = [{"token": t, "bytes": [*t.encode()], "logprob": -1.0} for t in ("x", "<|end|>")]
    [*output.take({"delta": {"content": "x"}, "logprobs": {"content": scores}})]
    [*output.end("completed")]
    assert output.items[0]["content"][0]["logprobs"] == scores


def test_a_store_holds_no_more_than_its_bytes(monkeypatch):
    from llmpq.runtime.serve.errors import ApiError
    from llmpq.runtime.serve.response_store import ResponseStore

    monkeypatch.setattr("llmpq.runtime.serve.response_store._MOST_BYTES", 1000)
    store = ResponseStore(100)
    for number in range(9):
        store.put({"id": f"r{number}", "output": [{"id": f"i{number}"}]}, [{"text": "x" * 400}], [])
    assert [*store._stored] == ["r7", "r8"] and [*store._items] == ["i7", "i8"]
    assert store.item("i8") == {"id": "i8"} and 0 < store._num_bytes <= 1000
    store.delete("r7")
    store.delete("r8")
    assert store._num_bytes == 0 and not store._items
    with pytest.raises(ApiError, match="with --max-stored-responses 0 or --replicas"):
        ResponseStore(0).get("r1", field="previous_response_id")
