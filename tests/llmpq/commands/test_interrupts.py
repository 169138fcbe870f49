"""A signal that ends a command ends it, also where a library loses the interrupt."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from llmpq.commands.command_line import AGAIN_S, end_of
from llmpq.errors import ExitCode

pytestmark = pytest.mark.pure
ENDING = (signal.SIGTERM, signal.SIGHUP)


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

    before = signal.getsignal(number)
    assert end_of("llmpq-x", run, interrupted="stopped") == ExitCode.INTERRUPTED
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

    assert end_of("llmpq-x", run) == ExitCode.INTERRUPTED and done == [True]


def test_what_an_interrupt_breaks_is_an_interrupt() -> None:
    def run() -> int:
        with suppress(KeyboardInterrupt):
            interrupted(signal.SIGTERM)
        raise ImportError("cannot load module more than once per process")

    assert end_of("llmpq-x", run) == ExitCode.INTERRUPTED


def test_a_second_signal_ends_a_clean_up() -> None:
    def run() -> int:
        try:
            interrupted(signal.SIGTERM)
        finally:
            interrupted(signal.SIGTERM)
        return 0

    start_s = time.monotonic()
    assert end_of("llmpq-x", run) == ExitCode.INTERRUPTED
    assert time.monotonic() - start_s < 50
