"""The openai client against a real server: what people do first, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from llmpq import SamplingParams

pytestmark = pytest.mark.cpu
PROMPT = "def main():\n    import"


@pytest.fixture(scope="module")
def client(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def offline(server, prompt, **options) -> str:
    return server.llm.generate(prompt, SamplingParams(**options))[0].text


def test_a_completion_is_its_offline_twin(server, client):
    got = client.completions.create(
        model="demo-7m", prompt=PROMPT, temperature=0, max_tokens=12, user="me"
    )
    assert got.choices[0].text == offline(server, PROMPT, temperature=0, max_tokens=12)
    assert got.choices[0].finish_reason == "length" and got.object == "text_completion"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (5, 12)
    sampled = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "max_tokens": 10}
    twin = client.completions.create(
        model="gpt-test", prompt=PROMPT, **sampled, presence_penalty=0.5, frequency_penalty=0.2,
        logit_bias={"14": 2}, extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
    )  # fmt: skip
    wanted = offline(
        server, PROMPT, **sampled, presence_penalty=0.5, frequency_penalty=0.2,
        logit_bias={14: 2}, top_k=40, min_p=0.01, repetition_penalty=1.1,
    )  # fmt: skip
    assert twin.choices[0].text == wanted


def test_several_prompts_and_answers_are_numbered_in_order(server, client):
    prompts = ["import os", "class A:", [497, 3350]]
    texts = [offline(server, p, temperature=0, max_tokens=6) for p in prompts[:2]]
    got = client.completions.create(
        model="demo-7m", prompt=prompts[:2], temperature=0, max_tokens=6
    )
    assert [c.text for c in got.choices] == texts and [c.index for c in got.choices] == [0, 1]
    several = client.completions.create(
        model="demo-7m", prompt=prompts[2], n=3, seed=5, max_tokens=5
    )
    wanted = server.llm.generate([prompts[2]], SamplingParams(n=3, seed=5, max_tokens=5))[0]
    assert [c.text for c in several.choices] == [o.text for o in wanted.outputs]
    assert several.usage.prompt_tokens == 2 and several.usage.completion_tokens == 15


def test_a_stream_is_the_whole_answer_with_usage_at_its_end(server, client):
    wanted = offline(server, PROMPT, temperature=0, max_tokens=20)
    chunks = list(
        client.completions.create(
            model="demo-7m", prompt=PROMPT, temperature=0, max_tokens=20, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks if c.choices) == wanted
    assert len(chunks) > 5 and chunks[-1].usage.completion_tokens == 20
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_echo_scores_the_prompt_as_lm_eval_asks(server, client):
    got = client.completions.create(
        model="demo-7m", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    reply = got.choices[0].logprobs
    wanted = server.llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert got.choices[0].text == PROMPT and reply.token_logprobs[0] is None
    own = [row[t].logprob for row, t in zip(
        wanted.prompt_logprobs[1:], wanted.prompt_token_ids[1:], strict=True)]  # fmt: skip
    assert reply.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
    assert "".join(reply.tokens) == PROMPT
    assert [
        PROMPT[at:].startswith(t) for at, t in zip(reply.text_offset, reply.tokens, strict=True)
    ]
    one = client.completions.create(
        model="demo-7m", prompt=PROMPT, max_tokens=2, echo=True, logprobs=2, temperature=0
    ).choices[0]
    assert len(one.logprobs.tokens) == 7 and one.text.startswith(PROMPT)


@pytest.mark.parametrize("prompt", ["a = '日本🙂'", "", "def"])
def test_offsets_are_places_in_the_text(client, prompt):
    asked = {"model": "demo-7m", "prompt": prompt, "max_tokens": 9, "echo": True, "logprobs": 0}
    asked |= {"extra_body": {"guided_choice": ["é🙂 zz x"]}, "temperature": 0}
    whole = client.completions.create(**asked, stop=["zzz"]).choices[0]
    reply, text = whole.logprobs, whole.text
    shown = {t: p for t, p in zip(reply.text_offset, reply.tokens, strict=True) if "\\x" not in p}
    assert all(text.startswith(p, t) for t, p in shown.items() if p != "<|endoftext|>")
    assert reply.text_offset == sorted(reply.text_offset) and reply.text_offset[-1] <= len(text)
    parts = [*client.completions.create(**asked, stop=["zzz"], stream=True)]
    offsets = [p.choices[0].logprobs.text_offset for p in parts if p.choices[0].logprobs]
    assert sum(offsets, []) == reply.text_offset


def test_the_echo_of_a_single_token_is_told_without_a_score(client):
    asked = {"model": "demo-7m", "prompt": "def", "max_tokens": 2, "echo": True, "logprobs": 0}
    reply = client.completions.create(**asked, temperature=0).choices[0]
    assert reply.logprobs.tokens[0] == "def" and reply.logprobs.token_logprobs[0] is None
    assert "".join(reply.logprobs.tokens) == reply.text and reply.logprobs.text_offset[:2] == [0, 3]
    streamed = client.completions.create(**asked, temperature=0, stream=True)
    first = next(chunk.choices[0] for chunk in streamed)
    assert first.logprobs.tokens[0] == "def" and first.logprobs.token_logprobs[0] is None


def test_chats_stream_and_tell_logprobs(server, client):
    messages = [{"role": "system", "content": "You code."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]}]  # fmt: skip
    whole = client.chat.completions.create(
        model="demo-7m", messages=messages, temperature=0, max_completion_tokens=9, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    tokens = server.llm.tokenizer.encode_chat(
        [{"role": "system", "content": "You code."}, {"role": "user", "content": "hi"}]
    )
    assert whole.choices[0].message.content == offline(
        server, [tokens], temperature=0, max_tokens=9
    )
    content = whole.choices[0].logprobs.content
    assert len(content) == 9 and all(len(c.top_logprobs) == 2 for c in content)
    joined = b"".join(bytes(c.bytes) for c in content).decode()
    assert joined == whole.choices[0].message.content
    chunks = list(client.chat.completions.create(
        model="demo-7m", messages=messages, temperature=0, max_tokens=9, stream=True
    ))  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer",
                   "minimum": 0, "maximum": 120}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


def test_structured_output_and_forced_tools(client):
    ask = {"model": "demo-7m", "messages": [{"role": "user", "content": "who?"}], "seed": 1}
    schema = {"name": "person", "schema": PERSON, "strict": True}
    got = client.chat.completions.create(
        **ask, response_format={"type": "json_schema", "json_schema": schema}
    )
    assert set(json.loads(got.choices[0].message.content)) == {"name", "age"}
    tool = {"type": "function", "function": {"name": "find", "parameters": PERSON}}
    named = {"type": "function", "function": {"name": "find"}}
    called = client.chat.completions.create(**ask, tools=[tool], tool_choice=named)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "find" and 0 <= json.loads(call.function.arguments)["age"] <= 120
    any_of = client.chat.completions.create(**ask, tools=[tool], tool_choice="required")
    (call,) = any_of.choices[0].message.tool_calls
    assert call.function.name == "find" and any_of.choices[0].finish_reason == "tool_calls"
    parts = list(client.chat.completions.create(
        **ask, tools=[tool], tool_choice=named, stream=True
    ))  # fmt: skip
    pieces = [c for p in parts for c in p.choices[0].delta.tool_calls or []]
    joined = "".join(p.function.arguments for p in pieces)
    assert joined == called.choices[0].message.tool_calls[0].function.arguments
    free = client.chat.completions.create(**ask, tools=[tool], max_tokens=4)
    assert free.choices[0].message.tool_calls is None
    chosen = client.completions.create(
        model="demo-7m", prompt="is it? ", extra_body={"guided_choice": ["yes", "no"]}
    )
    assert chosen.choices[0].text in ("yes", "no")


@pytest.mark.parametrize(
    ("options", "status", "said", "param"),
    [
        ({"model": "other"}, 404, "the model 'other' does not exist", "model"),
        ({"temperature": -1}, 400, "temperature must be 0", "temperature"),
        ({"max_tokens": -5}, 400, "max_tokens must be", "max_tokens"),
        ({"max_tokens": "many"}, 400, "'max_tokens'", "max_tokens"),
        ({"prompt": 5}, 400, "'prompt'", "prompt"),
        ({"prompt": []}, 400, "1 to 64 prompts, got 0", "prompt"),
        ({"prompt": ["a"] * 65}, 400, "1 to 64 prompts, got 65", "prompt"),
        ({"prompt": "x y " * 900}, 400, "tokens", None),
        ({"prompt": [99999]}, 400, "token 99999 is not in the vocabulary", None),
        ({"n": 129}, 400, "n may be at most 128", "n"),
        ({"suffix": "x"}, 400, "'suffix' is not supported", "suffix"),
        ({"prompt": ["a"] * 64, "n": 9}, 400, "may ask for 512 answers, got 64 prompts", "n"),
        ({"logit_bias": {"-1": 1}}, 400, "names token -1", "logit_bias"),
        ({"extra_body": {"temprature": 1}}, 400, "did you mean 'temperature'", None),
        ({"extra_body": {"guided_regex": "(["}}, 400, "cannot be followed", "guided_regex"),
    ],
)
def test_errors_are_openais(client, options, status, said, param):
    import openai

    values = {"model": "demo-7m", "prompt": "a", "max_tokens": 1} | options
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**values, stream=stream)
        assert caught.value.status_code == status
        assert said in caught.value.body["message"] and caught.value.body["param"] == param
        assert "\n" not in caught.value.body["message"]


def test_chat_errors(client):
    import openai

    ask = {"model": "demo-7m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    for options, said in (
        ({"messages": []}, "'messages'"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "'messages.0.role'"),
        ({"messages": [{"role": "user", "content": image}]}, "reads text only"),
        ({"top_logprobs": 2, "logprobs": False}, "needs 'logprobs'"),
        ({"tool_choice": "required"}, "needs 'tools'"),
        ({"response_format": {"type": "json_schema"}}, "needs 'json_schema.schema'"),
        ({"max_tokens": 0}, "at least 1"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            client.chat.completions.create(**ask | options)
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings.*generates text at"):
        client.embeddings.create(model="demo-7m", input="a")  # not one that clients send again


def test_models_have_their_names(client):
    import openai

    assert [m.id for m in client.models.list()] == ["demo-7m", "gpt-test"]
    assert client.models.retrieve("gpt-test").id == "gpt-test"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def until_free(server):
    end_s = time.monotonic() + 30
    while server.service.num_under_way and time.monotonic() < end_s:
        time.sleep(0.02)
    assert server.service.num_under_way == 0


def test_a_client_asks_again_when_it_is_told_to_wait(two_stages, running):
    import openai

    asked = {"model": "demo-7m", "prompt": PROMPT, "temperature": 0}
    with (
        running(two_stages, max_requests=1) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=9) as client,
    ):
        wanted = offline(server, PROMPT, temperature=0, max_tokens=4)
        held = client.completions.create(
            **asked, max_tokens=190, stream=True, extra_body={"ignore_eos": True}
        )
        next(held)
        with pytest.raises(openai.RateLimitError):
            client.with_options(max_retries=0).completions.create(**asked, max_tokens=4)
        threading.Timer(0.5, held.close).start()
        got = client.completions.with_raw_response.create(**asked, max_tokens=4)
        assert got.retries_taken >= 1 and got.parse().choices[0].text == wanted
        until_free(server)


def test_a_client_that_waits_no_longer_frees_what_it_held(server, client):
    import openai

    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(
            model="demo-7m", prompt=PROMPT, n=4, max_tokens=190, extra_body={"ignore_eos": True}
        )
    until_free(server)


def test_sixty_four_at_once_are_each_their_own_answer(server):
    import openai

    prompts = [f"x{i} = " for i in range(64)]
    params = SamplingParams(temperature=0, max_tokens=6)
    wanted = [answer.text for answer in server.llm.generate(prompts, params)]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(index: int, prompt: str) -> str:
                asked = {"model": "demo-7m", "prompt": prompt, "temperature": 0, "max_tokens": 6}
                if index % 2:
                    return (await client.completions.create(**asked)).choices[0].text
                parts = [part async for part in await client.completions.create(
                    **asked, stream=True)]  # fmt: skip
                return "".join(part.choices[0].text for part in parts)

            return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))

    assert asyncio.run(all_of_them()) == wanted
    assert server.service.num_under_way == 0 and server.llm.stats()["requests"] == []


@pytest.mark.parametrize("kind", ["completions", "chats"])
def test_token_ids_are_told_beside_the_text_if_asked_for(client, kind):
    given = {"model": "demo-7m", "max_tokens": 12, "temperature": 0,
             "extra_body": {"return_token_ids": True, "ignore_eos": True}}  # fmt: skip
    if kind == "completions":
        create, given = client.completions.create, {**given, "prompt": "def f(x):"}
    else:
        messages = [{"role": "user", "content": "hello"}]
        create, given = client.chat.completions.create, {**given, "messages": messages}
    whole = create(**given)
    reply = whole.choices[0]
    holder = reply if kind == "completions" else whole
    assert len(reply.token_ids) == 12 == whole.usage.completion_tokens
    assert len(holder.prompt_token_ids) == whole.usage.prompt_tokens
    chunks = [*create(**given, stream=True)]
    parts = [choice for chunk in chunks for choice in chunk.choices]
    ids = [token for part in parts for token in getattr(part, "token_ids", None) or []]
    assert ids == reply.token_ids
    holders = parts if kind == "completions" else chunks
    prompts = [found for h in holders if (found := getattr(h, "prompt_token_ids", None))]
    assert prompts == [holder.prompt_token_ids]
    plain = create(**{**given, "extra_body": {"ignore_eos": True}})
    assert not hasattr(plain.choices[0], "token_ids")
