"""Where a server listens: a socket of the file system, TLS, a proxy's path; what its owners ask."""

from __future__ import annotations

import errno
import http.client
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from llmpq.runtime.serve.server import listening, serve
from llmpq.runtime.serve.service import Service
from llmpq.runtime.serve.settings import ServeSettings

pytestmark = pytest.mark.cpu
ASK = {"prompt": "def", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return files of a certificate for this host, signed by itself, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-out", files[0]]
    more = ["-keyout", files[1], "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, *more], check=True, capture_output=True)
    return files


class _Unix(http.client.HTTPConnection):
    """A connection to a socket of the file system."""

    def __init__(self, path):
        super().__init__("localhost")
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def asked(connection, method, path, body=None, headers=()):
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json", **dict(headers)})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_socket_of_the_file_system_answers(two_stages, running, tmp_path, caplog):
    from llmpq.runtime.cli.serve import _require_free_socket

    path = str(tmp_path / "llmpq.sock")
    with running(two_stages, uds=path) as server:
        connection = _Unix(path)
        assert asked(connection, "GET", "/health")[0] == 200
        status, text = asked(connection, "POST", "/v1/completions", ASK)
        assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 3
        caplog.set_level(logging.INFO, logger="llmpq.serve.access")
        by = {"X-Forwarded-For": "198.51.100.7, 203.0.113.9"}
        assert asked(connection, "GET", "/v1/models", headers=by)[0] == 200
        end_s, clients = time.monotonic() + 30, set()
        while "203.0.113.9" not in clients and time.monotonic() < end_s:
            lines = [r.getMessage() for r in caplog.records if r.name == "llmpq.serve.access"]
            clients = {json.loads(line)["client"] for line in lines}
        assert "203.0.113.9" in clients, "whom the proxy saw"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
        with pytest.raises(ValueError, match="another server listens"):
            _require_free_socket(path)
    assert not os.path.exists(path), "a socket of which no server is left"
    with socket.socket(socket.AF_UNIX) as left:  # as by one that was killed
        left.bind(path)
    _require_free_socket(path)


def test_an_address_is_taken_before_a_model_is_loaded_for_it():
    """Two servers begun at once have both found a port free; the later one says so, and ends."""

    def load():
        raise AssertionError("loaded for an address that another server has")

    (first,) = listening("127.0.0.1", 0)
    with first:
        port = first.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port} .*--port"):
            serve(Service(ServeSettings(model_names=("a",))), load, host="127.0.0.1", port=port)
    for taken in listening("localhost", port):
        with taken:
            assert taken.getsockname()[1] == port
    with pytest.raises(ValueError, match="cannot listen on no.such.host.invalid:1"):
        listening("no.such.host.invalid", 1)


def test_tls_answers_and_asks_clients_for_certificates(two_stages, running, certificate):
    files, key = certificate
    mutual = {"ssl_ca_certs": files, "ssl_cert_reqs": 2}
    with running(two_stages, ssl_certfile=files, ssl_keyfile=key, **mutual) as server:
        trusting = ssl.create_default_context(cafile=files)
        place = ("127.0.0.1", server.port)
        with pytest.raises((ssl.SSLError, OSError)):
            asked(http.client.HTTPSConnection(*place, context=trusting), "GET", "/health")
        trusting.load_cert_chain(files, key)
        connection = http.client.HTTPSConnection(*place, context=trusting)
        status, text = asked(connection, "POST", "/v1/completions", {**ASK, "stream": True})
        assert status == 200 and text.endswith("data: [DONE]\n\n")
        with pytest.raises((http.client.BadStatusLine, ConnectionError)):
            asked(http.client.HTTPConnection(*place), "GET", "/health")


def test_a_proxys_path_is_answered_with_and_without_it(two_stages, running):
    with running(two_stages, root_path="/llm", api_keys=("sesame",)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        key = {"Authorization": "Bearer sesame"}
        for root in ("", "/llm"):
            assert asked(connection, "GET", f"{root}/health")[0] == 200
            assert asked(connection, "GET", f"{root}/")[0] == 200
            assert asked(connection, "GET", f"{root}/v1/models")[0] == 401
            assert asked(connection, "GET", f"{root}/v1/models", headers=key)[0] == 200
            for path in ("/v1/completions", "/v1/completions/"):  # not redirected, to nowhere
                assert asked(connection, "POST", f"{root}{path}", ASK, key)[0] == 200
        reply = json.loads(asked(connection, "GET", "/llm/openapi.json", headers=key)[1])
        assert reply["servers"] == [{"url": "/llm"}]
        names = [one["operationId"] for path in reply["paths"].values() for one in path.values()]
        assert len(names) == len({*names}) > 10
        assert asked(connection, "GET", "/llmx/health", headers=key)[0] == 404
        # The page's links are relative to the folder.
        connection.request("GET", "/llm")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Location"], answer.read()) == (308, "/llm/", b"")
        assert server.service.settings.url("127.0.0.1", 80) == "http://127.0.0.1:80/llm"


def test_a_connection_stays_open_longer_than_proxies_keep_theirs(server):
    assert server.server.config.timeout_keep_alive > 60


def test_files_that_run_out_are_one_line_of_the_log(server, caplog):
    """asyncio calls it some 2,000 times a second for each socket that listens."""
    loop = server.server.servers[0].get_loop()
    context = {"message": "socket.accept() out of system resource"}
    full = {**context, "exception": OSError(errno.EMFILE, "Too many open files")}
    for _ in range(3):
        server.server._loop_error(loop, full)
    assert ["file descriptors" in r.getMessage() for r in caplog.records] == [True]
    assert caplog.records[0].exc_info is None
    server.server._loop_error(loop, {"message": "other", "exception": OSError(errno.EIO, "x")})
    assert "other" in caplog.records[-1].getMessage()


def test_a_server_may_open_as_many_files_as_its_user(monkeypatch):
    import resource

    from llmpq.runtime.cli.serve import MOST_DESCRIPTORS, _use_descriptors

    for limits, wanted in (
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 20), (MOST_DESCRIPTORS, 1 << 20)),
        ((1024, resource.RLIM_INFINITY), (MOST_DESCRIPTORS, resource.RLIM_INFINITY)),
        ((1 << 20, 1 << 20), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ):
        made = []
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair, made=made: made.append(pair))
        _use_descriptors()
        assert made == ([] if wanted is None else [wanted])


