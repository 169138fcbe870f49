"""Is the exact planner ever beaten by a simpler plan? Odd clusters of real size, every method.

    python benchmarks/odd_clusters.py --from 0 --to 150 --time-limit 10
    python benchmarks/odd_clusters.py --from 150 --to 500 --time-limit 2 --ilp-every 5
    python benchmarks/odd_clusters.py --issue-cases      clusters on which it once was
    python benchmarks/odd_clusters.py --scale            up to 128 devices
    python benchmarks/odd_clusters.py --summary          what the rows of this commit say
    python benchmarks/odd_clusters.py --files 17 DIR     files of seed 17, and its command

Problems are seeded (lib/odd_problems.py). Beside `exact` every method runs with the same limit: the
integer program on some, the baselines, the best single device, each precision alone. Values are
theta times sum of omega plus seconds, or seconds under a budget, at the best KV precision.
With --cpu-time limits count CPU seconds: a busy machine then says what an idle one would.

Rows of `results/odd_clusters.jsonl`: value = exact's value over the best other one's; its own
value, bound and gap, whether it is proven, seconds used, the simulator's relative difference and
whether `check` accepts the plan are beside it. A seed that has its row at this commit and limit is
not run again. LLMPQ_ROWS names another folder for rows: parts side by side have one each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.odd_problems import OddProblem, odd_problem, read_case
from lib.rows import RESULTS, commit, write_row
from report.planner_tables import FAR, MARGIN_S, WORSE, summary

from llmpq.errors import BadPlanError, DoesNotFitError
from llmpq.planner.check.check import check_plan
from llmpq.planner.evaluate.objective import job_time, sum_omega, value
from llmpq.planner.evaluate.simulator import replay, reported_time
from llmpq.planner.problem.outcome import BUDGET_ROUNDING, Assignment, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.answer import Answer, answer
from llmpq.planner.solving.methods import SolveOptions
from reference.random_cases import RandomCase

FILE = "odd_clusters.jsonl"
CLUSTERS = Path(__file__).parent / "clusters"
MOST_STEPS = 400_000
"""Steps of stages that a replay walks; longer jobs are replayed with fewer tokens."""
OTHERS = ("heuristic", "adabits", "pipeedge", "uniform")
ISSUE_LIMIT_S = 20.0
B8, B32, LONG = ("--global-bz", "8"), ("--global-bz", "32"), ("--global-bz", "1", "--s", "8192")
ISSUE_CASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("h100-3l4", "llama-3.1-70b", LONG),
    ("h100-3l4", "llama-2-70b", B8),
    ("a100-4v100", "llama-2-70b", B8),
    ("a100-4v100", "llama-2-70b", LONG),
    ("a100-4v100", "llama-3.1-70b", B8),
    ("a100-4v100", "llama-3.1-70b", LONG),
    ("h20-mi300x-l40s", "llama-2-70b", B8),
    ("h20-mi300x-l40s", "llama-2-70b", B32),
    ("h20-mi300x-l40s", "llama-2-70b", LONG),
    ("h20-mi300x-l40s", "llama-3.1-70b", B8),
    ("h20-mi300x-l40s", "llama-3.1-70b", B32),
    ("h20-mi300x-l40s", "llama-3.1-70b", LONG),
    ("eight-nodes-of-one", "llama-2-70b", B32),
    ("two-p40-cpu", "qwen3-8b", ("--global-bz", "256", "--s", "64", "--n", "17")),
)
"""Cluster, model, job (512 tokens, 100 to generate unless said)."""
TWINS = {"eight-nodes-of-one": "two-nodes-of-four"}
"""The same cards and links under other names of nodes: its plan is one of the simpler ones."""
SCALE_CASES: tuple[tuple[str, str, float, float], ...] = (
    ("eight-nodes-two-kinds-64", "llama-3.1-405b", 30.0, 0.01),
    ("eight-kinds-128", "llama-3.1-405b", 60.0, 0.03),
    ("sixteen-nodes-of-one", "llama-2-70b", 30.0, 0.01),
)
"""Cluster, model, seconds, gap to reach."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a method gave: its value, or why there is none."""

    value: float
    seconds: float
    cpu_s: float = 0.0
    """What a busy machine does not stretch much."""
    answer: Answer | None = None
    said: str = ""


