"""A search keeps to its time limit, whatever it has to set up, and its bound stays true."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import make_form, sum_omega, value
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.bounds.relaxation import ClassRelaxation
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.front.front import pareto_front
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.outcome import Infeasible
from llmpq.planner.problem.problem import Objective, Problem
from llmpq.planner.solving.methods import PLANNERS, SolveOptions, solve
from reference.brute_force import assignments
from reference.random_problems import random_problem

Seeds = Callable[[Sequence[int]], Sequence[int]]

pytestmark = [pytest.mark.pure, pytest.mark.slow]

CLUSTERS = Path(__file__).resolve().parents[3] / "clusters"
LIMIT_S = 0.3
MARGIN_S = 8.0
"""What a slow machine may take beyond the limit; setting up every pair took 30 s and more."""


def _problem(words: str) -> Problem:
    return make_problem(plan_request(words.split()))[0]


def _many_pairs() -> Problem:
    """19,900 pairs of micro-batch sizes, all of which fit."""
    job = "--model opt-1.3b --global-bz 10000 --s 16 --n 4"
    return _problem(f"--cluster {CLUSTERS / 'h200x4.yaml'} {job}")


@pytest.mark.parametrize("method", PLANNERS)
def test_a_method_keeps_to_its_time_limit(method: str) -> None:
    p = _many_pairs()
    start = time.perf_counter()
    outcome = solve(p, SolveOptions(method=method, time_limit_s=LIMIT_S))
    assert time.perf_counter() - start < LIMIT_S + MARGIN_S
    assert fits(p, outcome.assignment)


def test_a_cut_search_says_how_far_it_may_be_off() -> None:
    p = _many_pairs()
    hurried, patient = (solve_exact(p, time_limit_s=limit) for limit in (LIMIT_S, 4 * LIMIT_S))
    for outcome in (hurried, patient):
        assert outcome.status == "feasible" and outcome.bound is not None
        assert outcome.value == pytest.approx(value(p, outcome.assignment), rel=1e-9)
    assert hurried.bound is not None and hurried.bound <= patient.value
    assert hurried.gap is not None and 0 < hurried.gap < 1


def test_a_budget_keeps_to_its_time_limit() -> None:
    p, budget = _many_pairs(), 0.5
    start = time.perf_counter()
    outcome = solve(p, SolveOptions(method="exact", time_limit_s=LIMIT_S, budget=budget))
    assert time.perf_counter() - start < LIMIT_S + MARGIN_S
    assert sum_omega(p, outcome.assignment) <= budget * (1 + 1e-9)


def test_a_front_keeps_to_its_time_limit() -> None:
    """The two ends are a second each at least, and a few programs are set up for them."""
    start = time.perf_counter()
    front = pareto_front(_many_pairs().with_changes(theta=0.0), time_limit_s=LIMIT_S)
    assert time.perf_counter() - start < LIMIT_S + 2 * MARGIN_S
    assert front.points and not front.complete


def test_without_time_there_is_a_plan_where_one_fits(seeds: Seeds) -> None:
    """Memory is tight: often only the smallest micro-batches fit."""
    found = 0
    for seed in seeds(range(20)):
        p = random_problem(random.Random(seed), layers=(3, 8), devices=(1, 3), batch=8)
        try:
            whole = solve_exact(p)
        except Infeasible:
            continue
        hurried = solve_exact(p, time_limit_s=0.0)
        assert hurried.bound is not None and hurried.bound <= whole.value * (1 + 1e-9)
        assert hurried.value >= whole.value * (1 - 1e-9)
        found += 1
    assert found > 2


def _least_by_pair(p: Problem) -> dict[tuple[int, int], float]:
    """Return the least objective of each pair, by trying everything that fits."""
    least: dict[tuple[int, int], float] = {}
    for a in assignments(p):
        if fits(p, a):
            pair = (a.prefill_microbatch, a.decode_microbatch)
            least[pair] = min(least.get(pair, math.inf), value(p, a))
    return least


@pytest.mark.parametrize("objective", ["makespan", "paper"])
def test_no_plan_of_a_pair_is_below_what_other_pairs_prove_of_it(
    objective: Objective, seeds: Seeds
) -> None:
    """Bounds of layers by themselves, and those by the multipliers of any other pair's program."""
    close = 0
    for seed in seeds(range(25)):
        rng = random.Random(seed)
        p = random_problem(rng, layers=(3, 4), kinds=(1, 2), devices=(1, 2), objective=objective)
        least = _least_by_pair(p)
        tables, relaxation = PairTables(p), ClassRelaxation(p)
        bounds = [tables.first_bounds(relaxation.groups).min(axis=0)]
        for pair in p.pairs[::3]:
            form = make_form(p, *pair)
            prices = relaxation.solve(form)
            if math.isfinite(prices.value):
                bounds.append(tables.bounds(relaxation.groups, form, prices).min(axis=0))
        for row, eta in enumerate(p.prefill_sizes):
            for column, xi in enumerate(p.decode_sizes):
                for table in bounds:
                    assert table[row, column] <= least.get((eta, xi), math.inf) * (1 + 1e-9)
                    close += table[row, column] > 0.5 * least.get((eta, xi), math.inf)
    assert close > 50, "a bound of nothing would pass as well"


JOBS = {
    "CPUs": "--device-names CPU --device-numbers 2 --model opt-125m --kv 4",
    "GPUs": "--device-names T4 V100 --device-numbers 1 1 --model opt-1.3b",
    "Hopper": f"--cluster {CLUSTERS / 'h200x2.yaml'} --model llama-3.1-8b --kv 8",
    "experts": f"--cluster {CLUSTERS / 'h200x2.yaml'} --model mixtral-8x7b",
}


@pytest.mark.parametrize("name", JOBS)
def test_larger_micro_batches_never_leave_more_room(name: str) -> None:
    p = _problem(f"{JOBS[name]} --global-bz 600 --s 300 --n 20")
    most, least = (p.numbers(*p.pairs[k]).capacity for k in (0, -1))
    for pair in p.pairs[:: max(1, len(p.pairs) // 60)]:
        capacity = p.numbers(*pair).capacity
        assert (capacity <= most).all() and (capacity >= least).all()
