"""The quick oracle finds what the plain loop over everything finds."""

from __future__ import annotations

import math
import random

import pytest

from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.problem.problem import Objective
from reference.all_plans import best_of_all
from reference.brute_force import assignments, brute_force
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]


@pytest.mark.parametrize("objective", ["makespan", "paper"])
def test_it_agrees_with_the_plain_loop(objective: Objective) -> None:
    finite = 0
    for seed in range(25):
        p = random_problem(
            random.Random(seed), layers=(2, 4), kinds=(1, 2), devices=(1, 2), batch=3,
            objective=objective,
        )  # fmt: skip
        slow, quick = brute_force(p), best_of_all(p)
        assert math.isinf(slow[0]) == math.isinf(quick[0])
        if quick[1] is not None:
            assert quick[0] == pytest.approx(slow[0], rel=1e-12)
            assert value(p, quick[1]) == pytest.approx(quick[0], rel=1e-12) and fits(p, quick[1])
            finite += 1
    assert finite > 10


def test_it_keeps_a_budget() -> None:
    finite = 0
    for seed in range(15):
        p = random_problem(
            random.Random(seed), layers=(2, 4), kinds=(1, 2), devices=(1, 2), batch=2
        ).with_changes(theta=0.0)
        fine = [(sum_omega(p, a), value(p, a)) for a in assignments(p) if fits(p, a)]
        if not fine:
            continue
        budget = sorted(omega for omega, _ in fine)[len(fine) // 3]
        slow = min(seconds for omega, seconds in fine if omega <= budget * (1 + 1e-9))
        assert best_of_all(p, budget)[0] == pytest.approx(slow, rel=1e-12)
        finite += 1
    assert finite > 5
