"""A Ray that llmpq starts: who can reach it, and what is left of it when it does not get far."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.cluster
LIMIT_S = 100
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
STOPPED = """
import contextlib, os, signal, sys, threading, time
from llmpq.runtime.launch.on_ray.placement import ray_cluster

heard = []

def told_to_stop():
    count = len(heard)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    return len(heard) == count + 1

signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
signal.alarm(1000)  # the caller's own guard
with WHERE:
    assert told_to_stop()
    end_s = time.monotonic() + 4  # what was begun is written, answers under way are finished
    while time.monotonic() < end_s:
        time.sleep(0.1)
    MEANWHILE
assert told_to_stop()
assert signal.alarm(0) > 900
LATER
sys.exit(130)
"""
IN_A_THREAD = """
@contextlib.contextmanager
def in_a_thread(other):  # where a server loads its engine
    started, over = threading.Event(), threading.Event()

    def hold():
        with other:
            started.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    started.wait()
    yield
    over.set()
    thread.join()
"""
LIST_SOCKETS = """
    import psutil, ray
    actor = ray.remote(type("Worker", (), {"pid": lambda self: os.getpid()})).remote()
    ray.get(actor.pid.remote())
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        for link in process.net_connections("inet"):
            if link.status == psutil.CONN_LISTEN:
                print(process.name(), link.laddr.ip)
    words = [word for process in me.children(recursive=True) for word in process.cmdline()]
    print("runs", *(name for name in ("monitor", "dashboard") if f"{name}.py" in str(words)))
    print("token", len(os.environ["RAY_AUTH_TOKEN"]), os.environ["RAY_AUTH_MODE"])
"""
LIST_LEFT = """
from ray._private.node import Node
print(Node.start_monitor.__name__, Node.start_log_monitor.__name__)
print("after", os.environ.get("RAY_AUTH_TOKEN"), len(me.children(recursive=True)))
"""
JOIN_WITHOUT_TOKEN = """
import sys
from ray._raylet import GcsClient

try:
    GcsClient(address=sys.argv[1]).get_all_node_info()
except Exception as error:
    print(type(error).__name__)
"""


def _stopped(folder: Path, where: str, meanwhile: str = "pass", later: str = "") -> list[str]:
    """Start a Ray in a process that is told to stop, and takes four seconds; return its lines.

    Ray's own handler would abort it after three, with a trace of C++ before.
    """
    code = STOPPED.replace("with WHERE", f"{IN_A_THREAD}\nwith {where}")
    code = code.replace("    MEANWHILE", textwrap.indent(textwrap.dedent(meanwhile), "    "))
    done = subprocess.run(
        [sys.executable, "-c", code.replace("LATER", later)],
        text=True, capture_output=True, timeout=LIMIT_S,
        # Nothing of a Ray that other tests have started in this process.
        env={name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        | {"TMPDIR": str(folder)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "")
    return done.stdout.splitlines()


def test_what_listens_is_on_loopback_and_wants_a_token_and_has_time_to_stop(folder):
    *sockets, runs, token, starts, after = _stopped(
        folder, "ray_cluster(None)", LIST_SOCKETS, LIST_LEFT
    )
    hosts = {line.split()[-1].removeprefix("::ffff:") for line in sockets}
    assert any(line.startswith("gcs_server") for line in sockets)
    assert any(line.startswith("raylet") for line in sockets)
    assert hosts == {"127.0.0.1"}, sockets
    assert runs == "runs", "nothing of Ray's that a job on one machine does not use"
    assert starts == "start_monitor start_log_monitor", "another Ray of this process has them"
    assert token.split()[1:] == ["64", "token"]
    assert after == "after None 0", "neither the token nor a process outlives the block"


def test_a_process_whose_thread_holds_ray_has_time_to_stop(folder):
    assert _stopped(folder, "in_a_thread(ray_cluster(None))") == []


def test_who_has_no_token_is_refused(ray_session):
    without = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", JOIN_WITHOUT_TOKEN, ray_session],
        env=without | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["AuthenticationError"], done.stderr


def _descendants(of: psutil.Process) -> list[psutil.Process]:
    try:
        return of.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _start_and_disturb(
    folder: Path, victim: str | signal.Signals, *, nohup: bool = False
) -> tuple[int, str, list[str]]:
    """Run a command that starts Ray; at Ray's first process, send a signal or kill a part.

    Returns exit code, stderr, and what is left.
    """
    # The tests themselves may run under nohup, which what they start would inherit.
    heeded, hangup = signal.getsignal(signal.SIGHUP), signal.SIG_IGN if nohup else signal.SIG_DFL
    signal.signal(signal.SIGHUP, hangup)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmpq.runtime", "check", "plan.json"], cwd=folder,
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env=os.environ | {"TMPDIR": str(folder)},
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGHUP, heeded)
    me, seen, done = psutil.Process(process.pid), dict[int, psutil.Process](), False
    end_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < end_s:
        for child in _descendants(me):
            seen[child.pid] = child
            with contextlib.suppress(psutil.Error):
                if not done and isinstance(victim, str) and child.name() == victim:
                    child.kill()
                    done = True
                elif not done and victim in SIGNALS and child.name() == "gcs_server":
                    process.send_signal(victim)
                    done = True
        time.sleep(0.02)
    assert done, "Ray was to be disturbed while it started"
    _, errors = process.communicate(timeout=LIMIT_S)
    left = []
    for child in seen.values():
        with contextlib.suppress(psutil.Error):
            if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                left.append(child.name())
    return process.returncode, errors, left + [path.name for path in folder.glob("llmpq-ray-*")]


@pytest.fixture
def folder(make_plan, demo_model) -> Iterator[Path]:
    """Return a folder with a plan, of a name so short that Ray's sockets go there."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t-") as name:
        make_plan(demo_model).save_json(Path(name) / "plan.json")
        yield Path(name)


