"""Plans of one precision alone, and the search of them beside the whole one."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from llmpq.planner.answer import Wish, _tried
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.pipeline_time import sum_omega, value
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.problem.outcome import Infeasible, Outcome, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving import isolated, uniform_precision_search
from llmpq.planner.solving.isolated import Beside
from llmpq.planner.solving.kv_precision_sweep import Tries
from llmpq.planner.solving.methods import How
from reference.random_problems import random_problem

ALL = "LLMPQ_ALL_TESTS" in os.environ
HOW = How(method="exact", time_limit_s=1.0)

pytestmark = [pytest.mark.pure, pytest.mark.slow]


def _seeds(count: int) -> list[int]:
    """Return seeds of problems of several choices that fit a plan of one of them."""
    found: list[int] = []
    seed = 0
    while len(found) < count:
        p = _problem(seed)
        if len(p.choices) > 1 and _least_of(seed) is not None:
            found.append(seed)
        seed += 1
    return found


@functools.cache
def _problem(seed: int) -> Problem:
    return random_problem(random.Random(seed), layers=(3, 6), kinds=(1, 2), devices=(1, 2))


@functools.cache
def _least_of(seed: int) -> float | None:
    """Return the least value of plans of one precision, each solved by itself."""
    p, values = _problem(seed), []
    for choice in p.choices:
        with contextlib.suppress(Infeasible):
            values.append(solve_exact(p.with_changes(choices=(choice,)), time_limit_s=5.0).value)
    return min(values, default=None)


def test_the_best_plan_of_one_precision() -> None:
    near = 0
    for seed in _seeds(6):
        p, least = _problem(seed), _least_of(seed)
        found = uniform_precision_search.solve_alone([p], HOW)
        assert least is not None
        outcome = found.outcome
        held = {b for stage in outcome.assignment.stages for b in stage.choices}
        assert found.number == 0
        assert len(held) == 1
        assert fits(p, outcome.assignment)
        assert outcome.value == pytest.approx(value(p, outcome.assignment), rel=1e-9)
        assert outcome.value >= least * (1 - 1e-6)
        assert outcome.bound is None
        near += outcome.value <= least * (1 + 1e-6)
    assert near >= 5  # it looks into the likely precisions alone


def test_the_best_of_several_problems() -> None:
    for seed in _seeds(3 if ALL else 2):
        p = _problem(seed)
        best = uniform_precision_search.solve_alone([p], HOW).outcome.value
        for problems in ([_slower(p), p], [p, _slower(p)]):
            found = uniform_precision_search.solve_alone(problems, HOW)
            assert problems[found.number] is p
            assert found.outcome.value == pytest.approx(best, rel=1e-6)


def _wish(**changes: Any) -> Wish:
    flags: dict[str, Any] = {
        "method": "exact",
        "time_limit_s": 1.0,
        "gap": 1e-4,
        "backend": "highs",
        "budget": None,
        "kvs": (),
    }
    return Wish(**{**flags, **changes})


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever threads a test has left."""
    monkeypatch.setattr(isolated, "may_fork", lambda: True)
    monkeypatch.setattr(isolated, "has_spare_core", lambda: True)
    monkeypatch.setattr(isolated, "ALONE_AFTER_S", 0.0)


@pytest.mark.usefixtures("two_cores")
def test_the_better_of_two_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    p = _problem(_seeds(1)[0])
    best = _known(p)
    worse = replace(best, value=best.value * 2, status="feasible", bound=best.value / 2)
    for whole, beside, value_s in ((worse, best, best.value), (worse, worse, worse.value)):
        _say(monkeypatch, whole, uniform_precision_search.Found(1, beside))
        found = _at_two_kvs(p)
        assert found is not None
        assert (found.value, found.bound) == (value_s, best.value / 2)


