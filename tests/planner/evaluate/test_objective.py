"""F is one: plans by themselves, stages at all sizes, drafts and shapes have the same value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.exact.start.improve import Draft, Scales
from llmpq.planner.exact.start.walk import ShapeScales, shape_of
from llmpq.planner.problem.outcome import Infeasible
from reference.random_cases import random_case

pytestmark = pytest.mark.pure


def test_every_evaluator_gives_the_plans_value(
    seeds: Callable[[Sequence[int]], Sequence[int]],
) -> None:
    compared = 0
    for seed in seeds(range(16)):
        case = random_case(seed)
        p = case.priced(case.kvs[0])
        try:
            a = solve_exact(p, time_limit_s=2.0).assignment
        except Infeasible:
            continue
        pair = a.prefill_microbatch, a.decode_microbatch
        row, column = p.prefill_sizes.index(pair[0]), p.decode_sizes.index(pair[1])
        priced = p.theta * sum_omega(p, a)
        draft = Draft(
            order=tuple(s.cls for s in a.stages),
            bounds=(0, *(s.end for s in a.stages)),
            choices=a.choices,
        )
        found = [
            PairTables(p).values(a.stages)[row, column] + priced,
            Scales(p, *pair, None).worth(draft),
        ]
        if all(len(set(s.choices)) == 1 for s in a.stages) and p.open.all():
            found.append(ShapeScales(p, pair, None).worths(shape_of(a))[0])
        assert found == pytest.approx([value(p, a)] * len(found), rel=1e-9), seed
        compared += 1
    assert compared >= 3