@pytest.mark.parametrize(
    ("victim", "code", "says"),
    [
        (signal.SIGTERM, 130, "interrupted"),
        (signal.SIGHUP, 130, "interrupted"),
        ("gcs_server", 6, "could not start Ray on this machine: its process gcs_server died"),
        pytest.param(
            *("raylet", 6, "could not start Ray on this machine: its process raylet died"),
            marks=pytest.mark.seldom,
        ),
    ],
)
def test_a_start_that_is_cut_short_leaves_a_sentence_and_nothing_else(folder, victim, code, says):
    found, errors, left = _start_and_disturb(folder, victim)
    lines = [line for line in errors.splitlines() if line.startswith("llmpq-dist: ")]
    assert found == code, errors
    assert len(lines) == 1 and says in lines[0], errors
    assert "Traceback" not in errors
    assert left == []


def test_a_start_under_nohup_outlives_its_terminal(folder):
    found, errors, left = _start_and_disturb(folder, signal.SIGHUP, nohup=True)
    assert (found, left) == (0, []), errors


HOLD_RAY = """
import sys, time
from llmpq.errors import StageLostError
from llmpq.runtime.launch.on_ray.placement import ray_cluster

if sys.argv[1:]:  # a busy machine: a thread of Ray's asks its server late, for a minute
    import ray._private.worker as worker

    ask = worker._internal_kv_get
    worker._internal_kv_get = lambda key: (time.sleep(0.5), ask(key))[1]
try:
    with ray_cluster(None):
        print("started", flush=True)
        time.sleep(50)
except StageLostError as error:
    sys.exit(f"{error}")
"""


@pytest.mark.parametrize(("victim", "late"), [("raylet", []), ("gcs_server", ["late"])])
def test_a_ray_that_dies_while_it_is_used_ends_the_wait_and_leaves_nothing(folder, victim, late):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_RAY, *late], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        | {"TMPDIR": str(folder)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    parts = _descendants(psutil.Process(process.pid))
    (part,) = [child for child in parts if child.name() == victim]
    part.kill()
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert f"Ray's process {victim} on this machine died" in errors, errors
    assert "Traceback" not in errors
    _, left = psutil.wait_procs(parts, timeout=10)  # agents look for their raylet every few seconds
    assert [child.name() for child in left] == []
    assert list(folder.glob("llmpq-ray-*")) == []
