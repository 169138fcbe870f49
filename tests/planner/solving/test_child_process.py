"""A solver that crashes, refuses or answers, in its own process: a fork or a fresh interpreter."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.answer import Wish, _tried
from llmpq.planner.baselines.flexgen import estimate_flexgen
from llmpq.planner.front.front import Front, pareto_front
from llmpq.planner.problem.outcome import Infeasible, Outcome
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.problem_form import parse_problem, problem_data
from llmpq.planner.solving import isolated
from llmpq.planner.solving.isolated import (
    SolverCrashed,
    answer_forked,
    answer_spawned,
    front_isolated,
    offload_isolated,
    solve_isolated,
)
from llmpq.planner.solving.methods import How, solve
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]

DIED = (
    "the solver of --method ilp died (signal 11); try --method exact, ilp with --solver cbc, "
    "or heuristic"
)
CRASHING_CHILD = (sys.executable, "-c", "import os; os.kill(os.getpid(), 11)")


def _problem() -> Problem:
    p = random_problem(random.Random(1), layers=(4, 4), kinds=(1, 1), devices=(2, 2))
    return p.with_changes(theta=0.0)


def _spawned(how: How, *, child: Sequence[str] = isolated.CHILD) -> dict[str, Any]:
    return answer_spawned(_problem(), "plan", asdict(how), what=how.method, child=child)


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
    forked = solve_isolated(p, how)
    with _other_thread():
        spawned = solve_isolated(p, how)
    for there in (forked, spawned, solve_isolated(p, budget)):
        assert there.value == pytest.approx(here.value, rel=1e-6)
    assert here.assignment == forked.assignment == spawned.assignment
    assert (here.bound, here.status) == (spawned.bound, spawned.status)


def test_fronts_and_estimates_are_the_same_as_in_place() -> None:
    p = _problem()
    front, offload = pareto_front(p, points=3), estimate_flexgen(p)

    def plans(front: Front) -> list[object]:
        return [(point.time_s, point.omega, point.outcome.assignment) for point in front.points]

    def compare() -> None:
        there = front_isolated(p, points=3, time_limit_s=60.0)
        assert plans(there) == plans(front)
        assert (there.width, there.complete) == (front.width, front.complete)
        assert offload_isolated(p) == offload

    compare()
    with _other_thread():
        compare()


def test_never_in_the_callers_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(*_: object, **__: object) -> Outcome:
        raise AssertionError("solved in place")

    ways: list[str] = []

    def way(name: str) -> Callable[..., dict[str, Any]]:
        def answer(*_: object, **__: object) -> dict[str, Any]:
            ways.append(name)
            raise Infeasible("asked")

        return answer

    monkeypatch.setattr(isolated, "run_job", here)
    monkeypatch.setattr(isolated, "answer_forked", way("fork"))
    monkeypatch.setattr(isolated, "answer_spawned", way("spawn"))
    p = _problem()
    asked: tuple[Callable[[], object], ...] = (
        lambda: solve_isolated(p, How(method="ilp")),
        lambda: front_isolated(p, points=3, time_limit_s=1.0),
        lambda: offload_isolated(p),
    )
    for threads, name in ((2, "spawn"), (1, "fork")):
        monkeypatch.setattr(threading, "active_count", lambda threads=threads: threads)
        ways.clear()
        for ask in asked:
            with pytest.raises(Infeasible):
                ask()
        assert ways == [name] * 3


@pytest.mark.parametrize("flag", ["--explain", "--pareto", "--method=all"])
def test_the_command_solves_nothing_in_its_own_process(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked: HiGHS runs in children only."""
    import highspy

    parent = os.getpid()
    honest = highspy.Highs.run

    def watched(self: highspy.Highs) -> object:
        assert os.getpid() != parent, "solved in place"
        return honest(self)

    monkeypatch.setattr(highspy.Highs, "run", watched)
    words = ["--device-names", "V100", "--device-numbers", "1", "--model", "opt-1.3b"]
    job = ["--global-bz", "2", "--s", "64", "--n", "8", "--bits", "4,16", flag]
    assert main([*words, *job]) == 0, capsys.readouterr().err


def test_a_crash_is_an_error_with_a_way_out() -> None:
    parent = os.getpid()

    def crash() -> Outcome:
        assert os.getpid() != parent, "would kill the tests"
        faulthandler.disable()  # the trace of a planned crash would only confuse
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError("unreachable")

    with pytest.raises(SolverCrashed) as caught:
        answer_forked(crash, what="ilp")
    assert str(caught.value) == DIED
    with pytest.raises(SolverCrashed) as caught, _other_thread():
        _spawned(How(method="ilp"), child=CRASHING_CHILD)
    assert str(caught.value) == DIED


def test_refusals_come_through() -> None:
    def no_plan() -> Outcome:
        raise Infeasible("too small")

    with pytest.raises(Infeasible, match="too small"):
        answer_forked(no_plan, what="exact")
    with pytest.raises(ValueError, match="--method flexgen is an estimate"):
        answer_forked(lambda: solve(_problem(), "flexgen"), what="flexgen")
    with pytest.raises(ValueError, match="--method flexgen is an estimate"):
        _spawned(How(method="flexgen"))


def test_a_bug_in_the_child_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    def bug() -> Outcome:
        raise ZeroDivisionError("planted")

    with pytest.raises(SolverCrashed, match=r"died \(no answer\)"):
        answer_forked(bug, what="exact")
    assert "ZeroDivisionError: planted" in capfd.readouterr().err
    with pytest.raises(SolverCrashed, match=r"died \(no answer\)"):
        _spawned(How(method="exact", backend="highs", gap="wide"))  # type: ignore[arg-type]
    assert "TypeError" in capfd.readouterr().err


@pytest.mark.parametrize("beside", [False, True])
def test_an_interrupt_ends_every_child(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def run_job(*_: object) -> Outcome:
        time.sleep(60)
        raise AssertionError("it was to be ended")

    monkeypatch.setattr(isolated, "run_job", run_job)
    monkeypatch.setattr(isolated, "may_fork", lambda: True)
    monkeypatch.setattr(isolated, "has_spare_core", lambda: beside)
    p = random_problem(random.Random(3))
    assert len(p.choices) > 1
    wish = Wish(method="exact", time_limit_s=60.0, gap=1e-4, backend="highs", budget=None, kvs=())
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.6)
        with pytest.raises(KeyboardInterrupt):
            _tried([p], wish)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ChildProcessError):  # there is none left
        os.waitpid(-1, os.WNOHANG)


def test_a_child_that_was_waited_for_is_not_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    child = isolated.Fork(lambda: solve(_problem(), "exact"))
    child.answer("exact")
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("its number may be another's by now"))
    child.kill()