@pytest.mark.usefixtures("two_cores")
def test_a_plan_beside_a_search_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    p = _problem(_seeds(1)[0])
    best = _known(p)
    late = Unfinished("no plan yet", bound=best.value / 2)
    _say(monkeypatch, late, uniform_precision_search.Found(0, best))
    found = _at_two_kvs(p)
    assert found is not None
    assert found.bound == best.value / 2
    for beside in (Infeasible("none"), RuntimeError("a bug")):
        _say(monkeypatch, late, beside)
        assert _at_two_kvs(p) is None


@pytest.mark.usefixtures("two_cores")
def test_one_process_for_all_kv_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    p = _problem(_seeds(1)[0])
    best = _known(p)
    begun: list[int] = []
    began = Beside.begin

    def begin(beside: Beside) -> None:
        begun.append(len(beside.problems))
        began(beside)

    monkeypatch.setattr(Beside, "begin", begin)
    worse = replace(best, value=best.value * 2, status="feasible", bound=best.value / 2)
    _say(monkeypatch, worse, uniform_precision_search.Found(1, best))
    _at_two_kvs(p)
    assert begun == [2]


@pytest.mark.usefixtures("two_cores")
def test_a_proven_plan_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p = _problem(_seeds(1)[0])
    best = _known(p)
    _say(monkeypatch, replace(best, bound=best.value, status="optimal"), None)
    start = time.perf_counter()
    found = _at_two_kvs(p, time_limit_s=60.0)
    assert found is not None
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("spare", [None, 2.0, 0.5])
def test_the_best_plan_moves_to_the_kv_precision_where_it_is_worth_most(
    spare: float | None,
) -> None:
    p = _problem(_seeds(1)[0])
    lossy = next(choice for b, choice in enumerate(p.choices) if p.omega[:, b].all())
    p = p.with_changes(choices=(lossy,))
    slower = _slower(p)
    best = _known(slower)
    budget = None if spare is None else spare * sum_omega(p, best.assignment)
    theta = p.theta if spare is None else 0.0
    start = value(slower.with_changes(theta=theta), best.assignment)
    unproven = replace(best, value=start, status="feasible", bound=start / 9)

    def given(q: Problem, _: How) -> Outcome:
        if q is p:
            raise Unfinished("no plan yet", bound=start / 9)
        return unproven

    tries = Tries([slower, p], replace(HOW, budget=budget), given)
    tries.solve_all()
    assert tries.best is not None
    number, found = tries.best
    moved = value(p.with_changes(theta=theta), best.assignment)
    assert moved < start
    within = spare is None or spare > 1
    assert found.value == pytest.approx(moved if within else start)
    assert number == int(within)


def _slower(p: Problem) -> Problem:
    """Return a problem whose every device takes twice as long."""
    scale = {d.profile_kind: 2.0 for d in p.cluster.devices}
    return p.with_changes(costs=replace(p.costs, scale=scale))


def _known(p: Problem) -> Outcome:
    return solve_exact(p, time_limit_s=1.0)


def _at_two_kvs(p: Problem, **changes: Any) -> Outcome | None:
    """Return what is found at two KV precisions."""
    tries = _tried([p, p], _wish(**changes))
    return None if tries.best is None else tries.best[1]


def _say(monkeypatch: pytest.MonkeyPatch, whole: Any, beside: Any) -> None:
    """Have the searches give these, the whole ones a little later; none: it takes a minute."""

    def run_job(problem: Problem, job: str, options: dict[str, Any]) -> Any:
        time.sleep(0.2)
        return _given(whole)

    def solve_alone(problems: list[Problem], how: How, late_s: float) -> Any:
        if beside is None:
            time.sleep(60)
        return _given(beside)

    # The values are made up: nothing is to be valued anew.
    monkeypatch.setattr(Tries, "_move_to_another_kv", lambda _: None)
    monkeypatch.setattr(isolated, "run_job", run_job)
    monkeypatch.setattr(uniform_precision_search, "solve_alone", solve_alone)


def _given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