def tried(case: RandomCase, method: str, time_limit_s: float, **changes: object) -> Tried:
    """Solve a case by a method, within its budget where the method can keep one."""
    problem = case.priced(case.kvs[0]).with_changes(**changes)
    keeps = method in ("exact", "ilp")
    how = SolveOptions(
        method=method,
        time_limit_s=time_limit_s,
        gap=1e-6,
        backend="highs",
        budget=case.budget if keeps else None,
        kvs=case.kvs,
    )
    start, used = time.perf_counter(), cpu_seconds()
    found: Answer | None = None
    said, worth = "", math.inf
    try:
        found = answer(problem, how, None)
        worth = valued(case, found.problem, found.outcome.assignment)
    except Unfinished:
        said = "no plan in time"
    except DoesNotFitError:
        said = "found no plan"
    seconds, cpu_s = time.perf_counter() - start, cpu_seconds() - used
    return Tried(value=worth, seconds=seconds, cpu_s=cpu_s, answer=found, said=said)


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))


def valued(case: RandomCase, p: Problem, a: Assignment) -> float:
    """Return a plan's value: infinite beyond the budget, where there is one."""
    if case.budget is None:
        return value(p, a)
    if sum_omega(p, a) > case.budget * (1 + BUDGET_ROUNDING):
        return math.inf
    return value(p.with_changes(theta=0.0), a)


def simpler(case: RandomCase, time_limit_s: float, ilp: bool) -> dict[str, Tried]:
    """Return what every other method gives."""
    found = {name: tried(case, name, time_limit_s) for name in (*OTHERS, *["ilp"] * ilp)}
    found["single device"] = tried(case, "exact", time_limit_s, max_devices=1)
    choices = case.problem.choices
    for choice in choices if len(choices) > 1 else ():
        found[choice.value] = tried(case, "exact", time_limit_s, choices=(choice,))
    return found


def replay_differences(found: Answer) -> dict[str, float]:
    """Return (simulated - predicted) / predicted, of fewer tokens where the job is long.

    Predicted: by the plan, and by what the search minimises, which may be another.
    """
    p, a = found.problem, found.outcome.assignment
    _, md = p.counts(a.prefill_microbatch, a.decode_microbatch)
    most = max(3, MOST_STEPS // (md * len(a.stages)))
    work = p.workload.model_copy(update={"gen_len": min(p.workload.gen_len, most)})
    shorter = p.with_changes(workload=work)
    simulated = replay(shorter, a).total_s
    known = {"replay_difference": reported_time, "search_difference": job_time}
    return {name: simulated / time_of(shorter, a).total_s - 1 for name, time_of in known.items()}


def accepted(found: Answer) -> bool:
    """Whether `check` accepts the plan."""
    p = found.problem
    try:
        check_plan(found.plan, spec=p.spec, cluster=p.cluster, costs=p.costs)
    except (BadPlanError, DoesNotFitError) as error:
        sys.stderr.write(f"check: {error}\n")
        return False
    return True


def gap_of(found: Answer) -> float:
    """Return (value - bound) / bound."""
    out = found.outcome
    if out.bound is None or out.bound <= 0:
        return math.inf if out.value > 0 else 0.0
    return max(0.0, (out.value - out.bound) / out.bound)


def compare(
    case: RandomCase, time_limit_s: float, others: Mapping[str, Tried], key: Mapping[str, Any]
) -> dict[str, Any]:
    """Solve a case by `exact` and write the row of it beside the others."""
    exact = tried(case, "exact", time_limit_s)
    best = min(others, key=lambda name: others[name].value, default="")
    other = others[best].value if best else math.inf
    ratio = 1.0 if math.isinf(other) else exact.value / other
    found = exact.answer
    measured: dict[str, float] = {"seconds": exact.seconds, "cpu_s": exact.cpu_s}
    if found is not None:
        out = found.outcome
        measured |= {
            "exact": exact.value,
            "proven": float(out.status == "optimal"),
            **replay_differences(found),
            "checked": float(accepted(found)),
        }
        if out.bound is not None:
            measured |= {"bound": out.bound, "gap": gap_of(found)}
    plans = {name: t.value for name, t in others.items() if math.isfinite(t.value)}
    late = {
        f"{name} seconds": t.seconds
        for name, t in {**others, "exact": exact}.items()
        if t.seconds > time_limit_s + MARGIN_S
    }
    row = write_row(
        FILE,
        bench="odd_clusters",
        case={
            **key,
            "limit_s": time_limit_s,
            "clock": "CPU" if time.perf_counter is cpu_seconds else "wall",
            "best_other": best,
            "said": exact.said,
        },
        unit="x",
        samples=[ratio if math.isfinite(ratio) else 1e9],
        noisy=os.getloadavg()[0] > (os.cpu_count() or 1),
        baselines={**measured, **plans, **late},
    )
    tell(row)
    return row


def tell(row: Mapping[str, Any]) -> None:
    """Print one line of a row."""
    case, base = row["case"], row["baselines"]
    worse = "  WORSE" if row["value"] > 1 + WORSE else ""
    late = "  LATE" if base["seconds"] > case["limit_s"] + MARGIN_S else ""
    bound = f", gap {base['gap']:.2%}" if "gap" in base else ", no bound"
    wrong = "" if base.get("checked", 1.0) else "  CHECK"
    far = "  REPLAY" if abs(base.get("replay_difference", 0.0)) > FAR else ""
    far += "  ROUGH" if abs(base.get("search_difference", 0.0)) > FAR else ""
    flags = f"{worse}{late}{wrong}{far}"
    print(
        f"{case['name']}: {row['value']:.6f}x of {case['best_other'] or 'nothing'}{bound}, "
        f"{base['seconds']:.1f} s ({base['cpu_s']:.1f} CPU) {case['said']}{flags}",
        flush=True,
    )


def key_of(found: OddProblem) -> dict[str, Any]:
    """Return what a row says of a seeded problem."""
    case = found.case()
    kinds = [device.kind for device in case.problem.cluster.devices]
    return {
        "name": f"seed {found.seed}",
        "seed": found.seed,
        "devices": ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds)),
        "nodes": len(case.problem.cluster.nodes),
        "model": found.model,
        "flags": " ".join(found.flags),
    }


