"""A solver that crashes, refuses or answers, in its own process."""

from __future__ import annotations

import faulthandler
import os
import random
import signal

import pytest

from llmpq.planner.isolated import SolverCrashed, solve_isolated
from llmpq.planner.methods import solve
from llmpq.planner.outcome import Infeasible, Outcome
from llmpq.planner.random_problems import random_problem

pytestmark = pytest.mark.pure


def test_the_answer_is_the_same_as_in_place() -> None:
    p = random_problem(random.Random(1), layers=(4, 4), kinds=(1, 1), devices=(2, 2))
    p = p.with_changes(theta=0.0)
    here, there = solve(p, "exact"), solve_isolated(lambda: solve(p, "exact"), what="exact")
    assert here.assignment == there.assignment
    assert (here.value, here.bound, here.status) == (there.value, there.bound, there.status)


def test_a_crash_is_an_error_with_a_way_out() -> None:
    def crash() -> Outcome:
        faulthandler.disable()  # the trace of a planned crash would only confuse
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError("unreachable")

    with pytest.raises(SolverCrashed) as caught:
        solve_isolated(crash, what="ilp")
    assert str(caught.value) == (
        "the solver of --method ilp died (signal 11); try --method exact, ilp with --solver cbc, "
        "or heuristic"
    )


def test_refusals_come_through() -> None:
    def no_plan() -> Outcome:
        raise Infeasible("too small")

    def bad() -> Outcome:
        raise ValueError("bad flag")

    with pytest.raises(Infeasible, match="too small"):
        solve_isolated(no_plan, what="exact")
    with pytest.raises(ValueError, match="bad flag"):
        solve_isolated(bad, what="exact")


def test_a_bug_in_the_child_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    def bug() -> Outcome:
        raise ZeroDivisionError("planted")

    with pytest.raises(SolverCrashed, match=r"died \(no answer\)"):
        solve_isolated(bug, what="exact")
    assert "ZeroDivisionError: planted" in capfd.readouterr().err
