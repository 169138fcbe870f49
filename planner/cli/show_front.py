"""`--pareto`: the front's plans as one file, and as a table with what it leaves out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.file_form import save_text
from llmpq.pictures.plan_page import Beside, plan_page
from llmpq.planner.cli.arguments import DEFAULT_POINTS
from llmpq.planner.cli.long_search import line_if_long
from llmpq.planner.cli.show_plan import (
    PlanJob,
    check_outputs,
    more_than_pipelines,
    one_pipeline_notes,
    open_console,
    say,
    write_report,
)
from llmpq.planner.evaluate.simulator import reported_time
from llmpq.planner.front.front import FrontPoint
from llmpq.planner.front.preference import WEIGHTS
from llmpq.planner.problem.outcome import Infeasible, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.answer import checked_plan
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import nothing_fits, variants_with_room
from llmpq.planner.solving.worker import front_in_child
from llmpq.plans.plan import Plan

TABLE_COLUMNS = 100
"""Columns of a terminal that the table takes at most."""


@dataclass(frozen=True, kw_only=True)
class ListedFront:
    """The plans worth listing over all KV precisions, and how much is known of the others."""

    plans: tuple[Plan, ...]
    left_out: int
    """Points that are not dominated and yet buy nothing (`worth_listing`)."""
    width: float
    complete: bool


def show_front(request: PlanRequest, job: PlanJob) -> None:
    """Write the plans of the front to `-o`, print the table (or all of it as JSON)."""
    problem, options = job.problem, job.options
    if options.method != "exact":
        raise ValueError(f"--pareto is for --method exact, not {options.method}")
    if options.budget is not None:
        raise ValueError("--pareto lists every budget; leave --quality-budget out")
    points = DEFAULT_POINTS if request.pareto_points is None else request.pareto_points
    if points < 2:
        raise ValueError(f"--pareto-points must be at least 2, got {points}")
    check_outputs(request)
    with line_if_long("looking for the plans of the front", options.asked_s):
        front = list_front(problem, options, job.path, points)
    unit = problem.sensitivity.four_bit_omega()
    chosen = chosen_row(front.plans, options, problem.theta, unit)
    text = json.dumps({**_content(front), "chosen": chosen}, indent=1) + "\n"
    if request.output:
        save_text(request.output, text)
    if request.report:
        write_report(request.report, front_page(front, unit))
    if request.json:
        sys.stdout.write(text)
        return
    from llmpq.planner.cli.report import front_table, remarks_of, warnings_of

    console = open_console()
    for line in warnings_of(job.notes):
        say(console, line)
    console.print(front_table(front.plans, chosen), width=min(console.width, TABLE_COLUMNS))
    how = f"--theta {problem.theta:g}" if options.prefer is None else f"--prefer {options.prefer}"
    shared = one_pipeline_notes(request, options, problem)
    flags = " ".join(more_than_pipelines(request, options, problem)) if shared else ""
    instead = f"with {flags} instead of --pareto" if flags else "without --pareto"
    say(console, f"* of these plans the one that {how} takes: the same command {instead}")
    say(console, coverage(front))
    say(console, f"another of these plans: the same command {instead}, with --quality-budget LOSS")
    if any(plan.solver.status != "optimal" for plan in front.plans):
        say(console, "?: not proven; a longer --time-limit may find a faster plan of that loss")
    for line in remarks_of([*shared, *job.notes]):
        say(console, line)
    if request.output:
        say(console, f"wrote {request.output}: {len(front.plans)} plans")
    if request.report:
        say(console, f"wrote {request.report}")


def front_page(front: ListedFront, unit: float) -> str:
    """Return the page of a front: all its plans, and the one of `--prefer balanced` in full.

    `unit`: the loss of 4 bits everywhere.
    """
    chosen: dict[int, str] = {}
    for prefer, weight in WEIGHTS.items():
        index = min(range(len(front.plans)), key=lambda i: _price(front.plans[i], weight, unit))
        asked = f"--prefer {prefer}"
        chosen[index] = f"{chosen[index]}, {asked}" if index in chosen else asked
    balanced = next(i for i, asked in chosen.items() if "balanced" in asked)
    said = Beside(front=front.plans, chosen=chosen, coverage=coverage(front))
    return plan_page(front.plans[balanced], said)


def chosen_row(plans: Sequence[Plan], options: SolveOptions, theta: float, unit: float) -> int:
    """Return the index of the plan that a preference takes, or theta where there is none."""
    if options.prefer is not None:
        weight = WEIGHTS[options.prefer]
        return min(range(len(plans)), key=lambda i: _price(plans[i], weight, unit))
    return min(range(len(plans)), key=lambda i: _cost(plans[i], theta))


def _cost(plan: Plan, theta: float) -> float:
    predicted = plan.predicted
    assert predicted is not None, "the planner always predicts"
    return predicted.total_s + theta * predicted.sum_omega


def _price(plan: Plan, weight: float, unit: float) -> float:
    """Return what a preference makes smallest: the logarithm of time, and loss at its weight."""
    predicted = plan.predicted
    assert predicted is not None, "the planner always predicts"
    return math.log(predicted.total_s) + weight * predicted.sum_omega / (unit or 1.0)


def list_front(
    problem: Problem, options: SolveOptions, path: str | None, points: int
) -> ListedFront:
    """Return the plans that buy something of the fronts over KV precisions and prefill chunks."""
    found: list[tuple[FrontPoint, Problem]] = []
    width, complete = 0.0, True
    unfinished: Unfinished | None = None
    left_s = options.time_limit_s
    variants = variants_with_room(problem.with_changes(theta=0.0), options)
    for number, priced in enumerate(variants):
        share_s = max(0.0, left_s) / (len(variants) - number)
        try:
            front = front_in_child(
                priced, points=points, time_limit_s=share_s, ends_at=options.ends_at
            )
        except Unfinished as error:
            unfinished, width, complete = error, math.inf, False
            left_s -= share_s
            continue
        except Infeasible:
            continue
        left_s -= front.work_s
        width, complete = max(width, front.width), complete and front.complete
        found += [(point, priced) for point in front.points]
    if not found and unfinished is not None:
        raise unfinished
    if not found:
        raise nothing_fits(problem, options)
    rows = [
        FrontRow(
            time_s=reported_time(p, q.outcome.assignment).total_s, omega=q.omega, number=number
        )
        for number, (q, p) in enumerate(found)
    ]
    kept = worth_listing(rows, problem.sensitivity.four_bit_omega())
    plans = [checked_plan(found[r.number][1], found[r.number][0].outcome, path) for r in kept]
    undominated = len(worth_listing(rows, 0.0))
    return ListedFront(
        plans=tuple(plans),
        left_out=undominated - len(kept),
        width=width,
        complete=complete,
    )


@dataclass(frozen=True, kw_only=True)
class FrontRow:
    """A plan's predicted time and quality loss."""

    time_s: float
    omega: float
    number: int
    """Which of the plans it is."""


