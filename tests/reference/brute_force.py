"""Tries everything: the oracle of the solvers on tiny problems, far too slow for others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import value
from llmpq.planner.ilp.solve import device_orders
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Problem


def brute_force(p: Problem) -> tuple[float, Assignment | None]:
    """Return the least objective over every order, partition, choice and pair."""
    best: tuple[float, Assignment | None] = (math.inf, None)
    for a in assignments(p):
        if fits(p, a):
            worth = value(p, a)
            if worth < best[0]:
                best = (worth, a)
    return best


def assignments(p: Problem) -> Iterator[Assignment]:
    """Yield every assignment, whether it fits or not."""
    layers = p.num_layers
    for order in device_orders(p):
        for cuts in itertools.combinations(range(1, layers), len(order) - 1):
            bounds = (0, *cuts, layers)
            for choices in itertools.product(range(len(p.choices)), repeat=layers):
                stages = tuple(
                    Stage(cls=cls, start=low, end=high, choices=choices[low:high])
                    for cls, low, high in zip(order, bounds, bounds[1:], strict=False)
                )
                for eta, xi in p.pairs:
                    yield Assignment(prefill_microbatch=eta, decode_microbatch=xi, stages=stages)
