"""`--pareto`: the front's plans as files or one JSON, and as a table with what it leaves out."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from llmpq.errors import DoesNotFitError
from llmpq.file_form import check_writable
from llmpq.plan import Plan
from llmpq.planner.answer import Wish, checked_plan
from llmpq.planner.cli.arguments import DEFAULT_POINTS
from llmpq.planner.cli.show_plan import open_console
from llmpq.planner.formulation.outcome import Infeasible, Unfinished
from llmpq.planner.formulation.problem import Problem
from llmpq.planner.front.front import FrontPoint
from llmpq.planner.inputs.requests import PlanRequest
from llmpq.planner.predict.advice import explain_infeasible, too_big
from llmpq.planner.solving.isolated import front_isolated


@dataclass(frozen=True, kw_only=True)
class ListedFront:
    """The undominated points over all KV precisions, their plans, and how much they leave out."""

    points: tuple[FrontPoint, ...]
    plans: tuple[Plan, ...]
    width: float
    complete: bool


def show_front(request: PlanRequest, problem: Problem, wish: Wish, path: str | None) -> None:
    """Write the plans of the front next to `-o`, print the table (or all of it as JSON)."""
    if wish.method != "exact":
        raise ValueError(f"--pareto is for --method exact, not {wish.method}")
    if wish.budget is not None:
        raise ValueError("--pareto lists every budget; leave --quality-budget out")
    points = DEFAULT_POINTS if request.pareto_points is None else request.pareto_points
    if points < 2:
        raise ValueError(f"--pareto-points must be at least 2, got {points}")
    if request.output:
        check_writable(_numbered(Path(request.output), 1))
    front = list_front(problem, wish, path, points)
    written = []
    for number, plan in enumerate(front.plans if request.output else (), start=1):
        written.append(_numbered(Path(str(request.output)), number))
        plan.save_json(written[-1])
    if request.json:
        sys.stdout.write(json.dumps(_content(front), indent=1) + "\n")
        return
    from llmpq.planner.cli.report import front_table

    console = open_console()
    console.print(front_table(front.plans, front.points))
    console.print(coverage(front), highlight=False, soft_wrap=True)
    if written:
        console.print(f"wrote {written[0]} ... {written[-1]}", highlight=False, soft_wrap=True)


def list_front(problem: Problem, wish: Wish, path: str | None, points: int) -> ListedFront:
    """Return the undominated plans of the fronts of every KV precision, fastest first."""
    found: list[tuple[float, float, int, FrontPoint, Problem]] = []
    width, complete = 0.0, True
    unfinished: Unfinished | None = None
    deadline = time.perf_counter() + wish.time_limit_s
    for number, kv in enumerate(wish.kvs):
        work = problem.workload.model_copy(update={"kv": kv})
        priced = problem.with_changes(workload=work, theta=0.0)
        if too_big(priced):
            continue
        left = max(0.0, deadline - time.perf_counter()) / (len(wish.kvs) - number)
        try:
            front = front_isolated(priced, points=points, time_limit_s=left)
        except Unfinished as error:
            unfinished, width, complete = error, math.inf, False
            continue
        except Infeasible:
            continue
        width, complete = max(width, front.width), complete and front.complete
        found += [
            (q.time_s, q.omega, len(found) + k, q, priced) for k, q in enumerate(front.points)
        ]
    if not found and unfinished is not None:
        raise unfinished
    if not found:
        raise DoesNotFitError(explain_infeasible(problem))
    kept, plans, least = [], [], math.inf
    for _, omega, _, point, priced in sorted(found, key=lambda row: row[:3]):
        if omega < least:
            least = omega
            kept.append(point)
            plans.append(checked_plan(priced, point.outcome, path))
    return ListedFront(points=tuple(kept), plans=tuple(plans), width=width, complete=complete)


def coverage(front: ListedFront) -> str:
    """Return one sentence: what is proven of the plans that are not listed."""
    count = f"{len(front.points)} point{'s' * (len(front.points) != 1)}"
    if front.complete:
        return f"{count}, proven to be the whole front"
    if not math.isfinite(front.width):
        return f"{count}; what lies between them is not proven; give a longer --time-limit"
    share = f"{front.width:.2%}"
    return (
        f"{count}; proven: for every plan there is one listed here that is at most {share} slower "
        f"with no more sum omega, or no slower with at most {share} more sum omega; for a finer "
        "list give more --pareto-points or a longer --time-limit"
    )


def _content(front: ListedFront) -> dict[str, object]:
    return {
        "schema": 1,
        "resolution": front.width if math.isfinite(front.width) else None,
        "complete": front.complete,
        "plans": [json.loads(plan.dump_json()) for plan in front.plans],
    }


def _numbered(path: Path, number: int) -> Path:
    """`plan.json` -> `plan.3.json`."""
    return path.with_name(f"{path.stem}.{number}{path.suffix or '.json'}")
