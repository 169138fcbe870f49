"""The server itself: state, keys, limits, clients that misbehave or go away, ends in order."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import threading
import time
import types
import urllib.error
import urllib.request
from datetime import datetime
from functools import partial

import psutil
import pytest
from fastapi import FastAPI

from llmpq.runtime.serve.server import EngineServer, serve
from llmpq.runtime.serve.service import Service
from llmpq.runtime.serve.settings import ServeSettings

pytestmark = pytest.mark.cpu
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(server, path, body=None, headers=None, method=None):
    """Return status, headers and JSON or text of an answer."""
    data = (
        None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
    )
    reply = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(server.url + path, data, reply, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, found, text = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        status, found, text = error.code, error.headers, error.read()
    is_json = found.get("content-type", "").startswith("application/json")
    return status, found, json.loads(text) if is_json else text.decode()


def begun(server, max_tokens=180):
    """Return a connection whose answer has begun to stream."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": "def", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.readline().startswith(b"data: ")
    return connection, answer


def until(done, limit_s=30.0):
    end_s = time.monotonic() + limit_s
    while not done() and time.monotonic() < end_s:
        time.sleep(0.02)
    assert done()


def test_prefixes_are_forgotten_on_request(server):
    body = {"prompt": [7 + n % 19 for n in range(300)], "max_tokens": 1}

    def cached():
        usage = ask(server, "/v1/completions", body)[2]["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    cached()
    assert cached() == 256
    assert ask(server, "/reset_prefix_cache", {})[0] == 200
    assert ask(server, "/reset_prefix_cache", method="GET")[0] == 405
    assert cached() == 0 and cached() == 256


def test_state_is_told_without_asking_for_tokens(server):
    assert ask(server, "/health")[2] == {"status": "ok"}
    assert ask(server, "/ready")[2] == {"status": "ready"}
    assert set(ask(server, "/version")[2]) == {"version"}
    status, _, tokens = ask(server, "/tokenize", {"prompt": "def main():"})
    assert status == 200 and tokens["count"] == len(tokens["tokens"])
    assert ask(server, "/detokenize", {"tokens": tokens["tokens"]})[2] == {"prompt": "def main():"}
    chat = ask(server, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})[2]
    assert chat["count"] > tokens["count"]


def test_metrics_count_what_was_answered(server):
    def read(name: str) -> float:
        text = ask(server, "/metrics")[2]
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, flags=re.M)
        return sum(map(float, found))

    before = {name: read(name) for name in (
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count", "vllm:request_prompt_tokens_sum",
        "vllm:request_queue_time_seconds_count", "vllm:request_prefill_time_seconds_count",
        "vllm:request_max_num_generation_tokens_sum", "vllm:request_params_max_tokens_sum",
        "vllm:request_params_n_count",
    )}  # fmt: skip
    times = ("queue", "prefill", "decode", "inference")
    seconds = {t: read(f"vllm:request_{t}_time_seconds_sum") for t in times}
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "ignore_eos": True}
    assert ask(server, "/v1/completions", body)[0] == 200
    grown = [read(name) - value for name, value in before.items()]
    assert grown == [5, 8, 2, 2, 6, 2, 5, 2, 2, 8, 8, 2]
    took = {t: read(f"vllm:request_{t}_time_seconds_sum") - s for t, s in seconds.items()}
    assert took["prefill"] > 0 and took["decode"] > 0
    assert took["inference"] == pytest.approx(took["prefill"] + took["decode"], abs=1e-6)
    assert read("vllm:num_requests_running") == 0
    assert 'model_name="demo-7m"' in ask(server, "/metrics")[2]


