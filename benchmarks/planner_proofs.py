"""Tries to catch the exact planner out, on seeded problems; rows go to results/planner.jsonl.

    python benchmarks/planner_proofs.py same --from 0 --to 5000      exact = brute force
    python benchmarks/planner_proofs.py stopped --from 0 --to 2000   no bound above the optimum
    python benchmarks/planner_proofs.py more --from 0 --to 300       more to choose from is no worse
    python benchmarks/planner_proofs.py topologies --from 0 --to 2000   engines, shared stages

`same` and `stopped` draw small problems (reference/random_cases.py) and value every plan there
is; `stopped` ends the search at a random moment. `more` takes problems of real size
(lib/odd_problems.py) and adds a device, memory, or a precision: where both are proven the
larger problem's plan must not be slower beyond the gap, else it must be within its own stated gap
of the smaller problem's value. `topologies` values all groupings of two or three cards into engines
and shared stages (reference/all_topologies.py) beside the answer of the command, whose certificate
must be accepted, and refused with one number or word of it or of the plan changed.

One row a block of seeds: `planner_proofs`, value = cases that failed, each on stderr with its
seed. A block that has its row at this commit is not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lib.odd_problems import larger_pair
from lib.rows import RESULTS, commit, write_row

from llmpq.errors import DoesNotFitError, LlmpqError
from llmpq.planner.check.verify import Refused, verify
from llmpq.planner.cli.certificates import (
    certificate_path,
    write_certificate,
    write_topology_certificate,
)
from llmpq.planner.cli.show_plan import best_answer
from llmpq.planner.evaluate.simulator import replay
from llmpq.planner.problem.outcome import Unfinished
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.answer import Answer, answer
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.topology_search import TOPOLOGY_GAP
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from reference.all_plans import best_of_all
from reference.all_topologies import best_topology_of_all, shared_problem
from reference.random_cases import RandomCase, random_case

FILE = "planner.jsonl"
BLOCKS = {"same": 250, "stopped": 250, "more": 25, "topologies": 100}
SAME = 1e-6
"""Relative difference up to which two objectives are equal."""
ROUNDING = 1e-9
"""Relative difference up to which a bound counts as at most the optimum."""


@dataclass(kw_only=True)
class Tally:
    """What one case showed."""

    failures: list[str] = field(default_factory=list)
    compared: int = 0
    """1 if there was a plan to compare."""
    proven: int = 0
    seconds: float = 0.0


def options_of(case: RandomCase, time_limit_s: float) -> SolveOptions:
    """Return how the command would solve a case."""
    return SolveOptions(
        method="exact",
        time_limit_s=time_limit_s,
        gap=1e-9,
        backend="highs",
        budget=case.budget,
        kvs=case.kvs,
    )


def solved(case: RandomCase, time_limit_s: float) -> Answer | str:
    """Return the plan of the command, or the words it says instead."""
    problem = case.priced(case.kvs[0])
    try:
        return answer(problem, options_of(case, time_limit_s), None)
    except Unfinished:
        return "unfinished"
    except DoesNotFitError:
        return "infeasible"
    except (ValueError, LlmpqError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def optimum(case: RandomCase) -> float:
    """Return the least objective of all plans at every KV precision."""
    return min(best_of_all(case.priced(kv), case.budget)[0] for kv in case.kvs)


def same(seed: int, _: float) -> Tally:
    """Compare value, bound and proof with brute force, and the plan with the simulator."""
    tally, case = Tally(), random_case(seed)
    best, start = optimum(case), time.perf_counter()
    found = solved(case, 120.0)
    tally.seconds = time.perf_counter() - start
    if isinstance(found, str):
        if found != "infeasible" or math.isfinite(best):
            tally.failures.append(f"says {found}, the optimum is {best:.9g}")
        return tally
    tally.compared, out = 1, found.outcome
    if abs(out.value - best) > SAME * best:
        tally.failures.append(f"value {out.value:.9g}, the optimum is {best:.9g}")
    if out.bound is None or out.bound > best * (1 + ROUNDING):
        tally.failures.append(f"bound {out.bound}, the optimum is {best:.9g}")
    tally.proven = int(out.status == "optimal")
    if not tally.proven:
        tally.failures.append(f"not proven: gap {out.gap}, {out.note}")
    tally.failures += replayed(found)
    return tally


def replayed(found: Answer) -> list[str]:
    """Return what the simulator says against a plan's time, if that is over 0.5 % away."""
    predicted = found.plan.predicted
    assert predicted is not None, "the planner always predicts"
    seconds = replay(found.problem, found.outcome.assignment).total_s
    if abs(seconds - predicted.total_s) > 0.005 * predicted.total_s:
        return [f"simulated {seconds:.9g} s, predicted {predicted.total_s:.9g} s"]
    return []


