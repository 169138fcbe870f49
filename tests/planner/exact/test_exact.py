"""exact = integer program = brute force, for both objectives, any omega, tight memory."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from llmpq.devices.cluster import Cluster
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.exact import search as exact_search
from llmpq.planner.exact.bounds import columns as columns_table
from llmpq.planner.exact.bounds import space as exact_space
from llmpq.planner.exact.bounds.columns import assigned, make_columns
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.front.quality import solve_budget
from llmpq.planner.ilp.solve import solve_ilp
from llmpq.planner.problem.outcome import Infeasible, Outcome, Unfinished
from llmpq.planner.problem.problem import Problem
from reference.brute_force import assignments, brute_force
from reference.random_problems import random_problem

Seeds = Callable[[Sequence[int]], Sequence[int]]

pytestmark = [pytest.mark.pure, pytest.mark.slow]
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
def test_exact_is_brute_force_on_tiny_problems(seeds: Seeds) -> None:
    infeasible = 0
    for seed in seeds(range(6, 102)):
        p = _problem(seed, **TINY)
        best, _ = brute_force(p)
        found = _exact(p)
        infeasible += found is None
        got = math.inf if found is None else found.value
        assert got == pytest.approx(best, rel=1e-8), f"seed {seed}"
        assert found is None or (found.bound is not None and found.bound <= best * (1 + 1e-9))
    assert 0 < infeasible < 17


@pytest.mark.slow
def test_exact_is_the_integer_program(seeds: Seeds) -> None:
    """Thousands more: `benchmarks/planner_proofs.py`."""
    for seed in seeds(range(1000, 1150)):
        p = _problem(seed, layers=(3, 6), kinds=(1, 2), devices=(1, 2), batch=2)
        found = _exact(p)
        try:
            other = solve_ilp(p, gap=1e-9).value
        except Infeasible:
            other = math.inf
        got = math.inf if found is None else found.value
        assert got == pytest.approx(other, rel=1e-6), f"seed {seed}"


def test_a_planted_bug_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dominance that ignores D, and no plan to start from, some come out wrong."""
    from llmpq.planner.exact import labels

    monkeypatch.setattr(exact_search.Search, "begin", lambda *_: None)
    monkeypatch.setattr(exact_search.Search, "quick_pass", lambda *_: -math.inf)
    monkeypatch.setattr(exact_search, "improved", lambda *_: None)
    honest = labels._dominated

    def careless(part, by, a, weights, *, strict):  # type: ignore[no-untyped-def]
        return honest(part, by, a, (0.0, 0.0), strict=strict)

    monkeypatch.setattr(labels, "_dominated", careless)
    wrong = 0
    for seed in range(90, 300):
        p = _problem(seed, layers=(4, 6), kinds=(2, 2), devices=(1, 2), precisions=2)
        found = _exact(p)
        monkeypatch.setattr(labels, "_dominated", honest)
        right = _exact(p)
        monkeypatch.setattr(labels, "_dominated", careless)
        if found and right and found.value > right.value * (1 + 1e-7):
            wrong += 1
            break
    assert wrong


def test_same_problem_same_plan(monkeypatch: pytest.MonkeyPatch, seeds: Seeds) -> None:
    sizes = {"layers": (3, 7), "kinds": (1, 2)}
    hurried = [(seed, _exact(_problem(seed, **sizes), 1e-6)) for seed in seeds(range(20))]
    # Where the clock ends no try early, of two plans of one value it is always the same.
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    for seed, other in hurried:
        first, second = (_exact(_problem(seed, **sizes), 1e-6) for _ in range(2))
        assert (first and first.assignment) == (second and second.assignment)
        assert (first is None) == (other is None)
        assert first is None or other is None or first.value == pytest.approx(other.value, rel=2e-6)


def test_budget_is_brute_force_within_the_budget(seeds: Seeds) -> None:
    rng = random.Random(5)
    solved = 0
    for seed in seeds(range(25)):
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
    assert solved >= 5


@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(n, marks=pytest.mark.seldom) for n in (19, 50)), 65]
)
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


def test_pins_and_device_limits_are_kept(seeds: Seeds) -> None:
    for seed in seeds(range(40)):
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


@pytest.fixture(params=["no table of columns", "no list of states", "neither"])
def _at_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search small problems as large ones are searched."""
    if request.param != "no list of states":
        monkeypatch.setattr(columns_table, "MAX_VECTORS", 0)
    if request.param != "no table of columns":
        monkeypatch.setattr(exact_space, "MAX_STATES", 0)


@pytest.mark.usefixtures("_at_large")
def test_ways_of_large_problems_are_brute_force_on_small_ones(seeds: Seeds) -> None:
    solved = 0
    for seed in seeds(range(2000, 2030)):
        p = _problem(seed, **TINY)
        best, _ = brute_force(p)
        found = _exact(p)
        got = math.inf if found is None else found.value
        assert got == pytest.approx(best, rel=1e-8), f"seed {seed}"
        assert found is None or (found.bound is not None and found.bound <= best * (1 + 1e-9))
        solved += found is not None
    assert solved > 5


def test_the_nearest_links_bound_the_true_ones(
    monkeypatch: pytest.MonkeyPatch, seeds: Seeds
) -> None:
    """Equal cards in two nodes over a slow network: searched as one class, valued as two."""
    monkeypatch.setattr(exact_space, "MAX_STATES", 0)
    solved = 0
    for seed in seeds(range(20)):
        sizes = {"layers": (3, 4), "kinds": (1, 1), "devices": (4, 4), "precisions": 2}
        p = _split_in_nodes(_problem(seed, **sizes, batch=2))
        assert len(p.classes) == 2 and len(p.with_changes(nearest_links=True).classes) == 1
        best, _ = brute_force(p)
        found = _exact(p)
        assert (found is None) == (best == math.inf)
        if found is not None:
            assert found.bound is not None and found.bound <= best * (1 + 1e-9)
            assert best * (1 - 1e-9) <= found.value == value(p, found.assignment)
            solved += 1
    assert solved > 2


def _split_in_nodes(p: Problem) -> Problem:
    """Move half of a node's devices to another node."""
    node = p.cluster.nodes[0]
    group = node.devices[0].model_copy(update={"count": 2})
    nodes = [node.model_copy(update={"name": n, "devices": (group,)}) for n in ("left", "right")]
    data = p.cluster.model_copy(update={"nodes": tuple(nodes)}).model_dump(by_alias=True)
    return p.with_changes(cluster=Cluster.parse_data(data, where="test"))