def test_probes_may_ask_for_the_head_alone(server):
    for path in ("/health", "/ready", "/ping", "/", "/v1/models", "/metrics"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        connection.close()


def test_metrics_have_the_process(server):
    text = ask(server, "/metrics")[2]
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        (value,) = re.findall(rf'^process_{name}{{engine="0"}} (\S+)$', text, flags=re.M)
        assert float(value) > 0


def test_a_models_length_is_said_once_it_is_planned():
    """While weights load, too; before there is no such key, for `null` would be no bound."""
    planned, may_load = threading.Event(), threading.Event()
    service, port, servers = Service(ServeSettings(model_names=("m",))), free_port(), []

    class Slow:
        """Plans at once; its weights load for a while, and cannot be."""

        max_model_len = 77

        def __init__(self):
            planned.wait(30)

        def start(self):
            may_load.wait(30)
            raise ValueError("weights are missing")

    run = partial(serve, service, Slow, host="127.0.0.1", port=port, on_start=servers.append)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    listening = types.SimpleNamespace(url=f"http://127.0.0.1:{port}")
    while not (servers and servers[0].started):
        time.sleep(0.01)

    def lengths() -> list[int | None]:
        (model,) = ask(listening, "/v1/models")[2]["data"]
        assert ask(listening, "/v1/models/m")[2] == model
        return [model.get("max_model_len", "none")]

    assert lengths() == ["none"]
    planned.set()
    while service.planned_len is None:
        time.sleep(0.01)
    assert lengths() == [77] and ask(listening, "/ready")[0] == 503
    may_load.set()
    thread.join(30)
    assert str(servers[0].failure) == "weights are missing"


def test_an_interrupt_while_the_model_loads_is_one(monkeypatch):
    """Once it serves, Ctrl-C ends it in order, with 0."""
    service = types.SimpleNamespace(
        llm=None, draining=False, num_under_way=0, settings=ServeSettings(model_names=("m",))
    )
    for sig, llm, failed in ((2, None, True), (15, None, False), (2, object(), False)):
        service.llm, service.draining = llm, False
        server = EngineServer(service, FastAPI(), "127.0.0.1", 1)
        server.handle_exit(sig, None)
        assert isinstance(server.failure, KeyboardInterrupt) == failed and service.draining


def test_times_are_counted_from_the_arrival_of_a_requests_head(server):
    def total_s() -> list[float]:
        text, names = ask(server, "/metrics")[2], ("time_to_first_token", "e2e_request_latency")
        return [
            float(re.findall(rf"^vllm:{name}_seconds_sum{{.*}} (\S+)$", text, flags=re.M)[0])
            for name in names
        ]

    before_s, wait_s = total_s(), 0.3
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders()
    time.sleep(wait_s)
    connection.send(body)
    assert connection.getresponse().status == 200
    connection.close()
    assert all(now_s - then_s >= wait_s for now_s, then_s in zip(total_s(), before_s, strict=True))


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", b"{", 400, "the body is not JSON"),
        ("/v1/completions", b"[1]", 400, "the body"),
        ("/v1/completions", b"", 400, "the body"),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "half a character"),
        ("/v1/nothing", {}, 404, "nothing answers '/v1/nothing'"),
        ("/api/generate", {}, 404, "'/api/generate'; this server generates text at /v1/chat/"),
        ("/infill", {}, 404, "'/infill'; this server generates text at /v1/chat/"),
        ("/v1/embeddings", {}, 404, "'/v1/embeddings'; this server generates text at /v1/chat/"),
        ("/v1/load_lora_adapter", {}, 404, "_adapter'; adapters are not run: merge them into the"),
        ("/lora-adapters", {}, 404, "'/lora-adapters'; adapters are not run: merge them into"),
        ("/sleep", {}, 404, "'/sleep'; weights stay where they are: end the server"),
        ("/v1/batches", {}, 404, "llmpq-dist run -i FILE -o FILE, which takes OpenAI's batch"),
        ("/v1/audio/speech", {}, 404, "'/v1/audio/speech'; this server reads and writes text only"),
        ("/start_profile", {}, 404, "'/start_profile'; each stage's steps are written by"),
        ("/v1/score", {}, 404, "no embeddings, scores of pairs or ranks (how likely a text is:"),
        ("/v1/completions", {"prompt": "a", "best_of": -1}, 400, "'best_of': Input should be gr"),
        ("/v1/v1/chat/completions", {}, 404, "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", {}, 404, "did you mean /v1/chat/completions?"),
        ("/messages", {}, 404, "did you mean /v1/messages?"),
        ("//v1/completions", {}, 404, "did you mean /v1/completions?"),
        ("/v1/models", {}, 405, "'/v1/models' takes GET, HEAD, got POST"),
        ("/v1/completions", None, 405, "'/v1/completions' takes POST, got GET"),
        ("/chat/completions", {}, 404, "did you mean /v1/chat/completions?"),
        ("/../../etc/passwd", None, 404, "nothing answers"),
        ("/v1/models/..%2f..%2fetc%2fpasswd", None, 404, "does not exist"),
        ("/tokenize", {}, 400, "either 'prompt' or 'messages'"),
    ],
)
def test_malformed_requests_get_one_sentence(server, path, body, status, said):
    got, _, reply = ask(server, path, body)
    assert got == status and said in reply["error"]["message"]
    assert set(reply["error"]) == {"message", "type", "param", "code"}