def stopped(seed: int, _: float) -> Tally:
    """Stop the search at a random moment of what it takes."""
    tally, case = Tally(), random_case(seed)
    best, rng = optimum(case), random.Random(seed)
    start = time.perf_counter()
    solved(case, 120.0)
    whole = time.perf_counter() - start
    start = time.perf_counter()
    found = solved(case, rng.choice([0.0, 1e-3, rng.random() * whole, rng.random() * whole]))
    tally.seconds = time.perf_counter() - start
    if isinstance(found, str):
        if found != "unfinished" and (found != "infeasible" or math.isfinite(best)):
            tally.failures.append(f"says {found}, the optimum is {best:.9g}")
        return tally
    tally.compared, out = 1, found.outcome
    tally.proven = int(out.status == "optimal")
    if out.value < best * (1 - SAME):
        tally.failures.append(f"value {out.value:.9g} below the optimum {best:.9g}")
    if out.bound is not None and out.bound > best * (1 + ROUNDING):
        tally.failures.append(f"bound {out.bound:.9g} above the optimum {best:.9g}")
    return tally


def more(seed: int, time_limit_s: float) -> Tally:
    """Add a device, memory or a precision."""
    tally = Tally()
    less, with_more, what = larger_pair(seed)
    start = time.perf_counter()
    small, large = solved(less, time_limit_s), solved(with_more, time_limit_s)
    tally.seconds = time.perf_counter() - start
    if isinstance(small, str):
        return tally
    if isinstance(large, str):
        tally.failures.append(f"{what}: says {large}, the smaller problem has a plan")
        return tally
    tally.compared, one, two = 1, small.outcome, large.outcome
    tally.proven = int(one.status == two.status == "optimal")
    gap = 2e-6 if tally.proven else (two.gap if two.gap is not None else math.inf)
    if two.value > one.value * (1 + gap + ROUNDING):
        tally.failures.append(
            f"{what}: {two.value:.9g} (gap {two.gap}), before {one.value:.9g} (gap {one.gap})"
        )
    return tally


