"""The plans that `heterogeneous.py` runs: the exact one, and other planners' at their best.

Every baseline keeps its stages and gets the micro-batches that are best for them. The exact plan is
held to the sum of omega of PipeEdge's, and its search starts from that plan: where it is the exact
search, the plan is not slower by prediction.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.devices.cluster import Cluster
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision

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
    from llmpq.planner.cli.arguments import plan_request
    from llmpq.planner.problem.make_problem import make_problem, parse_kv
    from llmpq.planner.problem.outcome import Infeasible

    model = Cluster.load(path).planning.model
    if model is None:
        raise ValueError(f"'{path}' names no model under 'planning'")
    flags = f"--model {model} --global_bz {args.batch} --s {args.prompt} --n {args.gen}"
    flags += f" --bits {args.bits}"
    given = ["--cluster", str(path), "--costs", args.costs, *flags.split()]
    problem, _, notes = make_problem(plan_request(given))
    for note in notes:
        log.info("note: %s", note)
    rival = None
    for method in METHODS:
        try:
            priced, outcome = solve_baseline(problem, method, args.time_limit)
        except Infeasible as error:
            log.info("%s", error)
            continue
        outcome = best_microbatches(priced, outcome)
        if method == "pipeedge":
            rival = (priced, outcome.assignment)
        yield method, checked(priced, outcome)
    if rival is None:
        raise ValueError(f"'{path}': PipeEdge finds no plan, so there is no quality to hold to")
    best = None
    for kv in parse_kv(args.kv):
        work = problem.workload.model_copy(update={"kv": kv})
        plan = exact_plan(problem, rival, work, args.time_limit)
        if plan is None:
            continue
        if kv is KVPrecision.KV16:
            yield "exact-kv16", renamed(plan, "exact-kv16")
        if best is None or seconds_of(plan) < seconds_of(best):
            best = plan
    if best is not None:
        yield "exact", best


def exact_plan(problem: Any, rival: tuple[Any, Any], workload: Any, limit_s: float) -> Plan | None:
    """Return the fastest plan whose sum of omega is at most the rival's, None if nothing fits.

    Sought twice: over all precisions, and over the rival's own from the rival's plan on. That one
    needs no room for the workspaces of others, and is found however tight the budget is.
    """
    from llmpq.planner.evaluate.objective import sum_omega
    from llmpq.planner.front.quality import solve_budget
    from llmpq.planner.problem.outcome import Infeasible, WarmStart

    alone, known = rival
    budget, found = sum_omega(alone, known), []
    for searched, start in ((problem, None), (alone, known)):
        priced = searched.with_changes(workload=workload, theta=0.0)
        if start is not None and sum_omega(priced, start) > budget:
            continue  # the cache's own loss is beyond it
        try:
            warm = WarmStart(known=start)
            outcome = solve_budget(priced, budget, time_limit_s=limit_s, gap=1e-3, warm=warm)
        except Infeasible as error:
            log.info("%s", error)
            continue
        found.append(checked(priced, outcome))
    return min(found, key=seconds_of, default=None)


def seconds_of(plan: Plan) -> float:
    """Return what the planner predicts."""
    assert plan.predicted is not None
    return plan.predicted.total_s


def solve_baseline(problem: Any, method: str, limit_s: float) -> tuple[Any, Any]:
    """Return a baseline's outcome, and the problem it solves.

    Plans of one precision are sought without room for the workspaces of others.
    """
    from llmpq.planner.problem.outcome import Infeasible
    from llmpq.planner.solving.methods import SolveOptions, solve

    if method == "adabits":
        return problem, solve(problem, SolveOptions(method=method, time_limit_s=limit_s))
    for choice in sorted(problem.choices, key=lambda p: -p.weight_bits):
        alone = problem.with_changes(choices=(choice,))
        try:
            return alone, solve(alone, SolveOptions(method=method, time_limit_s=limit_s))
        except Infeasible as error:
            refused = error
    raise refused


def best_microbatches(problem: Any, outcome: Any) -> Any:
    """Return the outcome with its stages kept and the fastest micro-batches for them."""
    from llmpq.planner.evaluate.fits import fits
    from llmpq.planner.evaluate.objective import job_time, value

    options = [
        replace(outcome.assignment, prefill_microbatch=eta, decode_microbatch=xi)
        for eta, xi in problem.pairs
    ]
    fitting = [option for option in options if fits(problem, option)]
    best = min(fitting, key=lambda option: job_time(problem, option).total_s)
    return replace(outcome, assignment=best, value=value(problem, best))


def checked(problem: Any, outcome: Any) -> Plan:
    """Return the plan of an outcome, checked by code that shares nothing with the solvers."""
    from llmpq.planner.check.build_plan import build_plan
    from llmpq.planner.check.check import check_plan

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