def worth_listing(rows: Sequence[FrontRow], unit: float) -> list[FrontRow]:
    """Return the rows that are not dominated and that buy something, fastest first.

    A row buys nothing where even `--prefer quality` would rather have the faster one before it, or
    `--prefer speed` the slower one behind it. `unit`: the loss of 4 bits everywhere; 0 leaves out
    only the dominated ones.
    """
    kept: list[FrontRow] = []
    for row in sorted(rows, key=lambda row: (row.time_s, row.omega)):
        while (
            kept
            and unit
            and _slower(kept[-1], row) <= WEIGHTS["speed"] * _saved(kept[-1], row, unit)
        ):
            kept.pop()
        if not kept or (
            row.omega < kept[-1].omega
            and (
                not unit
                or _slower(kept[-1], row) < WEIGHTS["quality"] * _saved(kept[-1], row, unit)
            )
        ):
            kept.append(row)
    return kept


def _slower(fast: FrontRow, slow: FrontRow) -> float:
    """Return the logarithm of how many times as long the slower one takes."""
    return math.log(slow.time_s / fast.time_s)


def _saved(fast: FrontRow, slow: FrontRow, unit: float) -> float:
    return (fast.omega - slow.omega) / unit


def coverage(front: ListedFront) -> str:
    """Return one sentence: what is proven of the plans that are not listed."""
    listed = len(front.plans) + front.left_out
    count = f"{listed} point{'s' * (listed != 1)}"
    if front.left_out:
        count += f" ({front.left_out} that buy nothing not shown)"
    # Where groups were asked for (--tensor-parallel 2), some plan has them.
    of = next((plan for plan in front.plans if any(s.shares for s in plan.stages)), None)
    of = of or next(iter(front.plans), None)
    whose = "" if of is None else f" of {of.compared_with}"
    if front.complete:
        return f"{count}, proven to be the whole front{whose}"
    if not math.isfinite(front.width):
        return f"{count}{whose}; what lies between them is not proven; give a longer --time-limit"
    share = f"{front.width:.2%}"
    return (
        f"{count}{whose}; proven: for every such plan there is one of these that is at most "
        f"{share} slower without more loss, or no slower with at most {share} more loss; for a "
        "finer list give more --pareto-points or a longer --time-limit"
    )


def _content(front: ListedFront) -> dict[str, object]:
    return {
        "schema": 1,
        "resolution": front.width if math.isfinite(front.width) else None,
        "complete": front.complete,
        "plans": [json.loads(plan.dump_json()) for plan in front.plans],
    }
