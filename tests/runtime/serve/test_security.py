"""Clients that mean harm, pages of other sites, and ends that do not wait."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress

import psutil
import pytest

pytestmark = pytest.mark.cpu
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
MIB = 1 << 20


def ask(server, method, path, body=None, headers=None):
    """Return status, headers and bytes of an answer; the path goes as it is written."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {**JSON, **(headers or {})})
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def begun(server):
    """Return a connection whose long answer has begun to stream."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": "def", "max_tokens": 180, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.readline().startswith(b"data: ")
    return connection, answer


@pytest.mark.parametrize(
    "path",
    [
        "/page/../../../../../../etc/passwd",
        "/page/%2e%2e/%2e%2e/settings.py",
        "/page/..%2f..%2fapp.py",
        "/page//etc/passwd",
        "//etc/passwd",
        "/page/page.js/../../app.py",
        "/v1/models/../../../etc/passwd",
        "/page/page.js%00",
    ],
)
def test_no_path_leads_to_a_file(server, path):
    status, _, body = ask(server, "GET", path)
    assert status == 404 and b"root:" not in body and b"import" not in body


def test_a_hundred_megabytes_are_refused_unread(server):
    own = psutil.Process(os.getpid())
    with connect(server) as reply:
        reply.sendall(HEAD + b"Content-Length: 104857600\r\n\r\n")
        assert b" 413 " in reply.recv(200), "before a byte of it was sent"
    before, sent = own.memory_info().rss, 0
    with connect(server) as chunks:
        chunks.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(100):
                chunks.sendall(b"100000\r\n" + b"x" * MIB + b"\r\n")
                sent += 1
        except OSError:
            pass  # it hung up
    assert sent < 50
    assert own.memory_info().rss - before < 64 * MIB
    assert ask(server, "GET", "/health")[0] == 200


def test_slow_senders_are_hung_up_on_and_others_served(two_stages, running):
    with running(two_stages, read_timeout_s=1.0) as server:
        slow = [connect(server) for _ in range(24)]
        starts = [HEAD + b"X-Slow: ", HEAD + b"Content-Length: 5000\r\n\r\n{"]
        for place, one in enumerate(slow):
            one.sendall(starts[place % 2])
        ended, stop = [False] * len(slow), threading.Event()

        def dribble(place):
            one = slow[place]
            one.settimeout(0.1)
            while not stop.is_set() and not ended[place]:
                try:
                    one.sendall(b" ")
                    ended[place] = one.recv(4096) == b""
                except TimeoutError:
                    continue
                except OSError:
                    ended[place] = True

        threads = [threading.Thread(target=dribble, args=(i,)) for i in range(len(slow))]
        for thread in threads:
            thread.start()
        body = {"prompt": "def", "max_tokens": 2, "ignore_eos": True}
        assert ask(server, "POST", "/v1/completions", body)[0] == 200
        end_s = time.monotonic() + 90
        while not all(ended) and time.monotonic() < end_s:
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join(10)
        for one in slow:
            one.close()
        assert all(ended)


GET = b"GET /health HTTP/1.1\r\n"
BEHIND_A_BODY = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize(
    "start, line",
    [
        (GET, b"X-%d: y\r\n"),
        (GET, b"X-%d: " + b"y" * 500 + b"\r\n"),
        (GET, b"%d" * 8),
        (GET + b"X-Long: ", b"%d" * 8),
        (b"GET /", b"%d" * 8),
        (BEHIND_A_BODY, b"X-%d: y\r\n"),
        (BEHIND_A_BODY + b"X-Long: ", b"%d" * 8),
    ],
)
def test_a_flood_of_headers_is_cut_off_and_others_served(server, start, line):
    own, served = psutil.Process(os.getpid()), 0
    before, sent, answers = own.memory_info().rss, [], []
    for _ in range(6):
        with connect(server) as flood:
            flood.sendall(start)
            total = 0
            try:
                for i in range(0, 1 << 20, 100):
                    piece = b"".join(line % ((n,) * line.count(b"%d")) for n in range(i, i + 100))
                    flood.sendall(piece)
                    total += len(piece)
                    if i == 100:  # under way: another client is answered
                        served += ask(server, "GET", "/health")[0] == 200
                    if total > 16 * MIB:
                        break
            except ConnectionError:
                pass  # it hung up before it had heard it all
            sent.append(total)
            with suppress(ConnectionError):
                answers.append(flood.recv(200))
    assert max(sent) < 8 * MIB, "it was cut off"
    assert all(b" 400 " in answer or answer == b"" for answer in answers)
    assert served == 6
    assert own.memory_info().rss - before < 32 * MIB
    assert ask(server, "GET", "/health")[0] == 200


def test_another_protocol_that_is_offered_is_not_taken(server):
    """Java's client offers HTTP/2 with every request."""
    body = json.dumps({"prompt": "def", "max_tokens": 2, "ignore_eos": True}).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = HEAD + offer + b"Content-Length: %d\r\n\r\n" % len(body)
    with connect(server) as asking:
        asking.sendall(head + body)
        assert asking.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_never_reads_is_hung_up_on_and_its_blocks_are_free(two_stages, running):
    with running(two_stages, write_timeout_s=1.0) as server:
        for listening in server.server.servers:
            for one in listening.sockets:  # accepted ones have the same
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = {"prompt": "def", "max_tokens": 180, "n": 4, "logprobs": 5, "stream": True,
                "ignore_eos": True}  # fmt: skip
        data, page = json.dumps(body).encode(), b"GET /page/page.js HTTP/1.1\r\nHost: a\r\n\r\n"
        deaf = []
        for asked in (HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data, page * 20):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.connect(("127.0.0.1", server.port))
            one.sendall(asked)
            deaf.append(one)
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            assert ask(server, "GET", "/health")[0] == 200
            if not server.server.server_state.connections and not server.service.num_under_way:
                break
            time.sleep(0.05)
        assert not server.server.server_state.connections
        while server.llm.stats()["gauges"]["blocks_held"] and time.monotonic() < end_s:
            time.sleep(0.05)
        assert server.llm.stats()["gauges"]["blocks_held"] == 0
        assert b'finished_reason="abort"' in server.service.metrics.text(), "none was finished"
        for one in deaf:
            one.close()


