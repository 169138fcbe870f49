"""Plans weighed by thousands are worth what each is worth; walks end in good plans that fit."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.exact.start.starts import Incumbent
from llmpq.planner.exact.start.walk import (
    Shapes,
    ShapeScales,
    Walk,
    moved_layers,
    other_orders,
    shape_of,
)
from llmpq.planner.problem.outcome import Assignment, Infeasible, WarmStart
from llmpq.planner.problem.problem import Problem
from reference.brute_force import assignments, brute_force
from reference.random_problems import random_problem

Seeds = Callable[[Sequence[int]], Sequence[int]]

pytestmark = [pytest.mark.pure, pytest.mark.slow]
TINY = {"layers": (3, 5), "kinds": (1, 2), "devices": (1, 2), "precisions": 2}
LARGER = {"layers": (8, 14), "kinds": (2, 3), "devices": (2, 3), "precisions": 3}


def _problem(seed: int, **sizes: object) -> Problem:
    rng = random.Random(seed)
    objective = rng.choice(["makespan", "paper"])
    return random_problem(rng, objective=objective, separable=True, **sizes)  # type: ignore[arg-type]


def _random_shape(p: Problem, chance: random.Random) -> Shapes:
    """Return a plan of any devices that there are; it may not fit."""
    devices = [c for c, cls in enumerate(p.classes) for _ in cls.devices]
    order = chance.sample(devices, chance.randint(1, min(p.max_stages, len(devices))))
    cuts = sorted(chance.sample(range(1, p.num_layers), len(order) - 1))
    layers = np.diff([0, *cuts, p.num_layers])
    bits = [chance.randrange(len(p.choices)) for _ in order]
    return Shapes(cls=np.array([order]), bits=np.array([bits]), layers=layers[None])


def _plan(scales: ShapeScales, shape: Shapes, pair: tuple[int, int]) -> Assignment:
    return Assignment(
        prefill_microbatch=pair[0], decode_microbatch=pair[1], stages=scales.stages(shape)
    )


@pytest.mark.parametrize("within_budget", [False, True])
def test_many_plans_at_once_are_worth_what_each_is(within_budget: bool) -> None:
    sorts: Counter[str] = Counter()
    for seed in range(20):
        p, chance = _problem(seed, **LARGER), random.Random(seed)
        pair = chance.choice(p.pairs)
        budget = float(p.omega.mean(axis=1).sum()) if within_budget else None
        scales = ShapeScales(p, pair, budget)
        for _ in range(10):
            shape = _random_shape(p, chance)
            near = moved_layers(shape, np.random.default_rng(seed))
            for one in (shape, near):
                for row, worth in enumerate(scales.worths(one)):
                    sorts[_compared(p, budget, _plan(scales, one[row], pair), float(worth))] += 1
    assert set(sorts) == {"too large", "mixed", "as computed", *["beyond"] * within_budget}


def _compared(p: Problem, budget: float | None, plan: Assignment, worth: float) -> str:
    """Compare what a plan is worth with what it was said to be; return its sort."""
    assert math.isfinite(worth) == fits(p, plan)
    if math.isinf(worth):
        return "too large"
    expected, omega = value(p, plan), sum_omega(p, plan)
    if budget is not None:
        expected += p.theta * (budget - omega)
    if any(len(set(stage.choices)) > 1 for stage in plan.stages):
        # An estimate: the layers that are lowered lose less than the average.
        assert worth >= expected * (1 - 1e-9)
        return "mixed"
    if budget is not None and omega > budget * (1 + 1e-6):
        assert worth > expected + p.theta * (omega - budget)
        return "beyond"
    assert worth == pytest.approx(expected, rel=1e-9)
    return "as computed"


def test_neighbours_are_plans_of_devices_that_there_are() -> None:
    for seed in range(20):
        p, chance = _problem(seed, **LARGER), random.Random(seed)
        counts = np.array([cls.count for cls in p.classes])
        scales = ShapeScales(p, chance.choice(p.pairs), None)
        shape, rng = _random_shape(p, chance), np.random.default_rng(seed)
        moved = moved_layers(shape, rng)
        assert (moved.layers > 0).all() and (moved.layers.sum(axis=1) == p.num_layers).all()
        choices = np.arange(len(p.choices))
        for cls, bits in other_orders(shape, counts, p.max_stages, choices, rng):
            assert cls.shape == bits.shape and cls.shape[1] <= p.max_stages
            assert all((np.bincount(row, minlength=len(counts)) <= counts).all() for row in cls)
            shared = scales.shared(cls, bits)
            assert (shared.layers > 0).all()
            assert (shared.layers.sum(axis=1) == p.num_layers).all()


def test_of_many_stages_some_neighbours_are_drawn() -> None:
    layers = np.full((1, 100), 2)
    shape = Shapes(cls=np.zeros_like(layers), bits=np.zeros_like(layers), layers=layers)
    moved = moved_layers(shape, np.random.default_rng(0))
    assert 0 < len(moved.layers) < 400
    assert (moved.layers.sum(axis=1) == 200).all()


def test_walks_from_any_plan_end_at_the_best_of_one_precision_a_stage(seeds: Seeds) -> None:
    for seed in seeds(range(12)):
        p = _problem(seed, **TINY)
        uniform = [
            value(p, a)
            for a in assignments(p)
            if fits(p, a) and all(len(set(s.choices)) == 1 for s in a.stages)
        ]
        incumbent, tables = Incumbent(p), PairTables(p)
        scales = ShapeScales(p, p.pairs[0], None)
        start = _plan(scales, _random_shape(p, random.Random(seed)), p.pairs[0])
        walk = Walk(incumbent, tables)
        walk.from_each([start], math.inf)  # ends when kicks lead to nothing better
        if incumbent.best is not None:
            assert fits(p, incumbent.best)
            assert incumbent.value == pytest.approx(value(p, incumbent.best), rel=1e-12)
        if uniform:
            assert incumbent.value <= min(uniform) * (1 + 1e-9), f"seed {seed}"


def test_a_plan_of_mixed_stages_becomes_one_of_their_most_frequent_choices() -> None:
    p = _problem(5, **TINY)
    _, best = brute_force(p)
    assert best is not None
    shape = shape_of(best)
    assert shape.layers.sum() == p.num_layers
    for stage, b in zip(best.stages, shape.bits[0], strict=True):
        assert stage.choices.count(b) == max(stage.choices.count(c) for c in stage.choices)


def test_the_quickest_pair_is_the_quickest_of_those_that_fit() -> None:
    for seed in range(30):
        p, chance = _problem(seed, **LARGER), random.Random(seed)
        tables = PairTables(p)
        stages = ShapeScales(p, p.pairs[0], None).stages(_random_shape(p, chance))
        plans = [
            Assignment(prefill_microbatch=eta, decode_microbatch=xi, stages=stages)
            for eta, xi in p.pairs
        ]
        worths = [value(p, a) for a in plans if fits(p, a)]
        found = tables.best_pair(stages, math.inf)
        assert (found is None) == (not worths)
        if found is not None:
            plan = Assignment(
                prefill_microbatch=found[0], decode_microbatch=found[1], stages=stages
            )
            assert fits(p, plan) and value(p, plan) == pytest.approx(min(worths), rel=1e-9)


def test_a_second_look_has_the_same_proof() -> None:
    for seed in range(12):
        p = _problem(seed, **TINY)
        try:
            first = solve_exact(p)
        except Infeasible:
            continue
        second = solve_exact(p, warm=WarmStart(known=first.assignment, resumed=True))
        assert second.value == pytest.approx(first.value, rel=1e-9)
        assert second.status == "optimal"
