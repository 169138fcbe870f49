"""`llmpq-dist serve --replicas 2`: two engines of two CPU stages behind one port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmpq import LLM, SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
PROMPT = "def main():\n    import"
KEY = "sesame"
READY_S = 120.0
LONG, SHORT = 100, 16
"""Tokens of an answer that is under way for a while, and of one that is asked for later."""
ASKED = (15, 14)
"""Requests before and after a replica is lost."""


class Started:
    """The command, its port, and what it started."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def status(self, path: str) -> int:
        try:
            return urllib.request.urlopen(self.url + path, timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_until_ready(self) -> None:
        """Wait for all replicas: `/ready` is 200 as soon as one is there again."""
        end_s = time.monotonic() + READY_S
        while self.status("/ready") != 200 or self.state()["status"] != "ready":
            assert time.monotonic() < end_s and self.process.poll() is None
            time.sleep(0.1)

    def state(self) -> dict:
        """What the page draws."""
        asked = urllib.request.Request(
            f"{self.url}/page/state", headers={"Authorization": f"Bearer {KEY}"}
        )
        return json.load(urllib.request.urlopen(asked, timeout=10))

    def family(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in found if one.status() != psutil.STATUS_ZOMBIE]

    def named(self, part: str) -> list[psutil.Process]:
        """Processes one of whose words, the first ones, has a part."""
        return [one for one in self.family() if any(part in w for w in one.cmdline()[:3])]

    def counts(self, name: str) -> dict[tuple[str, str], float]:
        """A metric's samples by engine and, where it has one, the reason."""
        text = urllib.request.urlopen(self.url + "/metrics", timeout=10).read().decode()
        return {
            (s.labels["engine"], s.labels.get("finished_reason", "")): s.value
            for metric in text_string_to_metric_families(text)
            for s in metric.samples
            if s.name == name
        }


@pytest.fixture(scope="module")
def plan_file(demo_model, make_plan, tmp_path_factory):
    plan = make_plan(
        demo_model, (3,), batch=8, prompt_len=200, gen_len=200, decode_microbatch=4, dtype="float32"
    )
    path = tmp_path_factory.mktemp("replicas") / "plan.json"
    path.write_text(plan.dump_json())
    return path


@pytest.fixture(scope="module")
def started(plan_file, tmp_path_factory) -> Iterator[Started]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", "--plan", str(plan_file), "--port", str(port), "--replicas", "2",
             "--served-model-name", "demo-7m", "--api-key", KEY]  # fmt: skip
    segments = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    log = tmp_path_factory.mktemp("log") / "stderr"  # a pipe that nobody reads fills up
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmpq.runtime", *words], stderr=stderr, text=True
        )
    made = Started(process, port, log)
    try:
        made.wait_until_ready()
        yield made
        family = made.family()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        said = log.read_text()
        assert process.returncode == 0, said
        assert KEY not in said and "Traceback" not in said, said
        assert psutil.wait_procs(family, timeout=10)[1] == []
        assert not segments or set(os.listdir("/dev/shm")) <= segments
    finally:
        process.kill()