POSTED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize")


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize(
    "rest", [b"Content-Length: 500\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"]
)
def test_a_client_that_goes_while_it_sends_its_body_leaves_a_line(server, caplog, path, rest):
    caplog.set_level(logging.INFO, logger="llmpq.serve.access")
    with connect(server) as client:
        client.sendall(HEAD.replace(b"/v1/completions", path.encode()) + rest)
        time.sleep(0.1)  # the request has begun
    line = access_line(caplog)
    assert (line["path"], line["status"]) == (path, 499)
    assert not [r for r in caplog.records if r.exc_info], "no traceback"


def test_the_log_says_which_streams_were_cut_off(server, caplog):
    caplog.set_level(logging.INFO, logger="llmpq.serve.access")
    connection, answer = begun(server)
    answer.close()
    connection.close()
    line = access_line(caplog)
    assert line["status"] == 200 and line["complete"] is False
    caplog.clear()
    connection, answer = begun(server)
    answer.read()
    connection.close()
    assert "complete" not in access_line(caplog)


def access_line(caplog):
    """Return the access log's only line, once it is written."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        lines = [r.getMessage() for r in caplog.records if r.name == "llmpq.serve.access"]
        if lines:
            assert len(lines) == 1
            return json.loads(lines[0])
        time.sleep(0.02)
    raise AssertionError("the log has no line")


@pytest.mark.parametrize("coding", ["gzip", "br, gzip"])
def test_a_compressed_body_is_refused_as_such(server, coding):
    headers = {"Content-Encoding": coding}
    status, _, body = ask(server, "POST", "/v1/completions", {"prompt": "a"}, headers)
    assert status == 415 and f"without 'Content-Encoding', got {coding}" in body.decode()
    plain = {"Content-Encoding": "identity"}
    assert ask(server, "POST", "/tokenize", {"prompt": "a"}, plain)[0] == 200


def test_a_method_that_a_path_has_not_is_answered_with_those_it_has(server):
    for path, method, allow in (
        ("/v1/completions", "PUT", "POST"),
        ("/v1/responses/x", "PUT", "DELETE, GET, HEAD"),
        ("/", "DELETE", "GET, HEAD"),
    ):
        status, headers, _ = ask(server, method, path)
        assert (status, headers["Allow"]) == (405, allow)


def test_pages_of_other_sites_may_ask_only_where_that_was_said(server, two_stages, running):
    origin = {"Origin": "https://good.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    allowed = "Access-Control-Allow-Origin"
    assert allowed not in ask(server, "GET", "/v1/models", headers=origin)[1]
    status, reply, _ = ask(server, "OPTIONS", "/v1/completions", headers=preflight)
    assert status == 405 and allowed not in reply
    settings = {"cors_origins": ("https://good.example",), "api_keys": ("sesame",)}
    with running(two_stages, **settings) as asked:
        status, reply, _ = ask(asked, "OPTIONS", "/v1/completions", headers=preflight)
        assert status == 200 and reply[allowed] == "https://good.example"
        assert "authorization" in reply["Access-Control-Allow-Headers"].lower()
        status, reply, _ = ask(asked, "GET", "/v1/models", headers=origin)
        assert status == 401 and reply[allowed] == "https://good.example", "pages read why"
        other = {"Origin": "https://evil.example", "Authorization": "Bearer sesame"}
        status, reply, _ = ask(asked, "GET", "/v1/models", headers=other)
        assert status == 200 and allowed not in reply


def test_answers_that_outlast_the_end_are_told_so(two_stages, running):
    with running(two_stages, drain_timeout_s=0.1) as server:
        connection, answer = begun(server)
        server.server.handle_exit(15, None)
        rest = answer.read()
        connection.close()
    assert b"[DONE]" not in rest
    error = json.loads(rest.strip().splitlines()[-1].removeprefix(b"data: "))["error"]
    assert error["type"] == "overloaded_error" and "has ended" in error["message"]


def test_a_second_signal_does_not_wait(two_stages, running):
    with running(two_stages, drain_timeout_s=600.0) as server:
        connection, answer = begun(server)
        server.server.handle_exit(15, None)
        time.sleep(0.2)
        assert server.service.num_under_way == 1
        server.server.handle_exit(15, None)
        with suppress(http.client.IncompleteRead, ConnectionError):
            assert b"[DONE]" not in answer.read()
        connection.close()
        end_s = time.monotonic() + 20
        while server.service.num_under_way and time.monotonic() < end_s:
            time.sleep(0.02)
        assert server.service.num_under_way == 0


@pytest.mark.parametrize(
    ("shown", "text"),
    [("arguments.city", "hiOslo"), ("name + call.function.arguments", 'hif{"city": "Oslo"}')],
)
def test_arguments_of_calls_are_what_a_template_takes(two_stages, running, shown, text):
    template = (
        "{% for m in messages %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function." + shown + " }}{% endfor %}"
        "{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    with running(two_stages, chat_template=template) as server:
        talk = {"messages": messages, "max_tokens": 1}
        reply = json.loads(ask(server, "POST", "/v1/chat/completions", talk)[2])
        wanted = server.llm.tokenizer.encode(text, special=False)
        assert reply["usage"]["prompt_tokens"] == len(wanted)


def test_a_template_of_the_operator_replaces_the_models(two_stages, running):
    with running(two_stages, chat_template="{{ messages[0].content }}") as server:
        talk = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 3,
                "temperature": 0}  # fmt: skip
        reply = json.loads(ask(server, "POST", "/v1/chat/completions", talk)[2])
        plain = json.loads(ask(server, "POST", "/v1/completions", {
            "prompt": "import os", "max_tokens": 3, "temperature": 0})[2])  # fmt: skip
        assert reply["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        assert reply["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