@pytest.mark.slow
def test_branching_changes_nothing(monkeypatch: pytest.MonkeyPatch, seeds: Seeds) -> None:
    """Where no node may take labels all are branched on D and P; the optimum is the same."""
    monkeypatch.setattr(exact_search, "LABEL_LIMITS", (0, 0, 0))
    splits = 0
    honest = exact_search.Search._branch

    def counted(
        self: exact_search.Search, part: exact_search.SearchNode
    ) -> list[exact_search.SearchNode]:
        nonlocal splits
        splits += 1
        return honest(self, part)

    monkeypatch.setattr(exact_search.Search, "_branch", counted)
    for seed in seeds(range(15)):
        p = _problem(seed, **TINY)
        best, _ = brute_force(p)
        found = _exact(p)
        got = math.inf if found is None else found.value
        assert got == pytest.approx(best, rel=1e-8), f"seed {seed}"
    assert splits > 10


@pytest.mark.parametrize("seed", [8, 9, 30])
def test_no_time_still_gives_a_plan_and_its_bound(seed: int) -> None:
    """Seed 8 has no plan at all; on 30 no pipeline of one precision fits."""
    p = _problem(seed, layers=(8, 8), kinds=(2, 2), devices=(2, 2))
    try:
        whole = solve_exact(p)
    except Infeasible:
        assert seed == 8
        with pytest.raises(Unfinished) as caught:
            solve_exact(p, time_limit_s=0.0)
        assert caught.value.bound > 0
        return
    hurried = solve_exact(p, time_limit_s=0.0)
    assert hurried.bound is not None and hurried.bound <= whole.value * (1 + 1e-9)
    assert hurried.value >= whole.value * (1 - 1e-9)


def test_no_time_without_a_plan_is_not_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    p = _problem(8, layers=(8, 8), kinds=(2, 2), devices=(2, 2))
    monkeypatch.setattr(exact_search.Incumbent, "offer", lambda *_: False)
    with pytest.raises(Unfinished, match="^no plan found within 0 s; give a longer --time-limit$"):
        solve_exact(p, time_limit_s=0.0)


def test_least_omega_of_counts_is_exact_for_any_omega() -> None:
    p = _problem(3, layers=(5, 5), precisions=3)
    columns = make_columns(p)
    for m in range(1, columns.most + 1):
        for start in range(5 - m + 1):
            for column, counts in enumerate(columns.counts[m]):
                omega = p.open_omega[start : start + m]
                choices = assigned(omega, counts)
                assert np.bincount(choices, minlength=3).tolist() == counts.tolist()
                cost = sum(omega[i, b] for i, b in enumerate(choices))
                assert cost == pytest.approx(columns.least[m][start, column])


def test_kinds_that_are_nearer_to_each_other_than_to_themselves_are_brute_force() -> None:
    """Links within a node slower than between nodes: two equal devices are on one island, too."""
    solved = 0
    for seed in range(3000, 3020):
        p = _problem(seed, layers=(3, 4), kinds=(2, 2), devices=(1, 2), precisions=2, batch=2)
        data = p.cluster.model_dump(by_alias=True)
        data["links"] = {
            "within_node": {"gbps": 0.01, "latency_us": 5},
            "between_nodes": {"gbps": 800, "latency_us": 5},
        }
        p = p.with_changes(cluster=Cluster.parse_data(data, where="test"))
        best, _ = brute_force(p)
        found = _exact(p)
        assert (math.inf if found is None else found.value) == pytest.approx(best, rel=1e-8), seed
        if found is not None:
            assert found.bound is not None and found.bound <= best * (1 + 1e-9)
            solved += 1
    assert solved > 8


def test_a_node_stopped_in_its_widest_window_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = _problem(7, layers=(4, 4), kinds=(2, 2), devices=(1, 2), precisions=2)
    search = exact_search.Search(p, math.inf, 1e-9)
    form = exact_search.make_form(p, *p.pairs[0])
    part = search._node(form, exact_search.EVERYWHERE, 2)
    assert search._bound(part) == [part]
    part.window = len(exact_search.WINDOWS) - 1
    monkeypatch.setattr(exact_search, "LABEL_LIMITS", (-1, -1, -1, -1))
    search.in_quick_pass, search.deadline, search.incumbent.value = True, -math.inf, math.inf
    for _ in range(3):
        assert search._process(part) == [part]
    search.in_quick_pass, search.deadline = False, math.inf
    assert math.isfinite(search.run()) or search.best is None
