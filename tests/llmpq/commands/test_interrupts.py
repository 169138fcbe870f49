"""A signal that ends a command ends it, also where a library loses the interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from llmpq.commands.command_line import run_command
from llmpq.commands.interrupts import AGAIN_S
from llmpq.errors import ExitCode

pytestmark = pytest.mark.pure
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupted(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


@pytest.mark.parametrize("number", ENDING)
def test_an_interrupt_that_is_lost_comes_again(
    capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    lost = []

    def run() -> int:
        for _ in range(2):
            with suppress(KeyboardInterrupt):
                interrupted(number)
            lost.append(number)
        time.sleep(60)
        return 0

    signal.signal(number, signal.default_int_handler)  # a shell may have it ignored
    before = signal.getsignal(number)
    assert run_command("llmpq-x", run, interrupted="stopped") == ExitCode.INTERRUPTED
    assert lost == [number] * 2 and capsys.readouterr().err == "llmpq-x: stopped\n"
    assert signal.getsignal(number) is before


def test_what_is_cleaned_up_is_not_interrupted_again() -> None:
    done = []

    def run() -> int:
        try:
            interrupted(signal.SIGTERM)
        finally:
            try:
                time.sleep(2 * AGAIN_S)
                raise OSError("in the way")
            except OSError:
                time.sleep(AGAIN_S)
            done.append(True)
        return 0

    assert run_command("llmpq-x", run) == ExitCode.INTERRUPTED and done == [True]


def test_what_an_interrupt_breaks_is_an_interrupt() -> None:
    def run() -> int:
        with suppress(KeyboardInterrupt):
            interrupted(signal.SIGTERM)
        raise ImportError("cannot load module more than once per process")

    assert run_command("llmpq-x", run) == ExitCode.INTERRUPTED


def test_a_second_signal_ends_a_clean_up() -> None:
    def run() -> int:
        try:
            interrupted(signal.SIGTERM)
        finally:
            interrupted(signal.SIGTERM)
        return 0

    start_s = time.monotonic()
    assert run_command("llmpq-x", run) == ExitCode.INTERRUPTED
    assert time.monotonic() - start_s < 50


COMMAND = """
import signal, subprocess, sys, threading, time
from llmpq.commands import interrupts
from llmpq.commands.command_line import run_command

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)  # a shell may have them ignored
interrupts.END_S = {end_s}

def cling():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            cling()

def in_lock():
    with threading._active_limbo_lock:
        time.sleep(600)

def write():
    sys.stderr.write("." * (1 << 20))

def run():
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    try:
        {doing}()
    finally:
        child.kill()
        child.wait()

sys.exit(run_command("x", run, interrupted="interrupted", own_process=True))
"""


@pytest.mark.parametrize(
    ("doing", "signals", "end_s", "said"),
    [
        ("cling", [signal.SIGINT], 1, "x: interrupted (ended as it is, since it still waited in "),
        ("cling", [signal.SIGINT] * 3, 60, "x: interrupted (ended at once, by the third signal)"),
        ("in_lock", [signal.SIGTERM], 60, "x: interrupted"),  # where a thread is being started
        ("write", [signal.SIGINT], 1, ""),  # nobody reads it
    ],
)
def test_a_command_ends_whatever_it_waits_for(
    doing: str, signals: list[signal.Signals], end_s: int, said: str
) -> None:
    code = COMMAND.format(doing=doing, end_s=end_s)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        child = psutil.Process(int(command.stdout.readline()))
        for number in signals:
            time.sleep(0.3)
            command.send_signal(number)
        assert command.wait(30) == ExitCode.INTERRUPTED
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert command.stderr.read().lstrip(".").startswith(said)
