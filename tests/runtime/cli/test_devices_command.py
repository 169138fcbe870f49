"""`llmpq-dist devices`: a command that runs is given devices, and they are taken from it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from functools import partial

import pytest

from llmpq.errors import ExitCode
from llmpq.runtime.cli.main import main
from llmpq.runtime.elastic import control_socket


@pytest.fixture
def sockets(tmp_path_factory, monkeypatch):
    """Have sockets in a folder of the test's own; its path is short, as sockets' must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield name
    monkeypatch.setattr(tempfile, "tempdir", None)


def refused(capsys, *words: str) -> str:
    assert main(["devices", *words]) == ExitCode.USAGE
    return capsys.readouterr().err


@pytest.mark.pure
def test_bad_wishes_are_refused_in_a_sentence(sockets, capsys):
    assert "none runs" in refused(capsys, "drain", "b")
    assert "those are: none" in refused(capsys, "drain", "b", "--pid", "1")
    assert "devices drain needs the name of a node" in refused(capsys, "drain")
    assert "devices list takes no name" in refused(capsys, "list", "b")
    assert "are of devices add" in refused(capsys, "drain", "b", "--horizon", "9")


@pytest.mark.pure
def test_a_folder_that_others_can_open_is_not_used(sockets, capsys):
    folder = control_socket.folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert "must be a folder of this user that no other can open" in refused(capsys, "list")


@pytest.mark.cluster
def test_a_run_gets_and_gives_devices(sockets, demo_model, tmp_path, capsys):
    small, large = tmp_path / "two.yaml", tmp_path / "three.yaml"
    for path, memory in ((small, (26, 24)), (large, (26, 24, 24))):
        kind = {"kind": "CPU", "threads": 1, "reserve": 0}
        devices = [kind | {"memory": f"{m} MiB"} for m in memory]
        nodes = [{"name": "here", "devices": devices}]
        path.write_text(json.dumps({"name": "c", "nodes": nodes}))
    rows = [
        {"prompt": [7 + n, 9, 11], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        for n in range(2000)
    ]
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable, "-m", "llmpq.runtime", "run", "--model", demo_model, "--cluster", small,
        "-i", given, "-o", output, "--json",
    ]  # fmt: skip
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        # Tests that a shell runs in the background inherit a SIGINT that is ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    ) as run:  # fmt: skip
        try:
            path = control_socket.folder() / f"{run.pid}.sock"
            until_s = time.monotonic() + 120
            while not path.exists() and run.poll() is None and time.monotonic() < until_s:
                time.sleep(0.05)
            assert run.poll() is None, run.communicate()[1]
            assert main(["devices", "list"]) == 0
            said = capsys.readouterr().out
            assert f"process {run.pid} runs demo-7m" in said and "CPU-1 on here" in said
            words = ["add", "CPU-2", "--cluster", str(large), "--horizon", "1e6", "--json"]
            assert main(["devices", *words]) == 0
            added = json.loads(capsys.readouterr().out)
            assert main(["devices", "drain", "CPU-1"]) == 0
            assert "CPU-1 is drained" in capsys.readouterr().out
            assert main(["devices", "drain", "here"]) == ExitCode.DOES_NOT_FIT
            assert "no device is left" in capsys.readouterr().err
            assert main(["devices", "add", "CPU-9"]) == ExitCode.USAGE
            assert "node or device 'CPU-9'" in capsys.readouterr().err
            assert main(["devices", "list", "--json"]) == 0
            stages = json.loads(capsys.readouterr().out)["stages"]
            assert [stage["device"] for stage in stages] == ["CPU-0", "CPU-2"][: 1 + added["done"]]
            run.send_signal(signal.SIGINT)  # before the last row, on any machine
            errors = run.communicate(timeout=240)[1]
        finally:
            run.kill()
    assert run.returncode == ExitCode.INTERRUPTED, errors
    assert "planned again" in errors and "CPU-2" in errors
    assert not path.exists()
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert answers and all(len(answer["tokens"]) == 20 for answer in answers)
    assert os.listdir(control_socket.folder()) == []