def test_a_client_that_goes_away_frees_its_slot_without_a_word_in_the_log(server, caplog):
    connection, answer = begun(server)
    assert server.service.num_under_way == 1
    answer.close()
    connection.close()
    until(lambda: server.service.num_under_way == 0 and server.llm.stats()["running"] == 0)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"prompt": "def", "max_tokens": 180, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, JSON)
    until(lambda: server.llm.stats()["running"] == 1)
    connection.close()
    until(lambda: server.llm.stats()["running"] == 0)
    assert ask(server, "/health")[0] == 200
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_large_slow_and_endless_requests_are_bounded(two_stages, running):
    with running(two_stages, read_timeout_s=0.5, max_body_bytes=20_000) as server:
        status, _, reply = ask(server, "/v1/completions", b"x" * 100_000)
        assert status == 413 and "larger than 20000 bytes" in reply["error"]["message"]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")  # no end of the head
            assert slow.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
            assert silent.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as half:
            half.sendall(HEAD + b"Content-Length: 50\r\n\r\n{")
            assert b" 408 " in half.recv(200)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as chunks:
            head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
            chunks.sendall(head + b"6000\r\n" + b"x" * 0x6000 + b"\r\n")
            assert b" 413 " in chunks.recv(200)
        assert ask(server, "/health")[0] == 200
        # A stream may take longer than a head: it is not cut off.
        connection, answer = begun(server, max_tokens=60)
        time.sleep(0.7)
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_lines_of_the_log_have_tokens_and_times(server, caplog):
    caplog.set_level(logging.INFO, logger="llmpq.serve.access")
    talk = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    asked = [
        ("/v1/completions", {"prompt": ["a", "a b"], "max_tokens": 5, "ignore_eos": True}, 10),
        ("/v1/chat/completions", talk | {"ignore_eos": True, "n": 2, "stream": True}, 10),
        ("/v1/messages", talk | {"model": "demo-7m", "ignore_eos": True}, 5),
        ("/v1/responses", {"input": "a", "max_output_tokens": 5, "ignore_eos": True}, 5),
    ]
    for path, body, _ in asked:
        data = json.dumps(body).encode()
        given = {"Content-Type": "application/json", "X-Request-Id": f"mine{path}"}
        request = urllib.request.Request(server.url + path, data, given)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
    ask(server, "/v1/models")
    until(lambda: len(caplog.records) >= 5)
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    always = {"time", "id", "client", "method", "path", "status", "seconds"}
    for line, (path, _, tokens) in zip(lines, asked, strict=False):
        more = {"prompt_tokens", "completion_tokens", "first_token_s"}
        assert line.keys() == always | more, line
        assert (line["path"], line["id"], line["status"]) == (path, f"mine{path}", 200)
        assert line["completion_tokens"] == tokens and line["prompt_tokens"] > 0
        assert 0 < line["first_token_s"] < line["seconds"]
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert lines[4].keys() == always and lines[4]["path"] == "/v1/models"


def test_keys_open_the_server_and_are_never_logged(two_stages, running, caplog):
    caplog.set_level(logging.DEBUG)
    with running(two_stages, api_keys=("first-key", "second-key")) as server:
        body = {"prompt": "very private words", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "first-key"}):
            status, found, reply = ask(server, "/v1/completions", body, headers)
            assert status == 401 and reply["error"]["code"] == "invalid_api_key"
            assert found["WWW-Authenticate"] == "Bearer"
        for headers in ({"Authorization": "Bearer second-key"}, {"X-Api-Key": "first-key"}):
            assert ask(server, "/v1/completions", body, headers)[0] == 200
        assert ask(server, "/health")[0] == 200 and ask(server, "/v1/models")[0] == 401
        assert ask(server, "/tokenize", {"prompt": "a"})[0] == 401
    lines = [r.getMessage() for r in caplog.records if r.name == "llmpq.serve.access"]
    assert [json.loads(line)["status"] for line in lines] == [
        401,
        401,
        401,
        200,
        200,
        401,
        401,
    ]
    for text in ("first-key", "second-key", "wrong-key", "very private words"):
        assert text not in caplog.text


