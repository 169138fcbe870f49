"""What a case says that its plans take at least is true of each, and every plan has a case."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import stage_times
from llmpq.planner.exact.bounds.pairs import PairBound, PairTables
from llmpq.planner.exact.bounds.plan_cases import Case, in_memory, least_slowest, most_priced
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem
from reference.brute_force import assignments
from reference.random_cases import random_case

pytestmark = pytest.mark.pure
ROUNDING = 1e-9
NOTHING_S = 1e-200


def _crossings(tables: PairTables, a: Assignment) -> bool:
    assert tables.islands is not None
    order = [stage.cls for stage in a.stages]
    return any(tables.islands.crosses[one, two] for one, two in itertools.pairwise(order))


def _belongs(tables: PairTables, case: Case, a: Assignment) -> bool:
    if not case.fewest <= len(a.stages) <= case.most:
        return False
    used = np.bincount([stage.cls for stage in a.stages], minlength=len(case.counts))
    if (used > case.counts).any():
        return False
    if tables.islands is None:
        return True
    return _crossings(tables, a) == case.crosses


def _check(tables: PairTables, floor: PairBound, a: Assignment) -> None:
    p, times = tables.p, stage_times(tables.p, a)
    row = p.prefill_sizes.index(a.prefill_microbatch)
    column = p.decode_sizes.index(a.decode_microbatch)
    slow_p = max((*times.prefill_s, *times.busy_prefill_s[:-1]))
    slow_d = max((*times.decode_s, *times.busy_decode_s[:-1]))
    assert floor.slow_p[row] <= slow_p * (1 + ROUNDING) + NOTHING_S
    assert floor.slow_d[column] <= slow_d * (1 + ROUNDING) + NOTHING_S
    if p.objective == "makespan":
        assert floor.hops_p[row] <= sum(times.hop_prefill_s) * (1 + ROUNDING)
        assert floor.hops_d[column] <= sum(times.hop_decode_s) * (1 + ROUNDING)


def _some_plans(p: Problem, rng: random.Random) -> list[Assignment]:
    plans = [a for a in itertools.islice(assignments(p), 4_000) if fits(p, a)]
    return rng.sample(plans, min(len(plans), 300))


def test_no_plan_takes_less_than_its_case_says() -> None:
    checked = several = 0
    for seed in range(70_000, 70_060):
        rng = random.Random(seed)
        case = random_case(seed)
        p = case.priced(case.kvs[0]).with_changes(pins={}, offered=())
        tables = PairTables(p)
        tables.cut_by_stages(p.pairs[0], 0.0)
        several += len(tables.case_bounds) > 1
        for a in _some_plans(p, rng):
            found = [floor for floor in tables.case_bounds if _belongs(tables, floor.case, a)]
            assert found, f"seed {seed}: {a} is in no case"
            for floor in found:
                _check(tables, floor, a)
            checked += 1
    assert checked > 1000 and several > 10


def test_the_prices_of_the_dearest_devices_are_summed() -> None:
    prices, counts = np.array([1.0, 5.0, 2.0]), np.array([3, 1, 2])
    assert most_priced(prices, counts, 1) == 5.0
    assert most_priced(prices, counts, 4) == 5.0 + 2 * 2.0 + 1.0
    assert most_priced(prices, counts, 99) == float(prices @ counts)


def test_whoever_must_hold_a_layer_for_want_of_memory_sets_the_slowest_stage() -> None:
    # Two quick devices hold 5 layers, first and last stages 4; a slow one holds what is left.
    roomy = np.array([[[5, 4], [4, 3]], [[9, 9], [9, 9]]])
    layer_s, ends_s = np.array([[1.0, 20.0]]), np.zeros((1, 2, 2))
    case = Case(counts=np.array([2.0, 1.0]), most=3)
    assert least_slowest(case, layer_s, ends_s, 8, roomy) == pytest.approx(4.0)
    assert least_slowest(case, layer_s, ends_s, 9, roomy) == pytest.approx(20.0)


def test_cases_know_how_many_stages_the_memory_needs() -> None:
    roomy = np.array([[[5, 4], [4, 3]]])
    few, many = (Case(counts=np.array([float(k)]), most=k) for k in (2, 4))
    assert [case.fewest for case in in_memory([few, many], roomy, 9)] == [3]
    assert [case.fewest for case in in_memory([few, many], roomy, 3)] == [1, 1]
    assert in_memory([few], roomy, 99) == [few]
