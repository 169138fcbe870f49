"""What finds good plans: each part of the exact method's start switched off, on odd clusters.

    python benchmarks/planner_ablation.py --from 150 --to 300                  nothing off: the base
    python benchmarks/planner_ablation.py --from 150 --to 300 --off walk       without a part
    python benchmarks/planner_ablation.py --paper --scale --off walk,methods  two off
    python benchmarks/planner_ablation.py --summary                            the table of all rows

Limits count CPU seconds of this process, which solves in place: a busy machine says about what a
quiet one would. Rows of `results/planner_ablation.jsonl`: value = the plan's value; its bound, CPU
seconds and whether it is proven are beside it. A case that has its row (same parts off, same limit)
is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from lib.odd_problems import odd_problem, read_case
from lib.paper_clusters import MODELS, cluster_flags
from lib.rows import RESULTS, write_row
from odd_clusters import B32, SCALE_CASES, valued, words
from report.planner_tables import AblationTable

from llmpq.errors import DoesNotFitError
from llmpq.planner.exact import search
from llmpq.planner.exact.start import improve, walk
from llmpq.planner.problem.outcome import Assignment, Unfinished
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import search_plan
from reference.random_cases import RandomCase

FILE = "planner_ablation.jsonl"
PAPER_LIMIT_S = 30.0
SCALE_SHARE = 0.5
"""Share of its usual limit that a case of many devices has."""


def without_improve() -> None:
    """No small changes of boundaries, precisions, devices and sizes."""

    def offered(incumbent: Any, tables: Any, start: Assignment, deadline: float) -> Assignment:
        incumbent.offer(start)
        return start

    for module in (search, walk, improve):
        module.improved = offered  # type: ignore[attr-defined]


def without_walk_at_the_start() -> None:
    """No walk among plans of one precision a stage before the search."""
    whole = walk.Walk.from_each

    def only_at_the_end(self: Any, starts: Any, deadline: float, futile: int = walk.FUTILE) -> None:
        if futile == walk.PATIENT:
            whole(self, starts, deadline, futile)

    walk.Walk.from_each = only_at_the_end  # type: ignore[method-assign]


def nothing(*_: object, **__: object) -> None:
    """Stand for a part that is off."""


def no_plans(*_: object, **__: object) -> Iterator[Assignment]:
    """Stand for a part that makes plans."""
    return iter(())


def put(module: Any, name: str, value: Any) -> Callable[[], None]:
    """Return what replaces a name of a module."""
    return lambda: setattr(module, name, value)


PARTS: dict[str, Callable[[], None]] = {
    "methods": put(walk, "other_methods", no_plans),
    "walk": put(walk.Walk, "from_each", nothing),
    "walk at the start": without_walk_at_the_start,
    "improve": without_improve,
    "greedy": put(search, "greedy_plan", nothing),
    "quick pass": put(search.Search, "quick_pass", lambda self, known=None: -math.inf),
    "begin": put(search.Search, "begin", nothing),
}
"""What may be switched off, one or several."""


def cases(args: argparse.Namespace) -> Iterator[tuple[str, RandomCase, float]]:
    """Yield what is planned: name, problem, CPU seconds."""
    for number in MODELS if args.paper else ():
        yield f"paper {number}", read_case(cluster_flags(number, "makespan")), PAPER_LIMIT_S
    for cluster, model, limit_s, _ in SCALE_CASES if args.scale else ():
        case = read_case(words(cluster, model, B32))
        yield f"scale {cluster}", case, SCALE_SHARE * limit_s
    for seed in range(args.first, args.to, args.step):
        yield f"seed {seed}", odd_problem(seed).case(), args.time_limit


def planned(case: RandomCase, limit_s: float) -> tuple[float, dict[str, float]]:
    """Return a plan's value, infinite without one, and what is known of it."""
    options = SolveOptions(time_limit_s=limit_s, budget=case.budget, kvs=case.kvs)
    start = time.perf_counter()
    try:
        found = search_plan(case.priced(case.kvs[0]), options)
    except Unfinished as error:
        return math.inf, {"bound": error.bound, "cpu_s": time.perf_counter() - start}
    except DoesNotFitError:
        return math.inf, {"cpu_s": time.perf_counter() - start}
    known = {"cpu_s": time.perf_counter() - start}
    known["proven"] = float(found.outcome.status == "optimal")
    if found.outcome.bound is not None:
        known["bound"] = found.outcome.bound
    return valued(case, found.problem, found.outcome.assignment), known


def main() -> None:
    """Run what the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", type=int, default=0, help="first seed not run")
    parser.add_argument("--step", type=int, default=1, help="every so many seeds")
    parser.add_argument("--time-limit", type=float, default=2.0, help="CPU seconds")
    parser.add_argument("--off", default="", help=f"of {', '.join(PARTS)}; several by comma")
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--summary", action="store_true")
    args = parser.parse_args()
    time.perf_counter = time.process_time  # what every limit of the planner goes by
    for part in filter(None, args.off.split(",")):
        PARTS[part]()
    path = RESULTS / FILE
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["case"]["name"], row["case"]["off"], row["case"]["limit_s"]) for row in rows}
    for name, case, limit_s in cases(args):
        if (name, args.off, limit_s) in done:
            continue
        value, known = planned(case, limit_s)
        row = write_row(
            FILE,
            bench="planner_ablation",
            case={"name": name, "off": args.off, "limit_s": limit_s},
            unit="s",
            samples=[value if math.isfinite(value) else 1e9],
            baselines=known,
        )
        print(f"{name}: {row['value']:.6g}, {known}", flush=True)
    if args.summary:
        print(AblationTable().render())


if __name__ == "__main__":
    main()
