"""Plans from a fork: the same as without one, and as much work; whatever becomes of the fork."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from llmpq.planner.cli.show_traffic import traffic_job
from llmpq.planner.make import make_plan
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.problem.work_clock import counting, now_s, spend_s
from llmpq.planner.solving.worker import may_fork
from llmpq.planner.traffic import plans_ahead, traffic_search
from llmpq.planner.traffic.plans_ahead import PlansAhead
from llmpq.plans.plan import Plan

pytestmark = [
    pytest.mark.pure,
    pytest.mark.skipif(not may_fork(), reason="this process cannot fork"),
]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("opt-1.3b", devices="t4", bits="16", batch=2, prompt_len=64, gen_len=8)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_ahead, "_has_second_core", lambda: True)


def _never() -> Plan | None:
    raise AssertionError("the fork solves it")


def test_a_plan_of_the_fork_is_taken_with_its_work(plan: Plan) -> None:
    def search() -> None:
        for key, found in (("one", plan), ("none", None)):
            ahead.solve(key, _slowly(found))

    with counting() as clock, PlansAhead() as ahead:
        ahead.begin(search)
        while "none" not in ahead._notes.begun:  # type: ignore[union-attr]
            ahead._notes.look()  # type: ignore[union-attr]
        assert ahead.solve("none", _never) is None  # waits for it
        assert ahead.solve("one", _never) == plan
        assert clock.spent_s == pytest.approx(0.5, rel=1e-12)
        assert ahead.solve("other", lambda: plan) is plan
    assert ahead._notes is None and ahead.solve("one", lambda: None) is None


def _slowly(found: Plan | None) -> Callable[[], Plan | None]:
    def solved() -> Plan | None:
        spend_s(0.25)
        time.sleep(0.05)
        return found

    return solved


@pytest.mark.parametrize("ends", [lambda: os._exit(3), lambda: 1 / 0])
def test_what_a_fork_leaves_behind_is_solved_here(ends: Callable[[], Any], plan: Plan) -> None:
    with PlansAhead() as ahead:
        ahead.begin(lambda: ahead.solve("one", ends))
        while not ahead._notes.ends:  # type: ignore[union-attr]
            ahead._notes.look()  # type: ignore[union-attr]
        assert "one" in ahead._notes.begun  # type: ignore[union-attr]
        assert ahead.solve("one", lambda: plan) is plan


def test_a_search_answers_the_same_with_a_fork_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much work to the last bit, so that a limit ends both at once."""
    request = PlanRequest(
        model="opt-1.3b", devices="t4:2,v100", prompt="256,64", gen="16,32", rate="max", ttft=2.0,
        tpot=0.2, requests=12,
    )  # fmt: skip
    job, traffic, objective = traffic_job(request)
    take, taken = plans_ahead._Notes.take, list[str]()

    def noted(self: Any, key: str) -> Any:
        found = take(self, key)
        taken.extend([key] if found else [])
        return found

    monkeypatch.setattr(plans_ahead._Notes, "take", noted)

    def answered() -> tuple[Any, ...]:
        work: list[float] = []
        ends = traffic_search._plan_file

        def noting_work(*args: Any, **known: Any) -> Any:
            work.append(now_s())
            return ends(*args, **known)

        with monkeypatch.context() as patched:
            patched.setattr(traffic_search, "_plan_file", noting_work)
            found = traffic_search.search_traffic(
                job.problem, job.options, None, traffic, objective
            )
        rates = {name: one and one.rate.rate_per_s for name, one in found.beside.items()}
        return found.plan.model_dump_json(), rates, found.tried, found.complete, work

    with_fork, by_fork = answered(), len(taken)
    monkeypatch.setattr(plans_ahead, "_has_second_core", lambda: False)
    assert answered() == with_fork and by_fork > 0 and len(taken) == by_fork
