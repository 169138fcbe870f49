"""What a fuzzer found: odd but right bodies are answered, wrong ones are refused, never 500."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.cpu
COMPLETIONS, CHATS, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES = "/v1/responses"


def post(server, path, body, kind="application/json"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def completion(**more):
    return {"prompt": "def", "max_tokens": 2, "ignore_eos": True} | more


def chat(**more):
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2} | more


def called(call):
    return chat(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])


def block(content):
    blocks = [{"type": "tool_result", "tool_use_id": "x", "content": content}]
    return {"model": "demo-7m", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}


TOOL = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (COMPLETIONS, b"[" * 100_000, 400, "nested hundreds of levels deep"),
        (COMPLETIONS, b'{"prompt": "\xff"}', 400, "not in UTF-8: byte 12 fits no character"),
        (COMPLETIONS, b'{"seed": ' + b"9" * 5000 + b"}", 400, "thousands of digits"),
        (COMPLETIONS, b"null", 400, "expected an object, got null"),
        (COMPLETIONS, completion(max_tokens=True), 400, "got true"),
        (COMPLETIONS, completion(model="\ud800"), 404, "the model '\\ud800' does not exist"),
        (COMPLETIONS, completion(logit_bias={"\ud800": 1}), 400, "got '\\ud800'"),
        (COMPLETIONS, completion(logit_bias={"x": float("nan")}), 400, "must map tokens to"),
        (COMPLETIONS, completion(logit_bias={"9" * 5000: 1}), 400, "logit_bias: Exceeds"),
        (COMPLETIONS, completion(seed=0.5), 400, "'seed'"),
        (COMPLETIONS, completion(n=1e30), 400, "n may be at most"),
        (CHATS, chat(chat_template_kwargs={"messages": 5}), 400, "cannot be called 'messages'"),
        (CHATS, chat(chat_template_kwargs={"tokenize": 5}), 400, "cannot be called 'tokenize'"),
        (CHATS, called({"function": 5}), 400, "'messages.0.tool_calls.0.function'"),
        (CHATS, called({"function": ["x"]}), 400, "'messages.0.tool_calls.0.function'"),
        (CHATS, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "its text"),
        (RESPONSES, {"input": []}, 400, "'input' must be a text or at least one message"),
        (MESSAGES, block(5), 400, "a text or a list of blocks, got 5"),
        (MESSAGES, block([5]), 400, "got a block of type 5"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens must be from 0 to 4095, got -1"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens must be from 0 to 4095"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(server, path, body, status, said):
    got, reply = post(server, path, body)
    assert got == status and said in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (COMPLETIONS, completion(temprature=1), "unknown field 'temprature', did you mean 'temper"),
        (RESPONSES, {"input": "a", "instruction": "b"}, "unknown field 'instruction', did you"),
        (
            CHATS,
            chat(stream=True, stream_options={"include_usag": True}),
            "'stream_options': unknown field 'include_usag', did you mean 'include_usage'?",
        ),
    ],
)
def test_a_field_with_a_slip_is_named_without_the_rest_of_the_body(server, path, body, said):
    status, answer = post(server, path, body)
    message = answer["error"]["message"]
    assert status == 400 and message.startswith(said) and message.endswith("?"), message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion(n=1.0, seed=7.0, max_tokens=2.0, prompt=[5.0], logprobs=0.0)),
        (COMPLETIONS, completion(seed=-(2**70))),
        (COMPLETIONS, completion(best_of=0)),
        (COMPLETIONS, completion(prompt="")),
        (COMPLETIONS, completion(max_tokens=0, ignore_eos=False)),
        (CHATS, chat(tools=[TOOL, TOOL], tool_choice=TOOL)),
        (CHATS, chat(max_completion_tokens=1.0)),
        (CHATS, chat(top_logprobs=0)),
        (CHATS, chat(stop="")),
    ],
)
def test_what_is_odd_but_right_is_answered(server, path, body):
    status, reply = post(server, path, body)
    assert status == 200, reply
    assert len(reply["choices"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (COMPLETIONS, {"prompt": None}, "'prompt': "),
        (COMPLETIONS, {}, "'prompt': Field required"),
        (COMPLETIONS, [1], "the body: expected an object, got [1]"),
        (CHATS, {"messages": []}, "'messages': expected at least 1 of them, got []"),
        (CHATS, {"messages": [{"role": "user"}]}, "message of role 'user' needs 'content'"),
        (CHATS, {"messages": [{"role": "tool", "content": None}]}, "role 'tool' needs 'content'"),
        (
            "/v1/responses",
            {"input": [{"type": "message", "role": "x"}]},
            "'input': role: Input ",
        ),
    ],
)
def test_what_openai_refuses_is_refused_in_words_of_the_request(server, path, body, said):
    status, reply = post(server, path, body)
    assert status == 400 and said in reply["error"]["message"], reply
    assert "Body" not in reply["error"]["message"] and "dictionary" not in reply["error"]["message"]


def test_a_bias_by_text_is_one_of_each_of_its_tokens(server):
    encode = server.llm.tokenizer.encode
    word = encode(" import os", special=False)
    assert len(word) == 2 and "5" not in map(str, word)

    def said(path, bias, **more):
        body = completion(temperature=0, max_tokens=8, logit_bias=bias, **more)
        body = body if path == COMPLETIONS else {**chat(), **body, "prompt": None}
        status, reply = post(server, path, body)
        assert status == 200, reply
        choice = reply["choices"][0]
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    for path in (COMPLETIONS, CHATS):
        wanted = said(path, {str(token): 100 for token in word})
        assert set(encode(wanted, special=False)) <= set(word)  # so it has an effect
        assert said(path, {" import os": 100}) == wanted != said(path, {})
        assert said(path, {"": 100, " 5 ": 0}) == said(path, {})
    # What several keys say of a token is added up, to the most that a bias may be.
    both = {" import os": 1e30, str(word[0]): 60, str(word[1]): -100}
    assert said(COMPLETIONS, both) == said(COMPLETIONS, {str(word[0]): 100})


def test_a_top_p_of_nothing_is_the_likeliest_token_as_often_as_asked(server):
    greedy = post(server, COMPLETIONS, completion(temperature=0))[1]["choices"][0]["text"]
    for body in (completion(top_p=0), completion(top_p=0, n=3), completion(temperature=0, n=2)):
        status, reply = post(server, COMPLETIONS, body)
        assert status == 200 and len(reply["choices"]) == body.get("n", 1)
        assert {choice["text"] for choice in reply["choices"]} == {greedy}


def test_the_best_of_several_answers_are_the_likeliest(server):
    asked = completion(prompt=["def", "import"], seed=3, max_tokens=4)
    several = post(server, COMPLETIONS, asked | {"n": 5, "logprobs": 0})[1]["choices"]
    best = post(server, COMPLETIONS, asked | {"n": 2, "best_of": 5})[1]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["choices"][0]["logprobs"] is None and best["usage"]["completion_tokens"] == 40

    def score(choice):
        return sum(choice["logprobs"]["token_logprobs"])

    for prompt in range(2):
        own = sorted(several[prompt * 5 : prompt * 5 + 5], key=score, reverse=True)
        found = [choice["text"] for choice in best["choices"][prompt * 2 : prompt * 2 + 2]]
        assert found == [choice["text"] for choice in own[:2]]


def streamed(server, body):
    """Return the data of a stream's events."""
    request = urllib.request.Request(
        server.url + COMPLETIONS, json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().split("\n\n")
    return [line.removeprefix("data: ") for line in lines if line]


def test_the_best_of_several_answers_are_streamed_once_they_are_known(server):
    asked = completion(prompt=["def", "import"], seed=3, max_tokens=4, n=2, best_of=5)
    whole = post(server, COMPLETIONS, asked)[1]
    *reply, used, done = streamed(server, asked | {"stream_options": {"include_usage": True}})
    assert [json.loads(one)["choices"] for one in reply] == [[one] for one in whole["choices"]]
    assert json.loads(used)["usage"] == whole["usage"] and json.loads(used)["choices"] == []
    assert done == "[DONE]"
    assert streamed(server, asked)[-1] == "[DONE]" and len(streamed(server, asked)) == 5


def test_a_best_of_below_n_asks_for_n_answers(server):
    for stream in (False, True):
        asked = completion(n=3, best_of=1, stream=stream)
        text = (
            "".join(streamed(server, asked))
            if stream
            else json.dumps(post(server, COMPLETIONS, asked)[1], separators=(",", ":"))
        )
        assert {f'"index":{k}' in text for k in range(3)} == {True} and '"index":3' not in text


def test_top_logprobs_alone_ask_for_logprobs(server):
    reply = post(server, CHATS, chat(top_logprobs=3))[1]["choices"][0]["logprobs"]
    assert [len(token["top_logprobs"]) for token in reply["content"]] == [3, 3]


def test_an_empty_stop_ends_nothing_and_the_others_beside_it_do(server):
    asked = completion(prompt="def main():", max_tokens=12, temperature=0)
    whole = post(server, COMPLETIONS, asked)[1]["choices"][0]["text"]
    mark = whole.strip()[1]
    for stop, text in (("", whole), ([""], whole), (["", mark], whole.partition(mark)[0])):
        found = post(server, COMPLETIONS, asked | {"stop": stop})[1]["choices"][0]["text"]
        assert found == text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read_so_no_page_can_send_it_unasked(server, kind):
    status, reply = post(server, COMPLETIONS, completion(), kind)
    assert status == 415 and "Content-Type: application/json" in reply["error"]["message"]
    assert post(server, COMPLETIONS, completion(), "application/json; charset=utf-8")[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion(prompt="def one_of_our_own(): " * 20)),
        (CHATS, chat(messages=[{"role": "user", "content": "class OneOfOurOwn: " * 20}])),
    ],
)
def test_a_cache_salt_keeps_prefixes_apart(server, path, body):
    cached = []
    for salt in ("ours", "theirs", None, "ours"):
        status, reply = post(server, path, body | {"cache_salt": salt})
        assert status == 200
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:3] == [0, 0, 0] and cached[3] >= 128
    status, reply = post(server, path, body | {"cache_salt": ""})
    assert status == 400 and "'cache_salt'" in reply["error"]["message"]