def rows_of(now: str) -> list[dict[str, Any]]:
    """Return the rows of a commit."""
    path = RESULTS / FILE
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["commit"] == now]


def run_seeds(first: int, last: int, time_limit_s: float, ilp_every: int) -> None:
    """Run a range of seeds, leaving out those that have their row."""
    done = {(r["case"].get("seed"), r["case"]["limit_s"]) for r in rows_of(commit())}
    for seed in range(first, last):
        if (seed, time_limit_s) not in done:
            found = odd_problem(seed)
            ilp = bool(ilp_every) and seed % ilp_every == 0
            others = simpler(found.case(), time_limit_s, ilp)
            compare(found.case(), time_limit_s, others, key_of(found))


def run_issue_cases() -> None:
    """Plan the clusters on which a simpler plan was better."""
    for cluster, model, job in ISSUE_CASES:
        case = read_case(words(cluster, model, job))
        others = simpler(case, ISSUE_LIMIT_S, ilp=False)
        if cluster in TWINS:
            twin = read_case(words(TWINS[cluster], model, job))
            others["named otherwise"] = tried(twin, "exact", ISSUE_LIMIT_S)
        key = {"name": f"{cluster}, {model}, {' '.join(job)}", "model": model, "part": "issue"}
        compare(case, ISSUE_LIMIT_S, others, key)


def run_scale() -> None:
    """Plan clusters of many devices; the gap is to be small in the time given."""
    for cluster, model, limit_s, wanted in SCALE_CASES:
        case = read_case(words(cluster, model, B32))
        others = {name: tried(case, name, limit_s) for name in ("pipeedge", "adabits", "uniform")}
        key = {"name": cluster, "model": model, "part": "scale", "wanted_gap": wanted}
        compare(case, limit_s, others, key)


def words(cluster: str, model: str, job: Sequence[str]) -> list[str]:
    """Return the command of a case of ours."""
    return ["--cluster", str(CLUSTERS / f"{cluster}.yaml"), "--model", model, *job]


def main() -> None:
    """Run what the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", type=int, default=0, help="first seed not run")
    parser.add_argument("--time-limit", type=float, default=10.0, help="of every method")
    parser.add_argument("--ilp-every", type=int, default=0, help="the integer program on 1 in N")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="limits count CPU seconds of one process: for a busy machine",
    )
    parser.add_argument("--issue-cases", action="store_true")
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument(
        "--files", nargs=2, metavar=("SEED", "DIR"), help="write a problem, run nothing"
    )
    args = parser.parse_args()
    if args.files:
        folder = Path(args.files[1])
        folder.mkdir(parents=True, exist_ok=True)
        print("llmpq-algo", shlex.join(odd_problem(int(args.files[0])).write(folder)))
        return
    if args.cpu_time:
        time.perf_counter = cpu_seconds  # what every limit of the planner goes by
    if args.issue_cases:
        run_issue_cases()
    if args.scale:
        run_scale()
    run_seeds(args.first, args.to, args.time_limit, args.ilp_every)
    if args.summary:
        print(summary([r for r in rows_of(commit()) if "seed" in r["case"]]))


if __name__ == "__main__":
    main()
