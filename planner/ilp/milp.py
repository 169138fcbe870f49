"""A mixed-integer program with names, and its solvers: HiGHS, or CBC and Gurobi through PuLP.

An incumbent at the time limit is an answer (status `feasible`), never dropped. The licence that
comes with pip's gurobipy stops at 2000 variables; HiGHS takes over there, and the note says so.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

Backend = Literal["highs", "cbc", "gurobi"]
BACKENDS: tuple[Backend, ...] = ("highs", "cbc", "gurobi")


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """lower <= sum coefficient * variable <= upper."""

    name: str
    terms: tuple[tuple[int, float], ...]
    lower: float
    upper: float


@dataclass(kw_only=True)
class LinearModel:
    """Variables and rows, in the order they were added; minimises the sum of costs."""

    names: list[str] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    binary: list[bool] = field(default_factory=list)
    rows: list[Constraint] = field(default_factory=list)
    constant: float = 0.0

    def variable(self, name: str, *, cost: float = 0.0, binary: bool = False) -> int:
        """Add a variable >= 0 (0 or 1 if binary) and return its index."""
        self.names.append(name)
        self.costs.append(cost)
        self.uppers.append(1.0 if binary else math.inf)
        self.binary.append(binary)
        return len(self.names) - 1

    def fix(self, variable: int, value: float) -> None:
        """Fix a binary variable to zero."""
        assert value == 0.0, "only zero is needed"
        self.uppers[variable] = 0.0

    def at_most(self, name: str, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Add sum <= bound."""
        self.rows.append(Constraint(name=name, terms=tuple(terms), lower=-math.inf, upper=bound))

    def at_least(self, name: str, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Add sum >= bound."""
        self.rows.append(Constraint(name=name, terms=tuple(terms), lower=bound, upper=math.inf))

    def equal(self, name: str, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Add sum == bound."""
        self.rows.append(Constraint(name=name, terms=tuple(terms), lower=bound, upper=bound))


@dataclass(frozen=True, kw_only=True)
class MilpResult:
    """What a backend found: a value and solution if it has one, and a proven bound."""

    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    value: float
    bound: float
    values: np.ndarray | None
    seconds: float
    note: str = ""


def solve_milp(
    model: LinearModel,
    *,
    backend: Backend = "highs",
    time_limit_s: float = 60.0,
    gap: float = 1e-7,
    cutoff: float = math.inf,
    relax: bool = False,
) -> MilpResult:
    """Minimise the model; `relax` drops integrality, `cutoff` drops worse solutions (HiGHS)."""
    note = "" if backend != "gurobi" else _gurobi_lack(len(model.names))
    if backend == "highs" or note:
        return replace(_highs(model, time_limit_s, gap, cutoff, relax), note=note)
    return _pulp(model, backend, time_limit_s, gap, relax)


def _highs(
    model: LinearModel, time_limit_s: float, gap: float, cutoff: float, relax: bool
) -> MilpResult:
    import highspy

    start = time.perf_counter()
    solver = make_highs()
    solver.setOptionValue("time_limit", max(0.01, time_limit_s))
    solver.setOptionValue("mip_rel_gap", gap)
    solver.setOptionValue("mip_abs_gap", 0.0)
    solver.setOptionValue("mip_feasibility_tolerance", 1e-7)
    if math.isfinite(cutoff):
        solver.setOptionValue("objective_bound", cutoff - model.constant)
    solver.passModel(_highs_lp(model, relax))
    solver.run()
    status = solver.getModelStatus()
    info, kinds = solver.getInfo(), highspy.HighsModelStatus
    seconds = time.perf_counter() - start
    has_solution = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if status == kinds.kInfeasible or (status == kinds.kObjectiveBound and not has_solution):
        return MilpResult(
            status="infeasible", value=math.inf, bound=math.inf, values=None, seconds=seconds
        )
    bound = info.objective_function_value if relax else info.mip_dual_bound
    if not has_solution:
        bound = bound if math.isfinite(bound) and not relax else -math.inf
        return MilpResult(
            status="unknown",
            value=math.inf,
            bound=bound + model.constant,
            values=None,
            seconds=seconds,
        )
    return MilpResult(
        status="optimal" if status == kinds.kOptimal else "feasible",
        value=info.objective_function_value + model.constant,
        bound=bound + model.constant,
        values=np.array(solver.getSolution().col_value),
        seconds=seconds,
    )


def _highs_lp(model: LinearModel, relax: bool) -> Any:
    """Return the model as HiGHS takes it, rows compressed."""
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.names), len(model.rows)
    lp.col_cost_ = np.array(model.costs)
    lp.col_lower_ = np.zeros(len(model.names))
    lp.col_upper_ = np.array(model.uppers)
    lp.row_lower_ = np.array([row.lower for row in model.rows])
    lp.row_upper_ = np.array([row.upper for row in model.rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0] + [len(row.terms) for row in model.rows])
    lp.a_matrix_.index_ = np.array([v for row in model.rows for v, _ in row.terms])
    lp.a_matrix_.value_ = np.array([c for row in model.rows for _, c in row.terms])
    if not relax:
        integer, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [integer if binary else real for binary in model.binary]
    return lp


