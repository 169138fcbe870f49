"""A solver that crashes, refuses or answers, in its own process: a fork or a fresh interpreter."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llmpq.planner import isolated
from llmpq.planner.isolated import SolverCrashed, solve_forked, solve_isolated, solve_spawned
from llmpq.planner.methods import How, solve
from llmpq.planner.outcome import Infeasible, Outcome
from llmpq.planner.problem import Problem
from llmpq.planner.problem_form import parse_problem, problem_data
from llmpq.planner.random_problems import random_problem

pytestmark = pytest.mark.pure

DIED = (
    "the solver of --method ilp died (signal 11); try --method exact, ilp with --solver cbc, "
    "or heuristic"
)
CRASHING_CHILD = (sys.executable, "-c", "import os; os.kill(os.getpid(), 11)")


def _problem() -> Problem:
    p = random_problem(random.Random(1), layers=(4, 4), kinds=(1, 1), devices=(2, 2))
    return p.with_changes(theta=0.0)


@contextmanager
def _other_thread() -> Iterator[None]:
    """Keep a second thread alive, as a progress bar's monitor is."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_problem_survives_its_json() -> None:
    p = _problem().with_changes(pins={"K0-0": (0, 2)}, max_devices=2)
    assert parse_problem(problem_data(p)) == p


def test_the_answer_is_the_same_as_in_place() -> None:
    p = _problem()
    here, how = solve(p, "exact"), How(method="exact")
    budget = How(method="exact", budget=float(p.omega.max(axis=1).sum()))
    forked, spawned = solve_isolated(p, how), solve_spawned(p, how)
    for there in (forked, spawned, solve_isolated(p, budget)):
        assert there.value == pytest.approx(here.value, rel=1e-6)
    assert here.assignment == forked.assignment == spawned.assignment
    assert (here.bound, here.status) == (spawned.bound, spawned.status)


def test_never_in_the_callers_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(*_: object) -> Outcome:
        raise AssertionError("solved in place")

    ways: list[str] = []
    monkeypatch.setattr(isolated, "solve_as", here)
    monkeypatch.setattr(isolated, "solve_forked", lambda *_, **__: ways.append("fork"))
    monkeypatch.setattr(isolated, "solve_spawned", lambda *_: ways.append("spawn"))
    with _other_thread():
        solve_isolated(_problem(), How(method="ilp"))
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    solve_isolated(_problem(), How(method="ilp"))
    assert ways == ["spawn", "fork"]


def test_a_crash_is_an_error_with_a_way_out() -> None:
    parent = os.getpid()

    def crash() -> Outcome:
        assert os.getpid() != parent, "would kill the tests"
        faulthandler.disable()  # the trace of a planned crash would only confuse
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError("unreachable")

    with pytest.raises(SolverCrashed) as caught:
        solve_forked(crash, what="ilp")
    assert str(caught.value) == DIED
    with pytest.raises(SolverCrashed) as caught, _other_thread():
        solve_spawned(_problem(), How(method="ilp"), child=CRASHING_CHILD)
    assert str(caught.value) == DIED


def test_refusals_come_through() -> None:
    def no_plan() -> Outcome:
        raise Infeasible("too small")

    with pytest.raises(Infeasible, match="too small"):
        solve_forked(no_plan, what="exact")
    with pytest.raises(ValueError, match="--method flexgen is an estimate"):
        solve_forked(lambda: solve(_problem(), "flexgen"), what="flexgen")
    with pytest.raises(ValueError, match="--method flexgen is an estimate"):
        solve_spawned(_problem(), How(method="flexgen"))


def test_a_bug_in_the_child_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    def bug() -> Outcome:
        raise ZeroDivisionError("planted")

    with pytest.raises(SolverCrashed, match=r"died \(no answer\)"):
        solve_forked(bug, what="exact")
    assert "ZeroDivisionError: planted" in capfd.readouterr().err
    with pytest.raises(SolverCrashed, match=r"died \(no answer\)"):
        solve_spawned(_problem(), How(method="exact", backend="highs", gap="wide"))  # type: ignore[arg-type]
    assert "TypeError" in capfd.readouterr().err
