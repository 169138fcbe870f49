"""By how much costs may be wrong: of all plans there are, the true share is between both."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
from dataclasses import replace
from pathlib import Path

import highspy
import numpy as np
import pytest
from numpy.typing import NDArray

from llmpq.costs.cost_model import CostModel
from llmpq.errors import DoesNotFitError
from llmpq.planner.__main__ import main
from llmpq.planner.cli.report import robustness_line
from llmpq.planner.evaluate.cost_entries import CostEntries, EntryTimes
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import keeps_budget, sum_omega, value
from llmpq.planner.problem.cost_factors import CostFactors
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import counting
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import Solved, best_plan
from llmpq.planner.solving.robustness import (
    CLOSE,
    MOST,
    NEAR,
    RobustnessSearch,
    bound_only,
    work_limit_s,
)
from llmpq.plans.plan import Robustness
from reference.brute_force import assignments
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure]

ALL = "LLMPQ_ALL_TESTS" in os.environ
MOST_PLANS = 20_000 if ALL else 60
Floats = NDArray[np.float64]


def most_above(own: EntryTimes, other: EntryTimes, x: float) -> float:
    """Return what a plan is above `NEAR` of another by at most, with factors within a share x.

    A linear program for each term of the plan: its variables are factors, and the slowest stages'
    seconds of the other.
    """
    entries, above = len(own.fixed), -math.inf
    rows = np.concatenate([other.prefill, other.decode])
    slowest = np.repeat([[1.0, 0.0], [0.0, 1.0]], [len(other.prefill), len(other.decode)], axis=0)
    unit = 1 / float(own.fixed.sum())
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = entries + 2, len(rows)
    lp.col_lower_ = np.array([1 - x] * entries + [0.0, 0.0])
    lp.col_upper_ = np.array([1 + x] * entries + [highspy.kHighsInf] * 2)
    lp.row_lower_ = np.full(len(rows), -highspy.kHighsInf)
    lp.row_upper_ = np.zeros(len(rows))
    matrix = np.concatenate([rows * unit, -slowest], axis=1)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.arange(0, matrix.size + 1, entries + 2)
    lp.a_matrix_.index_ = np.tile(np.arange(entries + 2), len(rows))
    lp.a_matrix_.value_ = matrix.ravel()
    for prefill in own.prefill:
        for decode in own.decode:
            gained = own.fixed + prefill + decode - (1 + NEAR) * other.fixed
            lp.col_cost_ = np.array([*(-gained * unit), 1 + NEAR, 1 + NEAR])
            solver.passModel(lp)
            solver.run()
            above = max(above, -solver.getInfo().objective_function_value / unit)
    return above + own.loss_s - (1 + NEAR) * other.loss_s


def largest_share(own: EntryTimes, others: list[EntryTimes]) -> float:
    """Return the largest share at which no other plan is better by more, `MOST` at most."""
    ones = np.ones(len(own.fixed))

    def at_least(other: EntryTimes) -> float:
        """Return what holds if the two have no entry in common."""
        most = (1 + NEAR) * other.value(ones)
        times = most - (1 + NEAR) * other.loss_s + own.value(ones) - own.loss_s
        return (most - own.value(ones)) / times

    found = MOST
    for least, other in sorted(((at_least(o), o) for o in others), key=lambda pair: pair[0]):
        if least >= found:
            break
        if most_above(own, other, found) <= 0:
            continue
        low, high = max(0.0, least), found
        while high - low > 1e-5:
            middle = (low + high) / 2
            low, high = (low, middle) if most_above(own, other, middle) > 0 else (middle, high)
        found = high
    return found


def _solved(seed: int) -> tuple[Solved, SolveOptions] | None:
    """Return the best plan of a random problem, for some within a budget."""
    rng = random.Random(seed)
    p = random_problem(
        rng,
        layers=(2, 4),
        kinds=(1, 3),
        devices=(1, 2),
        precisions=2,
        batch=rng.choice([1, 2, 3, 4]),
    )
    options = SolveOptions(gap=1e-9, time_limit_s=math.inf)
    try:
        found = best_plan(p, options)
        if seed % 4 == 3:
            loss = sum_omega(found.problem, found.outcome.assignment)
            options = replace(options, budget=loss * rng.uniform(1.0, 1.5))
            found = best_plan(p, options)
    except DoesNotFitError:
        return None
    return found, options


def _with_costs(p: Problem, entries: CostEntries, factors: Floats) -> Problem:
    """Return a problem whose cost table is written anew with factors on its entries."""
    data = p.costs.estimate.model_dump(by_alias=True)
    numbers = {key: k for key, k in entries._number.items() if isinstance(key, tuple)}
    for one, entry in zip(p.costs.estimate.entries, data["entries"], strict=True):
        key = (one.device_kind, one.part, one.phase, one.precision, one.kv, one.dtype)
        factor = float(factors[numbers[key]])
        for regime in entry["regimes"]:
            regime["terms"] = {name: s * factor for name, s in regime["terms"].items()}
    links = CostFactors(
        layer={at: np.array(1.0) for at in entries.sizes(0)},
        ends={at: np.array(1.0) for at in entries.sizes(0)},
        links=factors[entries.of_links],
    )
    changed = replace(p, costs=replace(p.costs, estimate=CostModel(**data)), factors=links)
    assert [len(cls.devices) for cls in changed.classes] == [len(c.devices) for c in p.classes]
    return changed


def _check(seed: int, work_s: float) -> tuple[float, float, float] | None:
    """Check the shares of a random problem's plan; return both, and the true one."""
    solved = _solved(seed)
    if solved is None:
        return None
    (p, outcome), options = (solved[0].problem, solved[0].outcome), solved[1]
    plans = [a for a in assignments(p) if fits(p, a) and keeps_budget(p, a, options.budget)]
    if len(plans) > MOST_PLANS:
        return None
    a = outcome.assignment
    with counting():
        search = RobustnessSearch([p], 0, a, options, work_s=work_s, bound=outcome.bound)
        by_bound = search.proven
        search.run()
    priced, entries = search.variants[0], search.entries
    ones = np.ones(len(entries))
    for plan in (a, *plans[:: len(plans) // 5 + 1]):
        assert entries.times(0, plan).value(ones) == pytest.approx(value(priced, plan), rel=1e-9)
    refuted = MOST if search.refuted is None else search.refuted
    assert by_bound <= search.proven <= refuted + 1e-9, seed
    if search.example is not None:
        example = search.example
        assert np.abs(example.factors - 1).max() <= example.share + 1e-9
        changed = _with_costs(priced, entries, example.factors)
        better = value(changed, example.assignment)
        assert value(changed, a) > (1 + NEAR) * better * (1 - 1e-9), seed
        assert fits(p, example.assignment)
    true = largest_share(search.own, [entries.times(0, plan) for plan in plans])
    assert search.proven - 2e-5 <= true <= refuted + 2e-5, (seed, search.proven, true, refuted)
    return search.proven, true, refuted


def test_the_largest_share_is_between_what_is_proven_and_what_is_refuted() -> None:
    """Of every plan there is, each with the worst costs for it, by linear programs."""
    found = [one for seed in range(300 if ALL else 10) if (one := _check(seed, 0.1)) is not None]
    gaps = [refuted - proven for proven, _, refuted in found]
    near = sum(gap <= 2 * CLOSE for gap in gaps)
    exact = sum(refuted - true <= CLOSE for _, true, refuted in found)
    assert len(found) >= (200 if ALL else 5)
    assert near > len(found) / 6 and exact > len(found) / 2, (near, exact, statistics.median(gaps))


def test_nothing_above_the_largest_share_is_proven_and_a_planted_bug_is_seen() -> None:
    wrong = tried = 0
    for seed in (2, 3, 8, 16, 17):
        solved = _solved(seed)
        assert solved is not None
        (p, outcome), options = (solved[0].problem, solved[0].outcome), solved[1]
        plans = [a for a in assignments(p) if fits(p, a) and keeps_budget(p, a, options.budget)]
        with counting():
            search = RobustnessSearch(
                [p], 0, outcome.assignment, options, work_s=2.0, bound=outcome.bound
            )
            others = [search.entries.times(0, plan) for plan in plans]
            x = 1.02 * largest_share(search.own, others)
            assert not search.prove(x, 4)[0], seed
            search.most = [_TooLittle() for _ in search.most]  # type: ignore[misc]
            wrong += search.prove(x, 1)[0]
        tried += 1
    assert wrong == tried


class _TooLittle:
    """Says that no plan takes anything of any entry."""

    def of_layers(self, phase: object, size: int) -> Floats:
        return np.array(0.0)

    of_ends = of_layers


def test_the_bound_alone_says_the_most_where_another_plan_is_as_quick() -> None:
    """By hand: of two plans of 2 s that share no cost, one slower by x, the other quicker by x."""
    share = bound_only(2.0, 2.0, 2.0)
    assert 2.0 * (1 + share) == pytest.approx(1.05 * 2.0 * (1 - share))
    lossy = bound_only(3.0, 2.0, 2.9)
    assert 1.0 + 2.0 * (1 + lossy) == pytest.approx(1.05 * 2.9 * (1 - lossy))
    assert bound_only(2.0, 2.0, 1.0) == 0.0


def test_the_work_is_a_share_of_the_search_and_of_the_limit() -> None:
    options = SolveOptions(time_limit_s=30.0)
    assert work_limit_s(options, 0.1) < work_limit_s(options, 4.0) < work_limit_s(options, 100.0)
    assert work_limit_s(options, 100.0) < 0.1 * options.time_limit_s
    assert work_limit_s(replace(options, time_limit_s=0.2), 100.0) < 0.02


def test_shares_are_said_as_they_are() -> None:
    of = "pipelines"
    both = Robustness(near=0.05, proven=0.0319, refuted=0.0731, better="a: 2 x w8a16")
    line = robustness_line(both, of)
    assert "off by up to 3.1% either way" in line and "; at 7.4% another" in line
    met = robustness_line(both.model_copy(update={"refuted": 0.0321}), of)
    assert "3.1%" in met and "beyond" in met and "3.3%" not in met
    alone = robustness_line(both.model_copy(update={"refuted": None}), of)
    assert "3.1%" in alone and "another" not in alone
    assert "no cost error" in robustness_line(Robustness(near=0.05, proven=0.0004), of)


def test_the_command_says_both_shares_and_a_tiny_limit_leaves_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    flags = ["--devices", "4090,3060", "--model", "opt-1.3b", "--batch", "4", "-o", str(path)]
    assert main(flags) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("robust: ")]
    found = Robustness(**json.loads(path.read_text())["solver"]["robustness"])
    assert line == robustness_line(found, "pipelines with a device a stage")
    assert found.refuted is not None and 0.1 < found.proven <= found.refuted < 0.5
    assert main(["verify", str(path)]) == 0
    verified = capsys.readouterr().out
    assert "robust: " in verified and f"{math.floor(found.proven * 1000) / 10:.1f}%" in verified
    assert main([*flags, "--time-limit", "0.5"]) == 0
    hurried = Robustness(**json.loads(path.read_text())["solver"]["robustness"])
    assert hurried.refuted is None and 0.0 <= hurried.proven < 0.05
    assert main([*flags, "--method", "uniform"]) == 0
    assert json.loads(path.read_text())["solver"]["robustness"] is None