def _pulp(
    model: LinearModel, backend: Backend, time_limit_s: float, gap: float, relax: bool
) -> MilpResult:
    import pulp

    start = time.perf_counter()
    program, variables = _pulp_program(model, relax)
    options = {"msg": False, "timeLimit": max(1.0, time_limit_s), "gapRel": gap}
    solver = (
        pulp.GUROBI(**options) if backend == "gurobi" else pulp.PULP_CBC_CMD(**options, threads=1)
    )
    program.solve(solver)
    seconds = time.perf_counter() - start
    if program.sol_status == pulp.LpSolutionInfeasible or program.status == pulp.LpStatusInfeasible:
        return MilpResult(
            status="infeasible",
            value=math.inf,
            bound=math.inf,
            values=None,
            seconds=seconds,
        )
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return MilpResult(
            status="unknown",
            value=math.inf,
            bound=-math.inf,
            values=None,
            seconds=seconds,
        )
    value = pulp.value(program.objective) + model.constant
    # PuLP calls a time-limited answer "Optimal" too; only sol_status tells them apart.
    proven = program.sol_status == pulp.LpSolutionOptimal and seconds < options["timeLimit"]
    return MilpResult(
        status="optimal" if proven else "feasible",
        value=value,
        bound=value - abs(value) * gap if proven else -math.inf,
        values=np.array([v.varValue or 0.0 for v in variables]),
        seconds=seconds,
    )


def _pulp_program(model: LinearModel, relax: bool) -> tuple[Any, list[Any]]:
    import pulp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = pulp.LpProblem("llmpq", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(
            f"v{k}",
            lowBound=0,
            upBound=None if math.isinf(upper) else upper,
            cat="Integer" if binary and not relax else "Continuous",
        )
        for k, (upper, binary) in enumerate(zip(model.uppers, model.binary, strict=True))
    ]
    program += pulp.lpSum(c * v for c, v in zip(model.costs, variables, strict=True) if c)
    for k, row in enumerate(model.rows):
        total = pulp.lpSum(c * variables[v] for v, c in row.terms)
        if row.lower == row.upper:
            program += (total == row.lower), f"r{k}"
        elif math.isinf(row.upper):
            program += (total >= row.lower), f"r{k}"
        else:
            program += (total <= row.upper), f"r{k}"
    return program, variables


def _gurobi_lack(num_variables: int) -> str:
    """Return why Gurobi cannot take a model of so many variables, nothing where it can."""
    try:
        import gurobipy
    except ImportError:
        return "gurobipy is not installed (pip install llmpq[gurobi]); HiGHS was used"
    try:
        probe = gurobipy.Model(env=gurobipy.Env(params={"OutputFlag": 0}))
        probe.addVars(num_variables)
        probe.optimize()
    except gurobipy.GurobiError as error:
        reason = (
            f"the licence of pip's gurobipy stops at 2000 variables, this model has {num_variables}"
            if getattr(error, "errno", 0) == 10010
            else f"Gurobi refused: {error}"
        )
        return f"{reason}; HiGHS was used"
    return ""


def make_highs() -> Any:
    """Return a solver of one thread without output: some versions greet on stdout, the answer's."""
    import highspy

    sys.stdout.flush()
    stdout, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        solver = highspy.Highs()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nothing)
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    return solver