@pytest.mark.parametrize("ignored", [False, True])
def test_a_hang_up_ends_in_order_unless_it_is_ignored(server, monkeypatch, ignored):
    ends = []
    monkeypatch.setattr(server.server, "handle_exit", lambda number, frame: ends.append(number))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with server.server.capture_signals():
            signal.raise_signal(signal.SIGHUP)
        assert ends == ([] if ignored else [signal.SIGHUP])
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_watchers_paths_and_metrics(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    for method in ("GET", "POST"):
        assert asked(connection, method, "/ping")[0] == 200
    assert json.loads(asked(connection, "GET", "/load")[1]) == {"server_load": 0}
    held = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"prompt": ["def", "class"], "max_tokens": 190, "ignore_eos": True, "stream": True}
    held.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = held.getresponse()
    answer.readline()
    assert json.loads(asked(connection, "GET", "/load")[1]) == {"server_load": 2}
    answer.read()
    end_s = time.monotonic() + 20
    while json.loads(asked(connection, "GET", "/load")[1]) != {"server_load": 0}:
        assert time.monotonic() < end_s

    text = asked(connection, "GET", "/metrics")[1]
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = 'engine="0",model_name="demo-7m"'

    def value(name):
        (found,) = (v for key, v in lines.items() if key.split("{")[0] == f"vllm:{name}")
        return float(found)

    tokens, steps = value("iteration_tokens_total_sum"), value("iteration_tokens_total_count")
    reply = server.llm.stats()
    # Every token but each answer's last is computed once; those found in the prefix cache are not.
    least = reply["prompt_tokens"] + reply["generated_tokens"] - reply["finished"]
    assert steps > 100 and least - 64 <= tokens <= least + 64
    info = next(key for key in lines if key.startswith("vllm:cache_config_info"))
    assert 'block_size="128"' in info and 'enable_prefix_caching="True"' in info
    assert 'cache_dtype="kv16"' in info and labels.split(",")[0] in info
    below = [
        float(v) for key, v in lines.items() if key.startswith("vllm:iteration_tokens_total_b")
    ]
    assert below == sorted(below) and below[-1] == steps


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_prompt_too_long_is_said_as_clients_look_for_it(server, path):
    long = "word " * 3000
    body = {"model": "demo-7m", "max_tokens": 5}
    talk = [{"role": "user", "content": long}]
    body |= {"prompt": long} if path == "/v1/completions" else {"messages": talk}
    for stream in (False, True):
        request = urllib.request.Request(
            server.url + path,
            json.dumps({**body, "stream": stream}).encode(),
            {"Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        error = json.load(caught.value)["error"]
        assert caught.value.code == 400 and error["type"] == "invalid_request_error"
        assert "prompt is too long" in error["message"]
        assert "maximum context length" in error["message"]
        if path != "/v1/messages":
            assert error["code"] == "context_length_exceeded"


@pytest.mark.thin
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_finds_less_room_than_its_limit_says_so(server, path, stream):
    body = {"model": "demo-7m", "max_tokens": 5000, "ignore_eos": True, "stream": stream}
    body["truncate_prompt_tokens"] = server.llm.max_model_len - 4
    talk = [{"role": "user", "content": "def " * 1000}]
    body |= {"prompt": "def " * 1000} if path == "/v1/completions" else {"messages": talk}
    reply = asked(http.client.HTTPConnection("127.0.0.1", server.port), "POST", path, body)[1]
    lines = [line for line in reply.splitlines() if "stop_reason" in line]
    ended = json.loads(lines[-1].removeprefix("data: "))
    ended = ended.get("delta", ended) if path == "/v1/messages" else ended["choices"][0]
    reason = "model_context_window_exceeded" if path == "/v1/messages" else "max_model_len"
    assert ended["stop_reason"] == reason
    assert path == "/v1/messages" or ended["finish_reason"] == "length"
