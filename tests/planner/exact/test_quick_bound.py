"""The bound that is found without a solver."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from llmpq.planner.exact.bounds.pairs import quick_bound
from reference.brute_force import brute_force
from reference.random_problems import random_problem

Seeds = Callable[[Sequence[int]], Sequence[int]]

pytestmark = pytest.mark.pure
TINY = {"layers": (3, 5), "kinds": (1, 2), "devices": (1, 2), "precisions": 2}


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
