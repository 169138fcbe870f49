"""A good plan without a search: the quickest of the simple ones that fit."""

from __future__ import annotations

from llmpq.planner.evaluate.least_bytes import fitting_plan
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.start.starts import Incumbent, first_plans
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem


def quick_plan(p: Problem) -> tuple[Problem, Assignment] | None:
    """Return the job, with the chunks of prompts that it needs, and a plan of it; None: none fits.

    Single devices and pipelines of the fastest, one precision for all layers, and the plan of the
    fewest bytes; the one that takes the least time.
    """
    found = fitting_plan(p)
    if found is None:
        return None
    job, least = found
    incumbent = Incumbent(job.with_changes(theta=0.0))
    incumbent.offer(least)
    for plan in first_plans(incumbent.p, PairTables(incumbent.p)):
        incumbent.offer(plan)
    return (job, least) if incumbent.best is None else (incumbent.p, incumbent.best)