def topologies(seed: int, _: float) -> Tally:
    """Compare the command's answer with brute force; check its certificate, and a changed one."""
    tally, p = Tally(), shared_problem(seed)
    # One card runs rows in waves only where it has no room for all of them at once.
    alone = len(p.cluster.devices) == 1
    best = best_of_all(p, None)[0] if alone else math.inf
    best = best if math.isfinite(best) else best_topology_of_all(p)
    request, options = PlanRequest(model=p.spec.name), SolveOptions(gap=1e-9, kvs=(p.kv,))
    start = time.perf_counter()
    try:
        pipeline, found = best_answer(request, p, options, None)
    except DoesNotFitError as error:
        if math.isfinite(best):
            tally.failures.append(f"says {error}, the optimum is {best:.9g}")
        return tally
    tally.compared, value, bound = 1, pipeline.outcome.value, pipeline.outcome.bound or 0.0
    plan: Plan | Topology = pipeline.plan
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/plan.json"
        if found is not None and found.topology is not None:
            value, bound, plan = found.found.value, found.found.bound, found.topology
            if found.single is not None:
                plan = found.single.plan
                write_certificate(path, found.single, options)
            else:
                write_topology_certificate(path, plan, found, p, options, None)
        else:
            bound = bound if found is None else found.found.bound
            write_certificate(path, pipeline, options)
        made = json.loads(certificate_path(path).read_text())
    tally.seconds = time.perf_counter() - start
    if not best * (1 - SAME) <= value <= best * (1 + TOPOLOGY_GAP + SAME):
        tally.failures.append(f"value {value:.9g}, the optimum is {best:.9g}")
    if bound > best * (1 + ROUNDING):
        tally.failures.append(f"bound {bound:.9g}, the optimum is {best:.9g}")
    tally.proven = int(bound >= value * (1 - TOPOLOGY_GAP - SAME))
    pair = json.loads(plan.dump_json()), made
    try:
        verify(*pair)
    except Refused as error:
        tally.failures.append(f"certificate: {error}")
    try:
        verify(*changed(random.Random(seed), pair))
    except (Refused, LookupError, TypeError, ValueError):
        return tally
    tally.failures.append("a changed plan or certificate is accepted")
    return tally


def changed(rng: random.Random, pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a plan and its certificate with one value of either changed."""
    whole = copy.deepcopy(pair)
    inner, key = rng.choice(list(_leaves(rng.choice(whole))))
    value = inner[key]
    if isinstance(value, bool):
        inner[key] = not value
    elif isinstance(value, int):
        inner[key] = value + rng.choice([-1, 1, 7])
    elif isinstance(value, float):
        inner[key] = value * rng.choice([0.5, 0.999, 1.001, 2.0]) + 1e-9
    else:
        inner[key] = f"{value}x"
    return whole


def _leaves(data: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(inner, dict | list):
            yield from _leaves(inner)
        else:
            yield data, key


PARTS: dict[str, Callable[[int, float], Tally]] = {
    "same": same,
    "stopped": stopped,
    "more": more,
    "topologies": topologies,
}


def run_block(part: str, low: int, high: int, time_limit_s: float) -> int:
    """Run the seeds of one block and write its row; return how many failed."""
    failed = compared = proven = 0
    seconds: list[float] = []
    for seed in range(low, high):
        tally = PARTS[part](seed, time_limit_s)
        for text in tally.failures:
            sys.stderr.write(f"{part} {seed}: {text}\n")
        failed += bool(tally.failures)
        compared, proven = compared + tally.compared, proven + tally.proven
        seconds.append(tally.seconds)
    write_row(
        FILE,
        bench="planner_proofs",
        case=case_of(part, low, high),
        unit="1",
        samples=[failed],
        baselines={"compared": compared, "proven": proven, "seconds": sum(seconds)},
    )
    print(f"{part} {low}-{high - 1}: {failed} failed, {compared} compared, {proven} proven")
    return failed


def case_of(part: str, low: int, high: int) -> dict[str, str]:
    """Return the case of a block's row."""
    return {"part": part, "seeds": f"{low}-{high - 1}"}


def done_at_this_commit() -> list[dict[str, str]]:
    """Return the cases of the rows there are for this commit."""
    path, now = RESULTS / FILE, commit()
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [r["case"] for r in rows if r["bench"] == "planner_proofs" and r["commit"] == now]


def main() -> None:
    """Run one part over a range of seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", type=int, default=100, help="first seed not run")
    parser.add_argument("--time-limit", type=float, default=5.0, help="of `more`, a problem")
    args = parser.parse_args()
    done, failed, size = done_at_this_commit(), 0, BLOCKS[args.part]
    for low in range(args.first, args.to, size):
        high = min(low + size, args.to)
        if case_of(args.part, low, high) not in done:
            failed += run_block(args.part, low, high, args.time_limit)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
