"""The integer program: constraint families, backends, time limits, typed outcomes."""

from __future__ import annotations

import math
import random
import sys

import pytest

from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.ilp import solve as ilp
from llmpq.planner.ilp.milp import BACKENDS, LinearModel, MilpResult, solve_milp
from llmpq.planner.ilp.model import build_ilp
from llmpq.planner.ilp.solve import device_orders, solve_ilp
from llmpq.planner.problem.outcome import Infeasible, Unfinished
from llmpq.planner.problem.problem import Problem
from reference.brute_force import assignments, brute_force
from reference.random_problems import random_problem

pytestmark = pytest.mark.pure


def _problem(seed: int = 3, **sizes: object) -> Problem:
    defaults: dict[str, object] = {"layers": (5, 5), "kinds": (2, 2), "devices": (1, 1), "batch": 2}
    return random_problem(random.Random(seed), **{**defaults, **sizes})  # type: ignore[arg-type]


def _knapsack() -> LinearModel:
    model = LinearModel()
    items = [model.variable(f"x{i}", cost=-float(v), binary=True) for i, v in enumerate((6, 5, 4))]
    model.at_most("room", [(items[0], 5.0), (items[1], 4.0), (items[2], 3.0)], 7.0)
    model.constant = 1.0
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree_on_a_knapsack(backend: str) -> None:
    result = solve_milp(_knapsack(), backend=backend)  # type: ignore[arg-type]
    assert result.status == "optimal"
    assert result.value == pytest.approx(-8.0) and result.bound == pytest.approx(-8.0, abs=1e-4)
    assert result.values is not None and result.values.round().tolist() == [0, 1, 1]


@pytest.mark.parametrize("backend", ["highs", "cbc", "gurobi"])
def test_backends_plan_alike(backend: str) -> None:
    p = _problem()
    best, _ = brute_force(p)
    assert solve_ilp(p, backend=backend).value == pytest.approx(best, rel=1e-6)  # type: ignore[arg-type]


def test_gurobi_missing_or_too_small_a_licence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    result = solve_milp(_knapsack(), backend="gurobi")
    assert result.status == "optimal"
    assert result.note == ("gurobipy is not installed (pip install llmpq[gurobi]); HiGHS was used")


def test_a_licence_limit_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    class GurobiError(Exception):
        errno = 10010

    class Fake:
        def __init__(self, **_: object) -> None:
            pass

        def addVars(self, _: int) -> None:  # noqa: N802
            pass

        def optimize(self) -> None:
            raise GurobiError("Model too large for size-limited license")

    fake = type(sys)("gurobipy")
    fake.Model, fake.Env, fake.GurobiError = Fake, Fake, GurobiError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gurobipy", fake)
    result = solve_milp(_knapsack(), backend="gurobi")
    assert result.note == (
        "the licence of pip's gurobipy stops at 2000 variables, this model has 3; HiGHS was used"
    )
    assert result.value == pytest.approx(-8.0)


def test_constraint_families_have_the_sizes_they_state() -> None:
    p = _problem(layers=(6, 6), kinds=(2, 2), devices=(1, 1))
    order = max(device_orders(p), key=len)
    model = build_ilp(p, order, *p.pairs[0]).model
    layers, stages = 6, len(order)
    counts = {
        "once": layers,
        "used": stages,
        "contiguous": (layers - 1) * (stages - 1),
        "memory": stages,
        "prefill": stages,
        "decode": stages,
    }
    for family, count in counts.items():
        assert sum(row.name.startswith(f"{family}[") for row in model.rows) == count
    assert {"first", "last"} <= {row.name for row in model.rows}
    assert sum(model.binary) == layers * stages * len(p.choices)
    assert "z[0,0,w16a16]" in model.names or "z[0,0,w8a16]" in model.names


def test_a_solution_costs_what_the_closed_form_says() -> None:
    for seed in range(10):
        p = _problem(seed)
        for order in device_orders(p):
            built = build_ilp(p, order, *p.pairs[0])
            result = solve_milp(built.model, gap=1e-9)
            if result.values is None:
                assert math.isinf(result.value)
                continue
            assert result.value == pytest.approx(
                value(p, built.assignment(result.values)), rel=1e-6
            )


def test_budget_replaces_the_price() -> None:
    p = _problem(5)
    best, plan = brute_force(p.with_changes(theta=0.0))
    assert plan is not None
    least = min(sum_omega(p, a) for a in assignments(p) if fits(p, a))
    free = solve_ilp(p, budget=sum_omega(p, plan))
    assert free.value == pytest.approx(best, rel=1e-6)
    tight = solve_ilp(p, budget=least * (1 + 1e-9))
    assert tight.value > best and sum_omega(p, tight.assignment) <= least * (1 + 1e-6)


def test_no_time_is_said_and_an_incumbent_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    p = _problem(4, layers=(8, 8), kinds=(2, 2), devices=(2, 2), batch=8)
    with pytest.raises(Unfinished, match="^no plan found within 0 s; give a longer --time-limit$"):
        solve_ilp(p, time_limit_s=0.0)
    monkeypatch.setattr(ilp, "MAX_PROGRAMS", 1)
    outcome = solve_ilp(p, time_limit_s=0.0)  # adabits' plan is the incumbent
    assert outcome.status == "feasible" and outcome.bound is None
    assert outcome.note == ilp.KINDS_NOTE


def _raised(p: Problem) -> str:
    with pytest.raises(Infeasible) as caught:
        solve_ilp(p)
    return type(caught.value).__name__


def test_no_room_is_said_only_where_all_orders_were_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"layers": (3, 5), "kinds": (1, 2), "devices": (1, 2), "precisions": 2}
    between, nowhere = _problem(248, **sizes), _problem(58, **sizes)
    assert math.isfinite(brute_force(between)[0]) and solve_ilp(between).status == "optimal"
    assert _raised(nowhere) == "Infeasible" and math.isinf(brute_force(nowhere)[0])
    monkeypatch.setattr(ilp, "MAX_PROGRAMS", 1)
    assert _raised(between) == _raised(nowhere) == "Unfinished"


def test_a_program_out_of_time_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a relaxation nor a program that was cut short says that nothing fits."""
    nothing = MilpResult(
        status="unknown", value=math.inf, bound=-math.inf, values=None, seconds=0.0
    )
    p = _problem()
    best = solve_ilp(p)
    for cut in (True, False):

        def short(model: LinearModel, *, relax: bool = False, cut: bool = cut, **how: object):  # type: ignore[no-untyped-def]
            return nothing if relax == cut else solve_milp(model, relax=relax, **how)  # type: ignore[arg-type]

        monkeypatch.setattr(ilp, "solve_milp", short)
        if cut:
            assert solve_ilp(p).value == pytest.approx(best.value, rel=1e-6)
        else:
            assert _raised(p) == "Unfinished"


def test_relaxations_keep_to_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def timed(model: LinearModel, **how: object) -> MilpResult:
        limits.append(how["time_limit_s"])  # type: ignore[arg-type]
        return solve_milp(model, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(ilp, "solve_milp", timed)
    solve_ilp(_problem(), time_limit_s=30.0)
    assert limits and max(limits) <= 30.0


def test_every_order_is_listed_once() -> None:
    p = _problem(kinds=(2, 2), devices=(2, 2))
    orders = list(device_orders(p))
    assert len(orders) == len(set(orders))
    full = [o for o in orders if len(o) == min(4, p.num_layers)]
    assert len(full) == 6  # 4! / (2! 2!)
    assert sum(len(o) == 1 for o in orders) == 2
