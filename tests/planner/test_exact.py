"""exact = integer program = brute force, for both objectives, any omega, tight memory."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from llmpq.planner.brute_force import assignments, brute_force
from llmpq.planner.exact import columns as columns_table
from llmpq.planner.exact import search as exact_search
from llmpq.planner.exact.columns import TooManyColumns, make_columns
from llmpq.planner.exact.completion import ChainSpace
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.fits import fits
from llmpq.planner.ilp import solve_ilp
from llmpq.planner.outcome import Infeasible, Outcome, Unfinished
from llmpq.planner.pipeline_time import sum_omega, value
from llmpq.planner.problem import Problem
from llmpq.planner.quality import solve_budget
from llmpq.planner.random_problems import random_problem

pytestmark = pytest.mark.pure
TINY = {"layers": (3, 5), "kinds": (1, 2), "devices": (1, 2), "precisions": 2}


def _problem(seed: int, **sizes: object) -> Problem:
    rng = random.Random(seed)
    objective = rng.choice(["makespan", "paper"])
    separable = rng.random() < 0.5
    return random_problem(rng, objective=objective, separable=separable, **sizes)  # type: ignore[arg-type]


def _exact(p: Problem, gap: float = 1e-9) -> Outcome | None:
    try:
        return solve_exact(p, gap=gap)
    except Infeasible:
        return None


@pytest.mark.slow
def test_exact_is_brute_force_on_tiny_problems() -> None:
    infeasible = 0
    for seed in range(100):
        p = _problem(seed, **TINY)
        best, _ = brute_force(p)
        found = _exact(p)
        infeasible += found is None
        got = math.inf if found is None else found.value
        assert got == pytest.approx(best, rel=1e-8), f"seed {seed}"
        assert found is None or (found.bound is not None and found.bound <= best * (1 + 1e-9))
    assert 0 < infeasible < 50


@pytest.mark.slow
def test_exact_is_the_integer_program_on_500_problems() -> None:
    for seed in range(1000, 1500):
        p = _problem(seed, layers=(3, 6), kinds=(1, 2), devices=(1, 2), batch=2)
        found = _exact(p)
        try:
            other = solve_ilp(p, gap=1e-9).value
        except Infeasible:
            other = math.inf
        got = math.inf if found is None else found.value
        assert got == pytest.approx(other, rel=1e-6), f"seed {seed}"


def test_a_planted_bug_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dominance that ignores D, some of the same problems come out wrong."""
    from llmpq.planner.exact import labels

    honest = labels._dominated

    def careless(part, by, a, weights, *, strict):  # type: ignore[no-untyped-def]
        return honest(part, by, a, (0.0, 0.0), strict=strict)

    monkeypatch.setattr(labels, "_dominated", careless)
    wrong = 0
    for seed in range(300):
        p = _problem(seed, layers=(4, 6), kinds=(2, 2), devices=(1, 2), precisions=2)
        found = _exact(p)
        monkeypatch.setattr(labels, "_dominated", honest)
        right = _exact(p)
        monkeypatch.setattr(labels, "_dominated", careless)
        if found and right and found.value > right.value * (1 + 1e-7):
            wrong += 1
            break
    assert wrong


def test_same_problem_same_plan() -> None:
    for seed in range(20):
        p = _problem(seed)
        first, second = _exact(p, 1e-6), _exact(p, 1e-6)
        assert (first and first.assignment) == (second and second.assignment)


def test_budget_is_brute_force_within_the_budget() -> None:
    rng = random.Random(5)
    solved = 0
    for seed in range(25):
        p = _problem(seed, **TINY).with_changes(objective="makespan", theta=0.0)
        plans = [a for a in assignments(p) if fits(p, a)]
        if not plans:
            continue
        budget = sum_omega(p, rng.choice(plans))
        best = min(value(p, a) for a in plans if sum_omega(p, a) <= budget)
        found = solve_budget(p, budget, gap=1e-9)
        assert sum_omega(p, found.assignment) <= budget
        assert found.value == pytest.approx(best, rel=1e-7), f"seed {seed}"
        assert found.bound is not None and found.bound <= best * (1 + 1e-9)
        solved += 1
    assert solved >= 15


@pytest.mark.parametrize("seed", [3, 19, 50, 65])
def test_a_plan_that_uses_the_whole_budget_is_found(seed: int) -> None:
    """Sums of omega round as their order is: for some of these the search's sum is 1 ulp more."""
    p = _problem(seed, **TINY).with_changes(objective="makespan", theta=0.0)
    least = math.inf
    for seconds, loss in sorted(
        (value(p, a), sum_omega(p, a)) for a in assignments(p) if fits(p, a)
    ):
        if loss < least:  # the fastest plan within its own loss
            found = solve_budget(p, loss, gap=1e-9)
            assert found.value == pytest.approx(seconds, rel=1e-7), f"budget {loss!r}"
            assert found.bound is not None and found.bound <= seconds * (1 + 1e-9)
            least = loss


def test_pins_and_device_limits_are_kept() -> None:
    for seed in range(40):
        p = _problem(seed, layers=(4, 6), kinds=(2, 2), devices=(1, 2), precisions=2, batch=2)
        device = p.cluster.devices[-1].name
        pinned = p.with_changes(pins={device: (1, 2)}, max_devices=2)
        best, _ = brute_force(pinned)
        found = _exact(pinned)
        assert (math.inf if found is None else found.value) == pytest.approx(best, rel=1e-8)
        if found is not None:
            assert len(found.assignment.stages) <= 2
            holder = next(s for s in found.assignment.stages if s.start <= 1 < s.end)
            assert pinned.classes[holder.cls].first.name == device


