"""Makes a plan from the command line's wishes, checks it, writes and prints it."""

from __future__ import annotations

import argparse
import sys

from llmpq.errors import DoesNotFitError
from llmpq.plan import Plan
from llmpq.planner.advice import explain_infeasible
from llmpq.planner.build_plan import build_plan
from llmpq.planner.check import check_plan
from llmpq.planner.methods import solve
from llmpq.planner.outcome import Infeasible, Outcome
from llmpq.planner.problem import Problem
from llmpq.planner.request import make_problem


def make_and_show(args: argparse.Namespace) -> None:
    """Plan, check, write `-o`, and print."""
    problem, path, notes = make_problem(args)
    method = "heuristic" if args.shaq_efficient else args.method
    try:
        outcome = solve(
            problem, method, time_limit_s=args.time_limit, gap=args.gap, backend=args.solver
        )
    except Infeasible:
        raise DoesNotFitError(explain_infeasible(problem)) from None
    plan = checked_plan(problem, outcome, path)
    if args.output:
        plan.save_json(args.output)
    if args.json:
        sys.stdout.write(plan.dump_json())
        return
    from rich.console import Console

    from llmpq.planner.report import print_plan

    console = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160)
    print_plan(console, plan, seconds=outcome.seconds)
    for note in notes + ([outcome.note] if outcome.note else []):
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    if args.output:
        console.print(f"wrote {args.output}", highlight=False)


def checked_plan(problem: Problem, outcome: Outcome, path: str | None) -> Plan:
    """Build the plan and have it checked by code that shares nothing with the solver."""
    plan = build_plan(problem, outcome, model_path=path)
    check_plan(plan, spec=problem.spec, cluster=problem.cluster, costs=problem.costs)
    return plan
