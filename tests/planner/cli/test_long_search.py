"""Who waits at a terminal for a long search reads what is being done, once."""

from __future__ import annotations

import io
import signal
import sys
import time

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.cli import long_search
from llmpq.planner.cli.long_search import line_if_long

pytestmark = [
    pytest.mark.pure,
    pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="by an alarm of the system"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called within a test: pytest puts its own stderr in place behind the fixtures."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(long_search, "AFTER_S", 0.001)
    return made


def test_the_line_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, before = at_terminal(monkeypatch), signal.getsignal(signal.SIGALRM)
    with line_if_long("looking", 60.0):
        end_s = time.monotonic() + 30
        while not terminal.getvalue() and time.monotonic() < end_s:
            time.sleep(0.01)
        time.sleep(0.01)
    assert terminal.getvalue() == "llmpq-algo: looking (--time-limit 60)\n"
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_short_search_and_one_without_a_terminal_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, own = at_terminal(monkeypatch), signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(long_search, "AFTER_S", 1000.0)
    with line_if_long("looking", 60.0):
        assert signal.getsignal(signal.SIGALRM) != own
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 500
    assert signal.getsignal(signal.SIGALRM) == own
    assert signal.getitimer(signal.ITIMER_REAL)[0] < 500
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with line_if_long("looking", 60.0):
        assert signal.getsignal(signal.SIGALRM) == own
    assert terminal.getvalue() == plain.getvalue() == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gen-len", "16"], "looking for the best plan"),
        (["--pareto", "--pareto-points", "3"], "looking for the plans of the front"),
        (
            ["--prompt", "64", "--gen", "16", "--rate", "2", "--requests", "8"],
            "planning engines and simulating them under 8 requests",
        ),
    ],
)
def test_every_search_has_a_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = at_terminal(monkeypatch)
    assert main(["--model", "opt-1.3b", "--devices", "t4", "--time-limit", "9", *words]) == 0
    assert terminal.getvalue().count(f"llmpq-algo: {said} (--time-limit 9)\n") == 1
