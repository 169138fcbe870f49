"""A Ray that is started for a job: who can reach it, how it ends, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.cluster
LIMIT_S = 100
HOLD = """
import os, signal, sys, time
import psutil
from llmpq.commands.ray_address import import_ray

signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
signal.alarm(1000)  # the caller's own guard
import_ray(None)
import ray
from llmpq.runtime.launch.on_ray.connect import ray_cluster

def told_to_stop():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    signal.signal(signal.SIGTERM, before)
    return bool(heard)

print("begun", flush=True)
me = psutil.Process()
with ray_cluster(None):
    worker = ray.remote(type("Worker", (), {"pid": lambda self: os.getpid()})).remote()
    ray.get(worker.pid.remote())
    for process in [me, *me.children(recursive=True)]:
        for link in process.net_connections("inet"):
            if link.status == psutil.CONN_LISTEN:
                print("listens", process.name(), link.laddr.ip)
    assert told_to_stop()
    end_s = time.monotonic() + 4  # Ray's own handler would abort the process after three
    while time.monotonic() < end_s:
        time.sleep(0.1)
assert told_to_stop() and signal.alarm(0) > 900
print("after", len([one for one in me.children(recursive=True) if one.status() != "zombie"]))
"""


def _started() -> subprocess.Popen[str]:
    # Nothing of a Ray that other tests have started in this process.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", HOLD], text=True, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_it_listens_on_loopback_leaves_signals_alone_and_is_gone_after() -> None:
    out, errors = (process := _started()).communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    lines = [line.split() for line in out.splitlines()]
    hosts = {line[-1].removeprefix("::ffff:") for line in lines if line[0] == "listens"}
    assert hosts == {"127.0.0.1"} and any("gcs_server" in line[1] for line in lines[1:])
    assert lines[-1] == ["after", "0"]


def test_a_start_that_is_cut_short_leaves_no_process() -> None:
    process = _started()
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    me, seen = psutil.Process(process.pid), dict[int, psutil.Process]()
    end_s = time.monotonic() + LIMIT_S
    while not any(one.name() == "gcs_server" for one in seen.values()):
        assert time.monotonic() < end_s and process.poll() is None
        seen |= {one.pid: one for one in me.children(recursive=True)}
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert psutil.wait_procs(list(seen.values()), timeout=20)[1] == []
