"""A solver that crashes, refuses or answers, in its own process: a fork or a fresh interpreter."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.front.front import Front, pareto_front
from llmpq.planner.ilp.flexgen import estimate_flexgen
from llmpq.planner.problem.outcome import Infeasible, Outcome
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving import worker
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import search_plan
from llmpq.planner.solving.problem_json import parse_problem, problem_data
from llmpq.planner.solving.worker import (
    SolverCrashed,
    front_in_child,
    offload_in_child,
    plan_in_child,
    run_in_child,
)
from llmpq.precision import KVPrecision
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
    for options in (
        SolveOptions(kvs=(KVPrecision.KV16, KVPrecision.KV8)),
        SolveOptions(budget=float(p.omega.max(axis=1).sum())),
        SolveOptions(kvs=(KVPrecision.KV16,), prefer="speed"),
    ):
        here = search_plan(p, options)
        forked = plan_in_child(p, options)
        with _other_thread():
            spawned = plan_in_child(p, options)
        for there in (forked, spawned):
            assert there.problem == here.problem
            assert there.outcome.assignment == here.outcome.assignment
            assert there.outcome.value == pytest.approx(here.outcome.value, rel=1e-6)
            assert (there.outcome.bound, there.outcome.status) == (
                pytest.approx(here.outcome.bound),
                here.outcome.status,
            )


def test_fronts_and_estimates_are_the_same_as_in_place() -> None:
    p = _problem()
    front, offload = pareto_front(p, points=3), estimate_flexgen(p)

    def plans(front: Front) -> list[object]:
        return [(point.time_s, point.omega, point.outcome.assignment) for point in front.points]

    def compare() -> None:
        there = front_in_child(p, points=3, time_limit_s=60.0)
        assert plans(there) == plans(front)
        assert (there.width, there.complete) == (front.width, front.complete)
        assert offload_in_child(p) == offload

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

    monkeypatch.setattr(worker, "_do", here)
    monkeypatch.setattr(worker, "_forked", way("fork"))
    monkeypatch.setattr(worker, "_spawned", way("spawn"))
    p = _problem()
    asked: tuple[Callable[[], object], ...] = (
        lambda: plan_in_child(p, SolveOptions(method="ilp")),
        lambda: front_in_child(p, points=3, time_limit_s=1.0),
        lambda: offload_in_child(p),
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


def _plan_by(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, method: str) -> object:
    """Plan in a fork whose search is `work`."""
    monkeypatch.setattr(worker, "may_fork", lambda: True)
    monkeypatch.setattr(worker, "_do", lambda *_: work())
    return plan_in_child(_problem(), SolveOptions(method=method))


def test_a_crash_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()

    def crash() -> Outcome:
        assert os.getpid() != parent, "would kill the tests"
        faulthandler.disable()  # the trace of a planned crash would only confuse
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError("unreachable")

    with pytest.raises(SolverCrashed) as caught:
        _plan_by(crash, monkeypatch, "ilp")
    assert str(caught.value) == DIED
    with pytest.raises(SolverCrashed) as caught:
        run_in_child(_problem(), "plan", {}, method="ilp", child=CRASHING_CHILD)
    assert str(caught.value) == DIED


def test_refusals_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_plan() -> Outcome:
        raise Infeasible("too small")

    with pytest.raises(ValueError, match="--method flexgen is an estimate"):
        plan_in_child(_problem(), SolveOptions(method="flexgen"))
    with _other_thread(), pytest.raises(ValueError, match="--method flexgen is an estimate"):
        plan_in_child(_problem(), SolveOptions(method="flexgen"))
    with pytest.raises(Infeasible, match="too small"):
        _plan_by(no_plan, monkeypatch, "exact")


def test_a_bug_in_the_child_is_reported(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _other_thread(), pytest.raises(SolverCrashed, match=r"died \(no answer\)"):
        plan_in_child(_problem(), SolveOptions(gap="wide"))  # type: ignore[arg-type]
    assert "TypeError" in capfd.readouterr().err

    def bug() -> Outcome:
        raise ZeroDivisionError("planted")

    with pytest.raises(SolverCrashed, match=r"died \(no answer\)"):
        _plan_by(bug, monkeypatch, "exact")
    assert "ZeroDivisionError: planted" in capfd.readouterr().err


def test_an_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = tmp_path / "pid"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def sleep() -> Outcome:
        written.write_text(str(os.getpid()))
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGALRM)
        time.sleep(60)
        raise AssertionError("it was to be ended")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            _plan_by(sleep, monkeypatch, "exact")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not psutil.pid_exists(int(written.read_text()))  # ended, and waited for


WAITS = """
import os, sys, time
from llmpq.planner.__main__ import main
from llmpq.planner.solving import worker

def wait(*_):
    print("solving", os.getpid(), flush=True)
    time.sleep(600)

worker._do = wait
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 130),
        (signal.SIGHUP, 130),
        (signal.SIGKILL, -9),
    ],
)
def test_a_solver_ends_with_its_command(number: signal.Signals, code: int) -> None:
    words = ["--devices", "3060,3070", "--model", "opt-1.3b", "--batch", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", WAITS, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        child = psutil.Process(int(command.stdout.readline().split()[1]))
        command.send_signal(number)
        assert command.wait(60) == code
        said = command.stderr.read().decode().splitlines()
        assert said[-1:] == (["llmpq-algo: interrupted"] if code == 130 else said[-1:])
    end_s = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end_s, "the solver goes on without its command"
            time.sleep(0.05)
