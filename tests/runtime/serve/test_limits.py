"""--max-requests holds however requests come together; what goes away frees its part."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pydantic
import pytest

pytestmark = pytest.mark.cpu
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ASKED = [
    ("/v1/completions", {"prompt": "def", "max_tokens": 4}),
    ("/v1/completions", {"prompt": "def", "max_tokens": 4, "stream": True}),
    ("/v1/completions", {"prompt": "a b " * 40, "max_tokens": 4}),
    ("/v1/chat/completions", TALK),
    ("/v1/chat/completions", {**TALK, "stream": True}),
    ("/v1/messages", {**TALK, "model": "demo-7m"}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
]


def post(server, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    reply = answer.read()
    connection.close()
    return answer.status, answer.headers, reply


def test_no_more_than_the_limit_are_under_way(two_stages, running):
    with running(two_stages, max_requests=3) as server:
        llm, opened, seen = server.llm, threading.Event(), []
        submit = llm.submit

        async def late(*args, **options):
            seen.append(server.service.num_under_way)
            while not opened.is_set():
                await asyncio.sleep(0.01)
            return await submit(*args, **options)

        llm.submit = late
        refused = threading.Semaphore(0)

        def ask(number):
            status, headers, reply = post(server, *ASKED[number % len(ASKED)])
            if status == 429:
                refused.release()
            return status, headers, reply

        with ThreadPoolExecutor(14) as pool:
            asked = [pool.submit(ask, number) for number in range(14)]
            for _ in range(14 - 3):
                assert refused.acquire(timeout=60)
            opened.set()
            answers = [one.result() for one in asked]
        statuses = [status for status, _, _ in answers]
        assert statuses.count(200) == 3 and statuses.count(429) == 11 and max(seen) == 3
        for status, headers, reply in answers:
            if status == 429:
                assert int(headers["Retry-After"]) >= 1
                assert b"3 requests are under way and 3 may be" in reply
        assert server.service.num_under_way == 0
        for path, body in ASKED:
            assert post(server, path, body)[0] == 200
        two = {"prompt": "def", "max_tokens": 4, "n": 2, "temperature": 1}
        assert post(server, "/v1/completions", two)[0] == 200
        assert post(server, "/v1/completions", {"prompt": "def", "stop": [3]})[0] == 400
        assert server.service.num_under_way == 0
        over = {"prompt": "def", "n": 4, "temperature": 1}
        assert post(server, "/v1/completions", over)[0] == 400


def test_a_client_that_goes_before_its_stream_begins_frees_its_part(server):
    from starlette.requests import ClientDisconnect

    from llmpq.runtime.serve.app import _answer
    from llmpq.runtime.serve.bodies import CompletionBody
    from llmpq.runtime.serve.completions import TextCompletion

    service = server.service
    loop = server.server.servers[0].get_loop()

    async def gone() -> int:
        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            raise OSError("the client has gone")

        class Request:
            url = type("Url", (), {"path": "/v1/completions"})

            async def receive(self):
                await asyncio.sleep(60)

            async def body(self):
                return json.dumps(
                    {"prompt": "def", "max_tokens": 99, "stream": True, "n": 2}
                ).encode()

        response = await _answer(Request(), service, CompletionBody, TextCompletion)
        assert service.num_under_way == 2
        with pytest.raises(ClientDisconnect):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
        return service.num_under_way

    assert asyncio.run_coroutine_threadsafe(gone(), loop).result(60) == 0


TEXT = "ab " * 2000
LONG = [
    ("/tokenize", {"prompt": TEXT}, 200),
    ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}, 200),
    ("/detokenize", {"tokens": [5] * 5000}, 200),
    ("/v1/messages/count_tokens", {**TALK, "model": "demo-7m", "system": TEXT}, 200),
    ("/v1/responses/input_tokens", {"input": TEXT}, 200),
    ("/v1/completions", {"prompt": TEXT}, 400),
    ("/v1/chat/completions", {**TALK, "messages": [{"role": "user", "content": TEXT}]}, 400),
    ("/v1/messages", {**TALK, "model": "demo-7m", "system": TEXT}, 400),
    ("/v1/responses", {"input": TEXT}, 400),
]


@pytest.mark.parametrize(("path", "body", "status"), LONG)
def test_long_texts_do_not_hold_the_others_up(server, monkeypatch, path, body, status):
    from llmpq.runtime.text.tokenizer import Tokenizer

    reading, read_on = threading.Event(), threading.Event()

    def slowly(work):
        def work_slowly(*args, **options):
            reading.set()
            assert read_on.wait(60)
            return work(*args, **options)

        return work_slowly

    for name in ("encode", "decode"):
        monkeypatch.setattr(Tokenizer, name, slowly(getattr(Tokenizer, name)))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server, path, body)
        assert reading.wait(60)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200 and not asked.done()
        connection.close()
        read_on.set()
        assert asked.result()[0] == status


def test_many_tools_are_read_beside_the_event_loop(server, monkeypatch):
    from llmpq.runtime.serve.bodies import Function, Tool

    threads = set()

    def noting(self, **options):
        threads.add(threading.current_thread().name)
        return pydantic.BaseModel.model_dump(self, **options)

    for kind in (Function, Tool):
        monkeypatch.setattr(kind, "model_dump", noting)
    tools = [{"type": "function", "function": {"name": f"tool{i}"}} for i in range(2000)]
    status, _, reply = post(server, "/v1/chat/completions", {**TALK, "tools": tools})
    assert status == 400 and b"the prompt is too long" in reply
    assert threads and all(name.startswith("llmpq ") for name in threads), threads