@pytest.fixture(scope="module")
def client(started):
    with openai.OpenAI(base_url=f"{started.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def twin(plan_file) -> Iterator[LLM]:
    with LLM(plan=plan_file, backend="threads") as made:
        yield made


def test_answers_are_their_offline_twins_whichever_replica_answers(started, client, twin):
    before = started.counts("vllm:request_success_total")
    for _ in range(2):
        got = client.completions.create(
            model="demo-7m", prompt=PROMPT, temperature=0, max_tokens=12, logprobs=2
        )
        (wanted,) = twin.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
        assert got.choices[0].text == wanted.text and len(got.choices[0].logprobs.tokens) == 12
    after = started.counts("vllm:request_success_total")
    grown = {engine: after[engine, "length"] - before.get((engine, "length"), 0) for engine in "01"}
    assert grown == {"0": 1, "1": 1}
    lines = [
        json.loads(ln) for ln in started.log.read_text().splitlines() if '"path": "/v1/c' in ln
    ]
    for line in lines[-2:]:
        assert line["completion_tokens"] == 12 and line["prompt_tokens"] > 0
        assert 0 < line["first_token_s"] < line["seconds"]
    assert set(started.counts("llmpq:stage_busy_seconds_total")) == {("0", ""), ("1", "")}


def test_chats_streams_tools_and_schemas_pass_through(client, twin):
    messages = [{"role": "user", "content": "hi"}]
    tokens = twin.tokenizer.encode_chat(messages)
    (wanted,) = twin.generate([tokens], SamplingParams(temperature=0, max_tokens=9))
    chunks = list(client.chat.completions.create(
        model="demo-7m", messages=messages, temperature=0, max_tokens=9, stream=True,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == wanted.text and chunks[-1].usage.completion_tokens == 9 and len(chunks) > 5
    schema = {
        "type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"], "additionalProperties": False,
    }  # fmt: skip
    ask = {"model": "demo-7m", "messages": messages, "seed": 1}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    held = client.chat.completions.create(**ask, response_format=form)
    assert 0 <= json.loads(held.choices[0].message.content)["age"] <= 99
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    called = client.chat.completions.create(**ask, tools=[tool], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "find" and set(json.loads(call.function.arguments)) == {"age"}


def test_refusals_and_state_are_those_of_one_server(started, client):
    key = {"Authorization": f"Bearer {KEY}"}
    reset = urllib.request.Request(f"{started.url}/reset_prefix_cache", None, key, method="POST")
    with urllib.request.urlopen(reset, timeout=30) as answer:
        assert answer.status == 200, "every replica has answered"
    for options, status, said in (
        ({"model": "other"}, 404, "the model 'other' does not exist"),
        ({"temperature": -1}, 400, "temperature must be 0"),
        ({"n": 129}, 400, "n may be at most 128"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(
                    **{"model": "demo-7m", "prompt": "a"} | options, stream=stream
                )
            assert caught.value.status_code == status and said in caught.value.body["message"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{started.url}/v1", api_key="guess").models.list()
    assert [model.id for model in client.models.list()] == ["demo-7m"]
    assert [started.status(path) for path in ("/health", "/version", "/", "/nowhere")] == [
        200, 200, 200, 401,
    ]  # fmt: skip
    state = started.state()
    assert state["status"] == "ready" and len(state["stages"]) == len(state["plan"]["stages"]) == 4


def test_only_the_asked_port_listens_and_all_of_it_on_loopback(started):
    listening = {
        (c.laddr.ip.removeprefix("::ffff:"), c.laddr.port, one.pid)
        for one in [psutil.Process(started.process.pid), *started.family()]
        for c in one.net_connections()
        if c.status == psutil.CONN_LISTEN
    }
    assert {ip for ip, _, _ in listening} == {"127.0.0.1"}
    assert ("127.0.0.1", started.port, started.process.pid) in listening


def test_a_client_that_goes_away_is_aborted(started, client):
    before = started.counts("vllm:generation_tokens_total")
    with client.completions.create(
        model="demo-7m", prompt=PROMPT, max_tokens=180, stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        next(iter(stream))
    end_s = time.monotonic() + 20
    while sum(started.counts("vllm:num_requests_running").values()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    after = started.counts("vllm:generation_tokens_total")
    assert sum(after.values()) - sum(before.values()) < 150
    ended = started.counts("vllm:request_success_total")
    assert sum(v for (_, reason), v in ended.items() if reason == "abort") == 1


async def _asked(
    client: openai.AsyncOpenAI, index: int, length: int, begun: set[int]
) -> tuple[str, str]:
    """How a request ended, and its text; every third one is streamed, and says it has begun."""
    ask = {"model": "demo-7m", "prompt": f"x{index} = ", "temperature": 0, "max_tokens": length,
           "extra_body": {"ignore_eos": True}}  # fmt: skip
    text = ""
    try:
        if index % 3:
            return "whole", (await client.completions.create(**ask)).choices[0].text
        finished = None
        async for part in await client.completions.create(**ask, stream=True):
            text += part.choices[0].text
            begun.add(index)
            finished = part.choices[0].finish_reason or finished
    except openai.APIStatusError as error:
        assert error.status_code == 503 and error.response.headers["retry-after"] == "1"
        return "refused", ""
    except openai.APIError as error:  # an error event
        assert "lost" in error.message or "stopped" in error.message, error.message
        return "ended early", text
    return ("streamed" if finished == "length" else "cut off"), text


def _under_load(
    started: Started, counts: tuple[int, int], during, lengths: tuple[int, int] = (LONG, SHORT)
) -> list:
    """Ends of requests asked before and after `during` was called.

    It is called once five streams have begun, which is every stream of fifteen requests.
    """
    begun: set[int] = set()

    async def work() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{started.url}/v1", api_key=KEY, max_retries=0
        ) as client:
            asked = [
                asyncio.ensure_future(_asked(client, i, lengths[0], begun))
                for i in range(counts[0])
            ]
            while len(begun) < 5 and not all(one.done() for one in asked):
                await asyncio.sleep(0.005)
            during()
            for i in range(counts[0], sum(counts)):
                asked.append(asyncio.ensure_future(_asked(client, i, lengths[1], begun)))
                await asyncio.sleep(0.05)
            return await asyncio.gather(*asked)

    return asyncio.run(work())


def test_sixty_four_at_once_are_each_their_own_answer(started, twin):
    ends = _under_load(started, (64, 0), lambda: None, (8, 0))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    wanted = [answer.text for answer in twin.generate([f"x{i} = " for i in range(64)], params)]
    assert [text for _, text in ends] == wanted
    assert {kind for kind, _ in ends} == {"whole", "streamed"}


@pytest.fixture(scope="module")
def long_answers(twin) -> list[str]:
    """Return what `_under_load` is answered where nobody is lost."""
    lengths = [
        length for count, length in zip(ASKED, (LONG, SHORT), strict=True) for _ in range(count)
    ]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [f"x{i} = " for i in range(len(lengths))]
    return [answer.text for answer in twin.generate(prompts, params)]


def test_a_replica_starts_a_lost_stage_again(started, long_answers):
    """Its requests go on from the tokens that they have; new ones go to the other, or wait."""
    before = {one.pid for one in started.named("replicas.replica")}
    ends = _under_load(started, ASKED, started.named("stage_process")[0].kill)
    assert {kind for kind, _ in ends} <= {"whole", "streamed", "refused"}
    answered = [(text, whole) for (kind, text), whole in zip(ends, long_answers, strict=True)
                if kind != "refused"]  # fmt: skip
    assert all(text == whole for text, whole in answered) and len(answered) >= ASKED[0]
    started.wait_until_ready()
    assert {one.pid for one in started.named("replicas.replica")} == before
    assert len(started.named("stage_process")) == 4


# What a server makes of a lost replica: test_replica_front.py.
@pytest.mark.seldom
def test_a_replica_lost_under_load_is_told_and_replaced(started, long_answers):
    before = {one.pid for one in started.named("replicas.replica")}
    assert len(before) == 2
    ends = _under_load(started, ASKED, started.named("replicas.replica")[0].kill)
    kinds = [kind for kind, _ in ends]
    assert "cut off" not in kinds and "refused" in kinds and "ended early" in kinds
    for (kind, text), whole in zip(ends, long_answers, strict=True):
        if kind in ("whole", "streamed"):
            assert text == whole
        elif kind == "ended early":
            assert whole.startswith(text)
    late = kinds[ASKED[0] + 8 :]
    assert set(late) <= {"whole", "streamed"}, "the other replica answers what comes later"
    started.wait_until_ready()
    after = {one.pid for one in started.named("replicas.replica")}
    assert len(after) == 2 and len(after & before) == 1
    assert len(started.named("stage_process")) == 4
