"""`llmpq-dist serve` as people start it: one line, one socket, an end in order."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from llmpq.runtime.cli.main import main
from llmpq.runtime.cli.serve import open_engine
from llmpq.runtime.cli.serve_flags import ServeOptions, serve_parser

pytestmark = pytest.mark.cpu


def test_one_line_serves_listens_once_and_ends_in_order(demo_model, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    words = ["serve", "--model", str(demo_model), "--port", str(port), "--max-num-seqs", "2",
             "--api-key-file", str(keys), "--served-model-name", "tiny"]  # fmt: skip
    command = [sys.executable, "-m", "llmpq.runtime", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            end_s, statuses = time.monotonic() + 150, []
            while time.monotonic() < end_s and (not statuses or statuses[-1] != 200):
                time.sleep(0.1)
                try:
                    statuses.append(urllib.request.urlopen(f"{url}/ready", timeout=5).status)
                except urllib.error.HTTPError as error:
                    statuses.append(error.code)
                except OSError:
                    continue
            assert statuses[-1] == 200 and set(statuses) <= {200, 503}
            body = {"model": "tiny", "prompt": "import", "max_tokens": 3}
            headers = {"Content-Type": "application/json", "Authorization": "Bearer sesame"}
            data = json.dumps(body).encode()
            asked = urllib.request.Request(f"{url}/v1/completions", data, headers)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 3
            stages = [c for c in psutil.Process(process.pid).children(True)
                      if any("stage_process" in word for word in c.cmdline())]  # fmt: skip
            assert stages and all(stage.nice() == 19 for stage in stages)
            assert psutil.Process(process.pid).nice() == psutil.Process().nice() < 19
            family = [process.pid, *(c.pid for c in psutil.Process(process.pid).children(True))]
            listening = [
                (c.laddr.ip, c.laddr.port)
                for pid in family
                for c in psutil.Process(pid).net_connections()
                if c.status == psutil.CONN_LISTEN
            ]
            assert listening == [("127.0.0.1", port)]
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert "sesame" not in said and '"path": "/v1/completions", "status": 200' in said


@pytest.mark.parametrize("splits", [pytest.param((), marks=pytest.mark.seldom), (4,)])
def test_a_stage_that_dies_ends_the_server_with_its_code(demo_model, make_plan, tmp_path, splits):
    (tmp_path / "plan.json").write_text(make_plan(demo_model, splits=splits).dump_json())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "llmpq.runtime", "serve", "--plan",
               str(tmp_path / "plan.json"), "--port", url.rpartition(":")[2],
               "--on-loss", "stop"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            end_s = time.monotonic() + 150
            while time.monotonic() < end_s and status(f"{url}/ready") != 200:
                time.sleep(0.1)
            assert status(f"{url}/health") == 200
            stages = [c for c in psutil.Process(process.pid).children(True)
                      if any("stage_process" in word for word in c.cmdline())]  # fmt: skip
            stages[-1].kill()
            found = set()
            while process.poll() is None and time.monotonic() < end_s:
                found.add(status(f"{url}/health"))
                time.sleep(0.02)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 6, said
    assert 503 in found and found <= {200, 503, 0}
    last = said.strip().splitlines()[-1]
    assert "was lost" in last and "SIGKILL" in last and "--resume" not in said
    assert "the engine has stopped" in said and "Traceback" not in said


def status(url: str) -> int:
    """Return what a server answers; 0 where nothing listens."""
    try:
        return int(urllib.request.urlopen(url, timeout=5).status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to serve"),
        (["--model", "nowhere", "--port", "0"], "--port must be 1 to 65535"),
        (["--model", "nowhere", "--max-n", "0"], "--max-n must be at least 1"),
        (["--model", "nowhere", "--drain-timeout", "-1"], "--drain-timeout must be seconds"),
        (["--model", "nowhere", "--prot", "1"], "--port"),
        (["--model", "nowhere", "--chat-template", "no.jinja"], "no.jinja"),
        (["--model", "nowhere", "--api-key-file", "no.keys"], "no.keys"),
        (["--model", "nowhere", "--host", "203.0.113.9"], "cannot listen on 203.0.113.9"),
        (["--model", "nowhere", "--ssl-keyfile", "key.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--model", "nowhere", "--ssl-certfile", "no.pem"], "--ssl-certfile 'no.pem' cannot be"),
        (["--model", "nowhere", "--ssl-certfile", __file__], "expected a PEM certificate"),
        (["--model", "nowhere", "--uds", __file__], "is a file and no socket"),
        (["--model", "nowhere", "--uds", "no/such/socket"], "there is no folder 'no/such'"),
        (["--model", "nowhere", "--uds", "/tmp/" + "x" * 110], "longer than the 107 bytes"),
        (["--model", "nowhere", "--uds", "a", "--port", "1"], "--port has no effect with --uds"),
        (["--model", ""], "the model's name is empty: expected a directory"),
        ([" "], "the model's name is empty: expected a directory"),
        (["--plan", ""], "the plan's name is empty"),
        (["--model", "nowhere", "--host", ""], "--host is empty, which is every address"),
        (["--model", "nowhere", "--served-model-name", ""], "--served-model-name is empty"),
        (["--model", "nowhere", "--api-key", "a\nb"], "has a line break or the like"),
        (["--model", "nowhere", "--root-path", "llm"], "--root-path must begin with /"),
        (["--model", "nowhere", "--max-stored-responses", "-1"], "must be 0 or more"),
        (["--model", "nowhere", "--api-key", ""], "--api-key is empty; give a key"),
        (["--model", "nowhere", "--api-key", "a", "--api-key", " "], "--api-key is empty"),
        (["--model", "nowhere", "--request-timeout", "0"], "above 0, got 0; leave it out"),
        (["--model", "nowhere", "--read-timeout", "0"], "--read-timeout must be seconds above 0"),
        (["--model", "nowhere", "--write-timeout", "nan"], "--write-timeout must be seconds"),
        (["--model", "nowhere", "--cors-origin", "app.example.com"], "https://app.example.com"),
        (["--model", "nowhere", "--cors-origin", "https://a.example/app"], "must be an origin"),
        (["--model", "nowhere", "--cors-origin", "https://a.example:x"], "must be an origin"),
        (["--model", "nowhere", "--replicas", "0"], "--replicas must be at least 1"),
        (["--model", "nowhere", "--replicas", "2", "--backend", "ray"], "on this machine"),
        (["--model", "nowhere", "--ray-serve"], "--replicas N is enough"),
    ],
)
def test_wrong_flags_are_refused(words, said, capsys):
    assert main(["serve", *words]) == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]


def settings(*words):
    from llmpq.runtime.cli.serve import settings_of

    return settings_of(serve_parser().read_as(ServeOptions, ["--model", "nowhere", *words]))


def test_keys_are_the_flags_the_files_or_the_variables(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# of production\n\n  one  \n  # old\ntwo\r\n")
    assert settings("--api-key-file", str(file)).api_keys == ("one", "two")
    assert settings("--api-key", "a", "--api-key-file", str(file)).api_keys == ("a", "one", "two")
    file.write_text("# none yet\n")
    with pytest.raises(ValueError, match="has no key"):
        settings("--api-key-file", str(file))
    assert settings().api_keys == ()
    monkeypatch.setenv("VLLM_API_KEY", "of vLLM")
    assert settings().api_keys == ("of vLLM",)
    monkeypatch.setenv("LLMPQ_API_KEY", "ours")
    assert settings().api_keys == ("ours",)
    assert settings("--api-key", "a").api_keys == ("a",)
    monkeypatch.setenv("LLMPQ_API_KEY", "")
    with pytest.raises(ValueError, match="LLMPQ_API_KEY is empty"):
        settings()


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://app.example.com/", "https://app.example.com"),
        ("https://App.Example.com:443", "https://app.example.com"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("*", "*"),
    ],
)
def test_origins_are_compared_as_browsers_write_them(given, sent):
    assert settings("--cors-origin", given).cors_origins == (sent,)


def test_a_certificate_without_its_key_says_where_to_give_it(tmp_path):
    (tmp_path / "cert.pem").write_text("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n")
    words = ["--ssl-certfile", str(tmp_path / "cert.pem")]
    with pytest.raises(ValueError, match="in the same file or by --ssl-keyfile FILE"):
        settings(*words)
    with pytest.raises(ValueError, match=r"--ssl-keyfile 'no.pem' cannot be used: there is no"):
        settings(*words, "--ssl-keyfile", "no.pem")


def test_a_socket_where_this_user_may_not_write_is_refused(tmp_path, monkeypatch):
    from llmpq.runtime.cli.serve import _require_free_socket

    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match=f"may not write in '{tmp_path}'"):
        _require_free_socket(str(tmp_path / "llmpq.sock"))


def test_a_plans_pool_takes_a_limit_of_length(demo_model, make_plan, tmp_path):
    from llmpq.runtime.cli.replica_launches import launches_of

    (tmp_path / "plan.json").write_text(make_plan(demo_model).dump_json())
    words = ["--plan", str(tmp_path / "plan.json"), "--max-model-len", "48"]
    options = serve_parser().read_as(ServeOptions, words)
    (launch,) = launches_of(options)
    assert launch.engine["options"]["max_model_len"] == 48
    with open_engine(options) as llm:
        assert llm.max_model_len == 48
