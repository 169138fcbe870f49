"""A search ends by its work: the same plan and bound however slow the machine is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.problem.work_clock import LATE_S, WorkClock, counting, now_s, spend
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import CUT, search_plan
from llmpq.planner.solving.topologies import best_topology
from llmpq.planner.solving.topology_search import KnownPipeline

pytestmark = pytest.mark.pure
WORK_S = 0.4
"""Too little to prove the plans below."""


def _problem() -> Problem:
    request = PlanRequest(model="qwen3-32b", devices="4090,3090,3060,3060", batch=24, theta=10.0)
    return make_problem(request)[0]


@pytest.fixture(params=[1.0, 40.0])
def speed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """How many times as fast the time of day passes, while work is done as before."""
    real: Callable[[], float] = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: request.param * real())
    yield request.param


_seen: dict[str, object] = {}


@pytest.mark.usefixtures("speed")
def test_a_pipeline_is_the_same_however_fast_time_passes() -> None:
    found = search_plan(_problem(), SolveOptions(time_limit_s=WORK_S)).outcome
    assert found.bound is not None and found.gap is not None and found.gap > 1e-6, "it was proven"
    own = found.assignment, found.value, found.bound, found.work_s
    assert _seen.setdefault("pipeline", own) == own


@pytest.mark.usefixtures("speed")
def test_a_topology_is_the_same_however_fast_time_passes() -> None:
    p = _problem()
    found = best_topology(p, SolveOptions(time_limit_s=4 * WORK_S), KnownPipeline())
    own = [(one.places, one.rows, one.solved.outcome.assignment) for one in found.engines]
    kept = own, found.value, found.bound, found.work_s, found.cut
    assert found.bound < found.value * 0.999, "it was proven"
    assert _seen.setdefault("topology", kept) == kept


def test_the_users_limit_ends_a_search_and_the_plan_says_so() -> None:
    options = SolveOptions(time_limit_s=30.0, ends_at=time.perf_counter())
    found = search_plan(_problem(), options).outcome
    assert found.status == "feasible" and CUT in found.note
    whole = replace(options, time_limit_s=WORK_S, ends_at=math.inf)
    assert CUT not in search_plan(_problem(), whole).outcome.note


def test_behind_its_end_a_clock_is_late_for_every_deadline() -> None:
    clock = WorkClock(ends_at=time.perf_counter() - 1)
    deadline = clock.read() + 1e6
    assert clock.read() > deadline and clock.cut
    assert clock.spent_s >= 2 * LATE_S


def test_work_is_counted_by_the_clock_of_the_search_alone() -> None:
    with counting() as outer:
        spend(1000)
        with counting() as inner:
            spend(10)
            assert now_s() < 0.001
        assert inner.spent_s < outer.spent_s < 0.01
