"""Random cases cover what a person can state, and the command finds their best plans."""

from __future__ import annotations

import math

import pytest

from llmpq.errors import DoesNotFitError
from llmpq.planner.check.build_plan import build_plan
from llmpq.planner.problem.outcome import Outcome
from llmpq.planner.solving.answer import answer
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.problem_json import problem_data
from reference.all_plans import best_of_all
from reference.random_cases import random_case

pytestmark = [pytest.mark.pure, pytest.mark.slow]


def test_a_seed_is_one_case() -> None:
    for seed in (0, 7, 19):
        one, two = random_case(seed), random_case(seed)
        assert problem_data(one.problem) == problem_data(two.problem)
        assert (one.kvs, one.budget) == (two.kvs, two.budget)


def test_cases_are_of_every_kind() -> None:
    cases = [random_case(seed) for seed in range(150)]
    problems = [case.problem for case in cases]
    seen = {
        "experts": sum(p.spec.experts > 0 for p in problems),
        "kv": sum(len(case.kvs) > 1 for case in cases),
        "budget": sum(case.budget is not None for case in cases),
        "pairs of links": sum(bool(p.cluster.links.pairs) for p in problems),
        "measured links": sum(p.costs.profile is not None for p in problems),
        "split kinds": sum(
            len({d.node for d in p.cluster.devices}) > len({d.kind for d in p.cluster.devices})
            for p in problems
        ),
        "eta above xi": sum(
            (p.prefill_microbatch or 0) > (p.decode_microbatch or 99) for p in problems
        ),
        "pins": sum(bool(p.pins) for p in problems),
        "stored": sum(bool(p.offered) for p in problems),
    }
    assert all(count >= 2 for count in seen.values()), seen


@pytest.mark.parametrize("seed", range(12))
def test_the_command_finds_the_best_plan(seed: int) -> None:
    case = random_case(seed)
    best = min(best_of_all(case.priced(kv), case.budget)[0] for kv in case.kvs)
    options = SolveOptions(
        method="exact", time_limit_s=60.0, gap=1e-9, backend="highs", budget=case.budget,
        kvs=case.kvs,
    )  # fmt: skip
    if math.isinf(best):
        with pytest.raises(DoesNotFitError):
            answer(case.priced(case.kvs[0]), options, None)
        return
    found = answer(case.priced(case.kvs[0]), options, None).outcome
    assert found.value == pytest.approx(best, rel=1e-6)
    assert found.bound is not None and found.bound <= best * (1 + 1e-9)


def test_a_bound_that_says_nothing_is_left_out_of_the_plan() -> None:
    case = random_case(0)
    p = case.priced(case.kvs[0])
    best, found = best_of_all(p)
    assert found is not None
    for bound in (0.0, -1.0):
        cut = Outcome(
            method="exact", status="feasible", assignment=found, value=best, bound=bound,
            seconds=0.0,
        )  # fmt: skip
        solver = build_plan(p, cut).solver
        assert solver is not None and solver.bound is None and solver.gap is None
