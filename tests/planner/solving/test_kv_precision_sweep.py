"""A sweep over KV precisions: the time shared out, the best plan valued at each of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.problem.outcome import Infeasible, Outcome, Unfinished, WarmStart
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import KvPrecisionSweep
from reference.random_problems import random_problem

pytestmark = pytest.mark.pure


def _problem() -> Problem:
    """Return the first problem of several choices that has a plan of one of them."""
    for seed in range(100):
        p = random_problem(random.Random(seed), layers=(3, 6), kinds=(1, 2), devices=(1, 2))
        lossy = [b for b in range(len(p.choices)) if p.omega[:, b].all()]
        if len(p.choices) > 1 and lossy:
            p = p.with_changes(choices=(p.choices[lossy[0]],))
            try:
                _known(p)
            except Infeasible:
                continue
            return p
    raise AssertionError("some problem has one")


@pytest.mark.parametrize("spare", [None, 2.0, 0.5])
def test_the_best_plan_moves_to_the_kv_precision_where_it_is_worth_most(
    spare: float | None,
) -> None:
    p = _problem()
    slower = _slower(p)
    best = _known(slower)
    budget = None if spare is None else spare * sum_omega(p, best.assignment)
    theta = p.theta if spare is None else 0.0
    start = value(slower.with_changes(theta=theta), best.assignment)
    unproven = replace(best, value=start, status="feasible", bound=start / 9)

    def given(q: Problem, _: SolveOptions, __: WarmStart) -> Outcome:
        if q is p:
            raise Unfinished("no plan yet", bound=start / 9)
        return unproven

    options = SolveOptions(time_limit_s=1.0, budget=budget)
    sweep = KvPrecisionSweep([slower, p], options, given)
    sweep.solve_all()
    assert sweep.best is not None
    number, found = sweep.best
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
