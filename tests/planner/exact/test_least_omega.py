"""The least sum of omega that devices allow: what a budget is refused by, beside brute force."""

from __future__ import annotations

import pytest

from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega
from llmpq.planner.front.least_omega import least_by_memory, least_omega
from llmpq.planner.front.quality import refuse_unreachable
from llmpq.planner.problem.outcome import Infeasible
from reference.all_plans import best_of_all
from reference.random_cases import random_case


def test_the_least_sum_of_omega_is_that_of_every_plan_and_its_plan_fits() -> None:
    """A theta so large that time counts for nothing; every count of stages comes up."""
    found, stages = 0, set()
    for seed in range(40):
        case = random_case(seed)
        p = case.priced(case.kvs[0]).with_changes(theta=1e12)
        least, best = least_omega(p), best_of_all(p)[1]
        if best is None:
            assert least.plan is None
            continue
        omega = sum_omega(p, best)
        assert least.omega == pytest.approx(omega, rel=1e-6, abs=1e-12), f"seed {seed}"
        assert least_by_memory(p) <= omega * (1 + 1e-9)
        assert least.plan is not None and fits(p, least.plan)
        assert sum_omega(p, least.plan) == pytest.approx(omega, rel=1e-6, abs=1e-12)
        found += 1
        stages.add(len(least.plan.stages))
        if omega > 0:
            with pytest.raises(Infeasible) as refused:
                refuse_unreachable(p, omega * 0.99)
            assert refused.value.least == least.omega
        assert refuse_unreachable(p, omega) == least.plan
    assert found >= 20 and len(stages) >= 2
