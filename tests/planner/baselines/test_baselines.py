"""Baselines are what they claim: honest uniform, balanced pipeedge, best-quality adabits."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest

from llmpq.planner.baselines.adabits import kind_orders
from llmpq.planner.baselines.device_sets import every_set
from llmpq.planner.baselines.pipeedge import _allowed, _balanced
from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import job_time, stage_times, sum_omega
from llmpq.planner.evaluate.simulator import replay
from llmpq.planner.ilp.flexgen import estimate_flexgen
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.outcome import Infeasible, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.methods import SolveOptions, solve
from reference.brute_force import assignments
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]
PAPER = Path(__file__).resolve().parents[3] / "clusters" / "paper"


def _paper(number: int, model: str) -> Problem:
    words = f"--cluster {PAPER}/{number:02d}.yaml --model {model} --global_bz 32 --s 512 --n 100"
    return make_problem(plan_request(words.split()))[0]


def test_uniform_takes_its_best_microbatch() -> None:
    p = _paper(9, "opt-30b")
    found = solve(p, SolveOptions(method="uniform")).assignment
    assert len(set(found.choices)) == 1 and [s.end - s.start for s in found.stages] == [12] * 4
    best = job_time(p, found).total_s
    for eta, xi in p.pairs:
        other = type(found)(prefill_microbatch=eta, decode_microbatch=xi, stages=found.stages)
        assert not fits(p, other) or job_time(p, other).total_s >= best


def test_pipeedge_balances_as_brute_force_does() -> None:
    compared = 0
    for seed in range(40):
        p = random_problem(
            random.Random(seed), layers=(3, 5), kinds=(1, 2), devices=(1, 2), precisions=2, batch=2
        )
        work = p.workload.model_copy(update={"gen_len": 1})
        p = p.with_changes(workload=work, prefill_microbatch=1, decode_microbatch=1, theta=0.0)
        found = _balanced(p, every_set(p), _allowed(p), p.numbers(1, 1), 1, "prefill")
        same = [a for a in assignments(p) if set(a.choices) == {1} and fits(p, a)]
        if found is None:
            assert not same
            continue
        times = [stage_times(p, a) for a in (found, *same)]
        slowest = [max(*t.prefill_s, *t.hop_prefill_s, 0.0) for t in times]
        assert fits(p, found) and slowest[0] <= min(slowest[1:]) * (1 + 1e-9)
        compared += 1
    assert compared >= 20


def test_adabits_has_the_least_omega_of_its_orders() -> None:
    compared = 0
    for seed in range(40):
        p = random_problem(
            random.Random(seed), layers=(3, 5), kinds=(1, 2), devices=(1, 1), precisions=2, batch=2
        ).with_changes(prefill_microbatch=1, decode_microbatch=1, theta=1e6)
        try:
            found = solve(p, SolveOptions(method="adabits")).assignment
        except Infeasible:
            continue
        orders = set(kind_orders(p))
        best = min(
            sum_omega(p, a)
            for a in assignments(p)
            if tuple(s.cls for s in a.stages) in orders and fits(p, a)
        )
        assert sum_omega(p, found) == pytest.approx(best, rel=1e-9, abs=1e-12)
        compared += 1
    assert compared >= 20


@pytest.mark.parametrize(
    "number, model",
    [(3, "opt-30b"), pytest.param(4, "opt-30b", marks=pytest.mark.seldom), (8, "bloom-176b")],
)
def test_exact_beats_the_baselines_in_simulated_time(number: int, model: str) -> None:
    p = _paper(number, model)

    def score(method: str) -> float:
        try:
            a = solve(p, SolveOptions(method=method)).assignment
        except Infeasible:  # an even split of 176 billion weights needs 3 bits
            return math.inf
        return replay(p, a).total_s + p.theta * sum_omega(p, a)

    exact = score("exact")
    for method in ("adabits", "pipeedge", "uniform"):
        assert exact <= score(method) * 1.001
    assert exact < 0.9 * score("uniform")


def test_offloading_slows_down_with_less_memory() -> None:
    p = _paper(9, "opt-30b")
    roomy = _paper(3, "opt-30b")
    ours, theirs = estimate_flexgen(p), estimate_flexgen(roomy)
    assert 0 < ours.on_device < 1
    assert ours.total_s > job_time(p, solve(p, SolveOptions(method="exact")).assignment).total_s
    small = _paper(1, "opt-13b")
    assert estimate_flexgen(small).on_device > theirs.on_device * 0.5


ODD = {
    "sixteen kinds": "--device-names P40 P100 V100 T4 A10 A30 A40 L4 RTX-3060 RTX-3090 RTX-4090 "
    "L40S H20 A100-40GB A100-80GB CPU --device-numbers "
    + " ".join(["1"] * 16)
    + " --model llama-2-70b --global_bz 100 --kv 8",
    "more devices than layers": "--device-names T4 L4 --device-numbers 60 60 --global_bz 32 "
    "--model llama-3.1-405b",
    "few may be used": "--device-names T4 H200 L4 --device-numbers 30 2 30 --model llama-3.1-70b "
    "--global_bz 32 --max-devices 3",
    "many micro-batches": "--device-names H200 --device-numbers 4 --model opt-1.3b "
    "--global_bz 10000 --s 16 --n 4",
}
BASELINE_LIMIT_S = 1.5


@pytest.mark.thin
@pytest.mark.parametrize("method", ["pipeedge", "adabits", "heuristic", "uniform"])
@pytest.mark.parametrize("name", ODD)
def test_a_baseline_ends_in_time_with_a_plan_that_fits(name: str, method: str) -> None:
    p = make_problem(plan_request(ODD[name].split()))[0]
    start = time.perf_counter()
    try:
        found = solve(p, SolveOptions(method=method, time_limit_s=BASELINE_LIMIT_S))
    except Unfinished:  # on a slow machine
        assert time.perf_counter() - start > BASELINE_LIMIT_S / 2
    except Infeasible:
        assert method != "pipeedge"
    else:
        assert fits(p, found.assignment)
    assert time.perf_counter() - start < BASELINE_LIMIT_S + 30.0  # a busy machine


def test_a_baseline_without_time_says_so() -> None:
    p = _paper(3, "opt-30b")
    with pytest.raises(Unfinished, match="within 0 s; give a longer --time-limit"):
        solve(p, SolveOptions(method="pipeedge", time_limit_s=0.0))
    for method in ("adabits", "heuristic", "uniform"):  # of which one plan is quickly made
        assert fits(p, solve(p, SolveOptions(method=method, time_limit_s=0.0)).assignment)


def test_devices_that_hold_no_layer_are_left_out_by_adabits() -> None:
    words = "--device-names H200 T4 --device-numbers 2 1 --model bloom-176b --global_bz 1"
    job = ["--bits", "16", "--s", "8192", "--reserve", "10 GiB", "--max-devices", "3"]
    p = make_problem(plan_request([*words.split(), *job]))[0]
    assert all(set(order) == {0} for order in kind_orders(p))
