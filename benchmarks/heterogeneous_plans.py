"""The plans that `heterogeneous.py` runs: the exact one, and other planners' at their best.

Every baseline keeps its stages and gets the micro-batches that are best for them; the exact plan is
held to the sum of omega of PipeEdge's.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.cluster import Cluster
from llmpq.plan import Plan

METHODS = ("pipeedge", "uniform", "adabits")

log = logging.getLogger("heterogeneous")


def make_plans(args: argparse.Namespace) -> None:
    """Write DIR/CLUSTER.METHOD.json for every cluster and method."""
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.clusters:
        cluster = Cluster.load(path)
        for name, plan in plans_of(path, args):
            plan.save_json(args.out / f"{cluster.name}.{name}.json")
            log.info("%s", line_of(name, plan))


def plans_of(path: Path, args: argparse.Namespace) -> Iterator[tuple[str, Plan]]:
    """Yield the baselines' plans and the exact ones held to PipeEdge's quality."""
    from llmpq.planner.arguments import plan_parser
    from llmpq.planner.outcome import Infeasible
    from llmpq.planner.pipeline_time import sum_omega
    from llmpq.planner.quality import solve_budget
    from llmpq.planner.request import make_problem, parse_kv

    model = Cluster.load(path).planning.model
    if model is None:
        raise ValueError(f"'{path}' names no model under 'planning'")
    flags = f"--model {model} --global_bz {args.batch} --s {args.prompt} --n {args.gen}"
    flags += f" --bits {args.bits}"
    given = ["--cluster", str(path), "--costs", args.costs, *flags.split()]
    problem, _, notes = make_problem(plan_parser().parse_args(given))
    for note in notes:
        log.info("note: %s", note)
    budget = None
    for method in METHODS:
        try:
            priced, outcome = solve_baseline(problem, method, args.time_limit)
        except Infeasible as error:
            log.info("%s", error)
            continue
        if method == "pipeedge":
            budget = sum_omega(priced, outcome.assignment)
        yield method, checked(priced, best_microbatches(priced, outcome))
    if budget is None:
        raise ValueError(f"'{path}': PipeEdge finds no plan, so there is no quality to hold to")
    best = None
    for kv in parse_kv(args.kv):
        work = problem.workload.model_copy(update={"kv": kv})
        priced = problem.with_changes(workload=work, theta=0.0)
        try:
            found = solve_budget(priced, budget, time_limit_s=args.time_limit, gap=1e-3)
        except Infeasible:
            continue
        plan = checked(priced, found)
        if kv.bits == 16:
            yield "exact-kv16", renamed(plan, "exact-kv16")
        if best is None or plan.predicted.total_s < best.predicted.total_s:
            best = plan
    if best is not None:
        yield "exact", best


def solve_baseline(problem: Any, method: str, limit_s: float) -> tuple[Any, Any]:
    """Return a baseline's outcome, and the problem it solves.

    Plans of one precision are sought without room for the workspaces of others.
    """
    from llmpq.planner.methods import solve
    from llmpq.planner.outcome import Infeasible

    if method == "adabits":
        return problem, solve(problem, method, time_limit_s=limit_s)
    for choice in sorted(problem.choices, key=lambda p: -p.weight_bits):
        alone = problem.with_changes(choices=(choice,))
        try:
            return alone, solve(alone, method, time_limit_s=limit_s)
        except Infeasible as error:
            refused = error
    raise refused


def best_microbatches(problem: Any, outcome: Any) -> Any:
    """Return the outcome with its stages kept and the fastest micro-batches for them."""
    from llmpq.planner.fits import fits
    from llmpq.planner.pipeline_time import job_time, value

    options = [
        replace(outcome.assignment, prefill_microbatch=eta, decode_microbatch=xi)
        for eta, xi in problem.pairs
    ]
    fitting = [option for option in options if fits(problem, option)]
    best = min(fitting, key=lambda option: job_time(problem, option).total_s)
    return replace(outcome, assignment=best, value=value(problem, best))


def checked(problem: Any, outcome: Any) -> Plan:
    """Return the plan of an outcome, checked by code that shares nothing with the solvers."""
    from llmpq.planner.build_plan import build_plan
    from llmpq.planner.check import check_plan

    plan = build_plan(problem, outcome)
    check_plan(plan, spec=problem.spec, cluster=problem.cluster, costs=problem.costs)
    return plan


def renamed(plan: Plan, method: str) -> Plan:
    """Return the plan with another name of its method."""
    return plan.model_copy(update={"solver": plan.solver.model_copy(update={"method": method})})


def line_of(name: str, plan: Plan) -> str:
    """Return one line that says what a plan is."""
    stages = " ".join(
        f"{stage.profile_kind}:{stage.num_layers}x"
        + "/".join(str(b) for b in sorted({p.weight_bits for p in stage.precisions}))
        for stage in plan.stages
    )
    assert plan.predicted is not None
    return (
        f"{plan.cluster.name:24} {name:10} {plan.predicted.total_s:7.2f} s, prefill "
        f"{plan.predicted.prefill_s:.2f}, omega {plan.predicted.sum_omega:.3f}, "
        f"{plan.prefill_microbatch},{plan.decode_microbatch}, {plan.workload.kv.value} {stages}"
    )