def test_groups_share_a_choice() -> None:
    p = _problem(2, layers=(6, 6), kinds=(2, 2), devices=(1, 1), precisions=3).with_changes(group=2)
    found = _exact(p)
    assert found is not None and found.value == pytest.approx(brute_force(p)[0], rel=1e-8)


def test_ragged_groups_go_to_the_integer_program() -> None:
    p = _problem(4, layers=(5, 5), kinds=(2, 2), devices=(1, 1), precisions=2).with_changes(group=2)
    assert not p.numbers(*p.pairs[0]).uniform
    found = _exact(p)
    assert found is not None and found.method == "ilp"
    assert found.value == pytest.approx(brute_force(p)[0], rel=1e-6)


def test_searching_in_part_keeps_a_valid_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_search, "MAX_STATES", 0)
    for seed in range(30):
        p = _problem(seed, layers=(4, 6), kinds=(2, 3), devices=(1, 2), precisions=2)
        part = _exact(p)
        monkeypatch.setattr(exact_search, "MAX_STATES", 1500)
        whole = _exact(p)
        monkeypatch.setattr(exact_search, "MAX_STATES", 0)
        if part is None or whole is None:
            continue
        assert part.bound is not None and part.bound <= whole.value * (1 + 1e-7)
        assert part.value >= whole.value * (1 - 1e-7)


def test_chains_of_few_devices_are_brute_force() -> None:
    """A limit of devices holds in every sequence of classes, and no plan within it is missed."""
    solved = 0
    for seed in range(30):
        p = _problem(seed, layers=(4, 5), kinds=(2, 3), devices=(1, 2), precisions=2, batch=2)
        p = p.with_changes(max_devices=1 + seed % 3)
        plans = [(value(p, a), a) for a in assignments(p) if fits(p, a)]
        for sequence in (range(len(p.classes)), range(len(p.classes))[::-1]):
            place = {c: k for k, c in enumerate(sequence)}
            in_row = [
                worth
                for worth, a in plans
                if (order := [place[s.cls] for s in a.stages]) == sorted(order)
            ]
            search = exact_search.Search(p, ChainSpace(p, sequence), math.inf, 1e-9)
            bound = search.run()
            best = min(in_row, default=math.inf)
            assert search.value == pytest.approx(best, rel=1e-8), f"seed {seed}"
            assert bound <= best * (1 + 1e-9)
            assert search.best is None or len(search.best.stages) <= p.max_stages
            solved += bool(in_row) and p.max_stages < len(p.cluster.devices)
    assert solved >= 20


@pytest.mark.slow
def test_splitting_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no patience every part is split by the range of D and P; the optimum is the same."""
    monkeypatch.setattr(exact_search, "PATIENCE", (0, 0, 0))
    splits = 0
    honest = exact_search.Search._split

    def counted(self: exact_search.Search, part: exact_search.Part) -> list[exact_search.Part]:
        nonlocal splits
        splits += 1
        return honest(self, part)

    monkeypatch.setattr(exact_search.Search, "_split", counted)
    for seed in range(15):
        p = _problem(seed, **TINY)
        best, _ = brute_force(p)
        found = _exact(p)
        got = math.inf if found is None else found.value
        assert got == pytest.approx(best, rel=1e-8), f"seed {seed}"
    assert splits > 10


def test_leaving_out_long_stages_keeps_a_valid_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = 0
    for seed in range(40):
        p = _problem(seed, layers=(8, 9), kinds=(1, 2), devices=(1, 2), precisions=2, batch=2)
        monkeypatch.setattr(columns_table, "MAX_ENTRIES", 10**7)
        whole = _exact(p)
        monkeypatch.setattr(columns_table, "MAX_ENTRIES", 100)
        try:
            part = solve_exact(p, gap=1e-9)
        except (Infeasible, TooManyColumns):
            assert whole is None or p.num_layers >= 8
            continue
        assert whole is not None and part.bound is not None
        assert part.bound <= whole.value * (1 + 1e-7) and part.value >= whole.value * (1 - 1e-7)
        limited += bool(part.note)
    assert limited > 0


def test_no_time_still_gives_a_plan_and_its_bound() -> None:
    p = _problem(8, layers=(8, 8), kinds=(2, 2), devices=(2, 2))
    hurried, whole = solve_exact(p, time_limit_s=0.0), solve_exact(p)
    assert hurried.bound is not None and hurried.bound <= whole.value * (1 + 1e-9)
    assert hurried.value >= whole.value * (1 - 1e-9)


def test_no_time_without_a_plan_is_not_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    p = _problem(8, layers=(8, 8), kinds=(2, 2), devices=(2, 2))
    monkeypatch.setattr(exact_search.Search, "offer", lambda *_: None)
    with pytest.raises(Unfinished, match="^no plan found within 0 s; give a longer --time-limit$"):
        solve_exact(p, time_limit_s=0.0)


def test_least_omega_of_counts_is_exact_for_any_omega() -> None:
    rng = np.random.default_rng(0)
    omega = rng.uniform(size=(5, 3))
    columns = make_columns(omega, np.array([3, 2, 1]), 100)
    for m in (1, 3, 5):
        for start in range(5 - m + 1):
            for column, counts in enumerate(columns.counts[m]):
                choices = columns.choices(start, m, column)
                assert np.bincount(choices, minlength=3).tolist() == counts.tolist()
                cost = sum(omega[start + i, b] for i, b in enumerate(choices))
                assert cost == pytest.approx(columns.least[m][start, column])