def test_too_many_requests_are_asked_back_and_answers_have_a_deadline(two_stages, running, caplog):
    with running(two_stages, max_requests=1, request_timeout_s=0.3) as server:
        connection, answer = begun(server)
        status, found, reply = ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 429 and found["Retry-After"] == "1"
        assert reply["error"]["type"] == "rate_limit_error"
        rest = answer.read()
        assert b"[DONE]" not in rest
        assert json.loads(rest.strip().splitlines()[-1][6:])["error"]["type"] == "timeout_error"
        connection.close()
        long = {"prompt": "a", "max_tokens": 180, "ignore_eos": True}
        assert ask(server, "/v1/completions", long)[0] == 504
        until(lambda: server.llm.stats()["running"] == 0)
    assert not [record for record in caplog.records if record.exc_info]  # no traceback


def test_a_stage_that_dies_is_told_and_nothing_hangs(
    demo_model, make_plan, running, caplog, monkeypatch
):
    from llmpq import LLM
    from llmpq.errors import StageLostError

    monkeypatch.setattr("llmpq.runtime.serve.server._LOST_S", 60.0)

    plan = make_plan(demo_model, (3,), batch=8, prompt_len=200, gen_len=200, dtype="float32")
    with running(lambda: LLM(demo_model, plan=plan, backend="processes", on_loss="stop")) as server:
        stages = [psutil.Process(stage["pid"]) for stage in server.llm.stats()["stages"]]
        assert len(stages) == 2 and ask(server, "/ready")[0] == 200
        connection, answer = begun(server)
        stages[1].kill()
        rest = answer.read()
        connection.close()
        last = json.loads(rest.strip().splitlines()[-1][6:])["error"]["message"]
        assert b"[DONE]" not in rest and "lost during" in last and "--resume" not in last
        status, found, reply = ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert (
            status == 503 and found["Retry-After"] == "1" and "stopped" in reply["error"]["message"]
        )
        assert ask(server, "/ready")[0] == 503 and ask(server, "/health")[0] == 503
        assert ask(server, "/metrics")[0] == 200
    assert isinstance(server.server.failure, StageLostError)
    assert not [record for record in caplog.records if record.exc_info]  # no traceback


def test_a_stage_that_dies_is_recovered_behind_streams(demo_model, make_plan, running, caplog):
    from llmpq import LLM

    plan = make_plan(demo_model, (3,), batch=8, prompt_len=200, gen_len=200, dtype="float32")
    with running(lambda: LLM(demo_model, plan=plan, backend="processes")) as server:
        connection, answer = begun(server, max_tokens=150)
        psutil.Process(server.llm.stats()["stages"][0]["pid"]).kill()
        until(lambda: server.llm.recovering is not None)
        status, found, reply = ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        if status != 200:  # it may have been over
            assert status == 503 and int(found["Retry-After"]) >= 1
            assert reply["error"]["code"] == "recovering"
            assert "being recovered since 20" in reply["error"]["message"]
        assert ask(server, "/health")[0] == 200
        assert ask(server, "/ready")[0] in (200, 503) and ask(server, "/metrics")[0] == 200
        whole = answer.read()
        connection.close()
        assert whole.endswith(b"data: [DONE]\n\n") and b'"error":' not in whole
        until(lambda: ask(server, "/ready")[0] == 200)
        assert ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        metrics = server.service.metrics.text().decode()
        assert 'llmpq:recoveries_total{action="restart",engine="0"} 1.0' in metrics
        assert 'llmpq:recovering{engine="0"} 0.0' in metrics
        (recovery,) = ask(server, "/page/state")[2]["recoveries"]
        assert recovery["measured_s"] > 0 and recovery["requests"] == 1
    assert server.server.failure is None
    assert not [record for record in caplog.records if record.exc_info]  # no traceback


def test_it_ends_in_order(two_stages, running):
    with running(two_stages, drain_timeout_s=20.0) as server:
        connection, answer = begun(server, max_tokens=120)
        server.server.handle_exit(15, None)
        status, found, _ = ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 503 and found["Retry-After"] == "1"
        assert ask(server, "/ready")[0] == 503 and ask(server, "/health")[0] == 200
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
