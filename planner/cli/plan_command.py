"""What `llmpq-algo plan` does: plans a batch job or live traffic, or lists the front."""

from __future__ import annotations

import sys

from llmpq.errors import DoesNotFitError
from llmpq.planner.problem.requests import TRAFFIC_OBJECTIVES, PlanRequest


def plan(request: PlanRequest) -> None:
    """Plan a batch job or live traffic, or list the front; the answer on stdout."""
    if request.has_traffic:
        from llmpq.planner.cli.show_traffic import show_traffic

        show_traffic(request)
        return
    if request.objective in TRAFFIC_OBJECTIVES:
        raise ValueError(
            f"--objective {request.objective} is of live traffic: give --trace FILE, or --prompt, "
            "--gen and --rate"
        )
    from llmpq.planner.cli.long_search import line_if_long
    from llmpq.planner.cli.show_plan import make_and_show, read_job

    job = read_job(request)
    try:
        if request.pareto:
            from llmpq.planner.cli.show_front import show_front

            show_front(request, job)
        else:
            with line_if_long("looking for the best plan", job.options.asked_s):
                make_and_show(request, job)
    except DoesNotFitError:
        for note in job.notes:
            if note.startswith("assumed: "):
                sys.stderr.write(f"llmpq-algo: {note}\n")
        raise
