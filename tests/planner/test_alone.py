"""Plans of one precision alone, and the search of them beside the whole one."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest

from llmpq.planner import alone, isolated
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.isolated import solve_isolated
from llmpq.planner.methods import How
from llmpq.planner.outcome import Infeasible, Outcome, Unfinished
from llmpq.planner.predict.fits import fits
from llmpq.planner.predict.pipeline_time import value
from llmpq.planner.problem import Problem
from llmpq.planner.tools.random_problems import random_problem

HOW = How(method="exact", time_limit_s=1.0)

pytestmark = pytest.mark.pure


def _problems(count: int) -> list[Problem]:
    """Return problems of several choices that fit a plan of one of them."""
    found: list[Problem] = []
    seed = 0
    while len(found) < count:
        p = random_problem(random.Random(seed))
        seed += 1
        if len(p.choices) > 1 and _least(p) is not None:
            found.append(p)
    return found


def _least(p: Problem) -> float | None:
    """Return the least value of plans of one precision, each solved by itself."""
    values = []
    for choice in p.choices:
        try:
            values.append(solve_exact(p.with_changes(choices=(choice,)), time_limit_s=5.0).value)
        except Infeasible:
            continue
    return min(values, default=None)


def test_the_best_plan_of_one_precision() -> None:
    near = 0
    for p in _problems(6):
        found, least = alone.solve_alone(p, HOW), _least(p)
        assert least is not None
        plan = found.assignment
        held = {b for stage in plan.stages for b in stage.choices}
        assert len(held) == 1
        assert fits(p, plan)
        assert found.value == pytest.approx(value(p, plan), rel=1e-9)
        assert found.value >= least * (1 - 1e-6)
        assert found.bound is None
        near += found.value <= least * (1 + 1e-6)
    assert near >= 5  # it looks into the likely precisions alone


def _known(p: Problem) -> Outcome:
    return solve_exact(p, time_limit_s=1.0)


def test_the_better_of_two_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    p = _problems(1)[0]
    best = _known(p)
    worse = replace(best, value=best.value * 2, status="feasible", bound=best.value / 2)
    monkeypatch.setattr(isolated, "may_fork", lambda: True)  # whatever threads a test has left
    monkeypatch.setattr(isolated, "has_spare_core", lambda: True)
    monkeypatch.setattr(isolated, "ALONE_AFTER_S", 0.0)
    for whole, beside, value_s in ((worse, best, best.value), (worse, worse, worse.value)):
        monkeypatch.setattr(isolated, "run_job", _jobs(whole, beside))
        found = solve_isolated(p, HOW)
        assert (found.value, found.bound) == (value_s, best.value / 2)


def test_a_plan_beside_a_search_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    p = _problems(1)[0]
    best = _known(p)
    monkeypatch.setattr(isolated, "may_fork", lambda: True)  # whatever threads a test has left
    monkeypatch.setattr(isolated, "has_spare_core", lambda: True)
    monkeypatch.setattr(isolated, "ALONE_AFTER_S", 0.0)
    late = Unfinished("no plan yet", bound=best.value / 2)
    monkeypatch.setattr(isolated, "run_job", _jobs(late, best))
    assert solve_isolated(p, HOW).bound == best.value / 2
    for beside in (Infeasible("none"), RuntimeError("a bug")):
        monkeypatch.setattr(isolated, "run_job", _jobs(late, beside))
        with pytest.raises(Unfinished):
            solve_isolated(p, HOW)


def _jobs(whole: Outcome | Exception, beside: Outcome | Exception) -> Any:
    """Return a `run_job` that gives these, the whole search's a little later."""

    def run_job(problem: Problem, job: str, options: dict[str, Any]) -> Outcome:
        answer = beside if job == "alone" else whole
        if job != "alone":
            time.sleep(0.2)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return run_job
