"""Stage processes that are forked: their pipes, their environment, their ends."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from llmpq.child import CallFailed, Child
from llmpq.runtime.launch.stages.fork_server import STAGE_PROCESS
from llmpq.runtime.launch.stages.forked_process import ForkServer

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def forks():
    server = ForkServer()
    yield server
    server.close()


def test_a_forked_process_answers_and_its_end_is_known(forks):
    process = forks.fork({**os.environ, "OMP_NUM_THREADS": "1"})
    listed, end_s = [], time.monotonic() + 60
    while STAGE_PROCESS not in listed and time.monotonic() < end_s:  # it calls itself so at once
        listed = psutil.Process(process.pid).cmdline()
    assert STAGE_PROCESS in listed and "fork_server" not in " ".join(listed)
    child = Child(STAGE_PROCESS, {"nonsense": 1}, process=process)
    open_call = child.call("health")
    with pytest.raises(CallFailed, match=r"its process ended with code 1: KeyError: 'index'"):
        open_call.result(timeout=60)
    child.wait()


def test_a_killed_one_is_named_at_once_even_if_it_was_stopped(forks):
    process = forks.fork(os.environ)
    os.kill(process.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    assert process.stdout.read() == "" and process.wait() == -signal.SIGKILL
    assert time.monotonic() - began_s < 20
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


def test_it_ends_with_its_standard_input(forks):
    process = forks.fork(os.environ)
    process.stdin.close()
    assert process.stdout.read() == ""
    assert process.wait() != -signal.SIGKILL
    process.stdout.close()
    process.stderr.close()


def test_a_server_that_was_killed_is_started_again(forks):
    survivor = forks.fork(os.environ)
    forks._server.kill()
    forks._server.wait()
    other = forks.fork(os.environ)
    assert psutil.pid_exists(survivor.pid), "stages do not end with what forked them"
    for process in (survivor, other):
        os.kill(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
