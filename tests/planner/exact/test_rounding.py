"""Plans made of the relaxation are whole, of devices that there are, and often near the best."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import value
from llmpq.planner.exact.bounds.pairs import PairTables, quick_bound
from llmpq.planner.exact.bounds.relaxation import ClassRelaxation
from llmpq.planner.exact.start.rounding import rounded_plans
from reference.brute_force import brute_force
from reference.random_problems import random_problem

Seeds = Callable[[Sequence[int]], Sequence[int]]

pytestmark = pytest.mark.pure
TINY = {"layers": (3, 5), "kinds": (1, 2), "devices": (1, 2), "precisions": 2}


def test_plans_of_the_relaxation_are_whole_and_often_near_the_best(seeds: Seeds) -> None:
    made = near = 0
    for seed in seeds(range(24)):
        p = random_problem(random.Random(seed), objective="makespan", separable=True, **TINY)
        best, _ = brute_force(p)
        if math.isinf(best):
            continue
        plans = list(rounded_plans(p, PairTables(p), ClassRelaxation(p)))
        counts = [cls.count for cls in p.classes]
        for plan in plans:
            used = np.bincount([s.cls for s in plan.stages], minlength=len(counts))
            assert (used <= counts).all() and len(plan.stages) <= p.max_stages
            ends = [0, *(s.end for s in plan.stages)]
            assert [s.start for s in plan.stages] == ends[:-1] and ends[-1] == p.num_layers
            assert all(len(s.choices) == s.end - s.start > 0 for s in plan.stages)
        worths = [value(p, plan) for plan in plans if fits(p, plan)]
        made += 1
        near += bool(worths) and min(worths) <= 1.2 * best
    assert made >= 3 and near >= made // 2


def test_the_quick_bound_is_a_bound(seeds: Seeds) -> None:
    checked = 0
    for seed in seeds(range(24)):
        p = random_problem(random.Random(seed), objective="makespan", separable=True, **TINY)
        best, _ = brute_force(p)
        if math.isinf(best):
            continue
        assert 0 < quick_bound(p) <= best * (1 + 1e-9)
        checked += 1
    assert checked >= 3
