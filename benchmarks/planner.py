"""Times and compares the planner on the paper's clusters; rows go to results/planner.jsonl.

    python benchmarks/planner.py times     whole commands, 11 clusters, both objectives
    python benchmarks/planner.py times --against DIR    beside another checkout, in turn
    python benchmarks/planner.py methods   every method's plan on every cluster, scored alike
    python benchmarks/planner.py scale     clusters larger than the paper's
    python benchmarks/planner.py real      predicted against measured time of four real plans
    python benchmarks/planner.py random    exact against the integer program on random problems

Rows: `planner` seconds of a whole command (process start included), `planner_gap` its proven gap,
`planner_against` its seconds over another tree's, `planner_ratio` a method's objective (simulated
time + theta * sum omega) over exact's.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib.paper_clusters import MODELS, cluster_flags
from lib.rows import write_row

from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.evaluate.objective import (
    StageTimes,
    makespan,
    sum_omega,
)
from llmpq.planner.evaluate.simulator import replay
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.ilp.flexgen import estimate_flexgen
from llmpq.planner.ilp.solve import solve_ilp
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.outcome import Infeasible, Outcome
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.methods import PLANNERS, SolveOptions, solve
from reference.published_time import published_code_time
from reference.random_problems import random_problem

ROOT = Path(__file__).resolve().parents[1]
FILE = "planner.jsonl"
PAPER_SECONDS = {
    1: 0.30, 2: 0.30, 3: 2.78, 4: 2.29, 5: 9.92, 6: 115.98, 7: 44.30, 8: 19.32, 9: 1.16, 10: 2.46,
    11: 3.40,
}  # fmt: skip
"""The paper's table 10: Gurobi, its own pruned search."""
SCALE = {
    "16 x 2 kinds": ("T4 V100", "8 8", "bloom 176b"),
    "16 x 2 kinds (V100, A100)": ("V100 A100-40GB", "8 8", "bloom 176b"),
    "12 x 4 kinds": ("T4 P100 V100 A100-40GB", "3 3 3 3", "opt 66b"),
    "12 x 4 kinds, 176b": ("T4 P100 V100 A100-40GB", "3 3 3 3", "bloom 176b"),
    "64 x 8 kinds, 126 layers": (
        "T4 P100-16GB V100-16GB V100 A10 A100-40GB A100-80GB L4",
        "8 8 8 8 8 8 8 8",
        "llama 3.1-405b",
    ),
}


def scale_flags(case: str) -> list[str]:
    """Return the command for a large cluster."""
    names, numbers, model = SCALE[case]
    name, size = model.split()
    flags = f"--device-names {names} --device-numbers {numbers} --model-name {name} "
    flags += (
        f"--model-size {size} --global_bz 32 --s 512 --n 100 --theta 1 --bits 16,8,4,3 --gap 0.02"
    )
    omega = ROOT / "clusters" / "paper" / f"omega-{name}-{size}.json"
    return flags.split() + (["--omega-file", str(omega)] if omega.exists() else [])


def run_command(
    flags: list[str], repeats: int, root: Path = ROOT
) -> tuple[list[float], list[float], dict[str, float]]:
    """Run a tree's `llmpq-algo` in its own process; return wall and CPU seconds, solver report."""
    seconds, cpu = [], []
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second start reads bytecode
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "llmpq.planner", *flags, "--engines", "1", "-o", str(plan)]
        for _ in range(repeats):
            start, used = time.perf_counter(), cpu_seconds()
            subprocess.run(
                command, cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL
            )
            seconds.append(time.perf_counter() - start)
            cpu.append(cpu_seconds() - used)
        return seconds, cpu, json.loads(plan.read_text())["solver"]


def cpu_seconds() -> float:
    """Return the CPU time of all finished children: what a busy machine does not stretch much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bench_times(repeats: int, noisy: bool) -> None:
    """Time the whole command on every paper cluster."""
    for objective in ("paper", "makespan"):
        medians, gaps = [], []
        for number in MODELS:
            seconds, cpu, solver = run_command(cluster_flags(number, objective), repeats)
            case = {"cluster": f"{number:02d}", "objective": objective, "method": "exact"}
            paper = {"paper_table_10": PAPER_SECONDS[number], "cpu_s": statistics.median(cpu)}
            row = write_row(
                FILE,
                bench="planner",
                case=case,
                unit="s",
                samples=seconds,
                baselines=paper,
                noisy=noisy,
            )
            write_row(FILE, bench="planner_gap", case=case, unit="1", samples=[solver["gap"]])
            medians.append(row["value"])
            gaps.append(solver["gap"])
            used = statistics.median(cpu)
            print(
                f"{number:02d} {objective:8s} {row['value']:.2f} s ({used:.2f} s CPU), "
                f"gap {solver['gap']:.1e}"
            )
        mean = sum(medians) / len(medians)
        print(f"{objective}: mean {mean:.2f} s, max {max(medians):.2f} s, gap <= {max(gaps):.1e}")


def bench_against(other: Path, repeats: int, noisy: bool) -> None:
    """Time the commands of this tree and of another in turn, so that both meet the same load."""
    for objective in ("paper", "makespan"):
        for number in MODELS:
            flags = cluster_flags(number, objective)
            ours: list[float] = []
            theirs: list[float] = []
            cpu: list[tuple[float, float]] = []
            for _ in range(repeats):
                new, new_cpu, solver = run_command(flags, 1)
                old, old_cpu, before = run_command(flags, 1, other)
                ours, theirs = ours + new, theirs + old
                cpu.append((new_cpu[0], old_cpu[0]))
            case = {"cluster": f"{number:02d}", "objective": objective, "method": "exact"}
            row = write_row(
                FILE,
                bench="planner_against",
                case={**case, "other": described(other)},
                unit="x",
                samples=[one / two for one, two in zip(ours, theirs, strict=True)],
                baselines={
                    "seconds": statistics.median(ours),
                    "other_seconds": statistics.median(theirs),
                    "cpu_s": statistics.median(one for one, _ in cpu),
                    "other_cpu_s": statistics.median(two for _, two in cpu),
                    "value": solver["value"],
                    "other_value": before["value"],
                },
                noisy=noisy,
            )
            base = row["baselines"]
            print(
                f"{number:02d} {objective:8s} {row['value']:.2f}x: {base['seconds']:.2f} s, before "
                f"{base['other_seconds']:.2f}; CPU {base['cpu_s']:.2f}, {base['other_cpu_s']:.2f}; "
                f"value {solver['value']:.9g}, {before['value']:.9g}",
                flush=True,
            )


def described(tree: Path) -> str:
    """Return the commit of another tree."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout[:-1]


def bench_scale(repeats: int, noisy: bool) -> None:
    """Time the whole command on larger clusters, corrected objective."""
    for name in SCALE:
        seconds, cpu, solver = run_command(scale_flags(name), repeats)
        case = {"cluster": name, "objective": "makespan", "method": "exact"}
        write_row(
            FILE,
            bench="planner",
            case=case,
            unit="s",
            samples=seconds,
            baselines={"cpu_s": statistics.median(cpu)},
            noisy=noisy,
        )
        write_row(FILE, bench="planner_gap", case=case, unit="1", samples=[solver["gap"]])
        print(f"{name}: {min(seconds):.2f}-{max(seconds):.2f} s, gap {solver['gap']:.2%}")


def true_value(p: Problem, outcome: Outcome) -> float:
    """Return simulated time plus theta times sum of omega."""
    a = outcome.assignment
    return replay(p, a).total_s + p.theta * sum_omega(p, a)


def bench_methods(time_limit_s: float) -> None:
    """Score every method's plan by the simulator, against exact's."""
    worst = 0.0
    for number in MODELS:
        p, _, _ = make_problem(plan_request(cluster_flags(number, "makespan")))
        exact = 0.0
        for method in PLANNERS:
            case = {"cluster": f"{number:02d}", "objective": "makespan", "method": method}
            try:
                outcome = solve(p, SolveOptions(method=method, time_limit_s=time_limit_s))
            except Infeasible:
                print(f"{number:02d} {method:9s} found no plan")
                continue
            score = true_value(p, outcome)
            exact = score if method == "exact" else exact
            worst = max(worst, exact / score - 1)
            write_row(
                FILE,
                bench="planner_ratio",
                case=case,
                unit="x",
                samples=[score / exact],
                baselines={"exact_objective": exact, "seconds": outcome.seconds},
            )
            print(f"{number:02d} {method:9s} {score / exact:.4f}x in {outcome.seconds:.2f} s")
        offload = estimate_flexgen(p).total_s
        case = {"cluster": f"{number:02d}", "objective": "makespan", "method": "flexgen"}
        base = {"exact_objective": exact}
        write_row(
            FILE,
            bench="planner_ratio",
            case=case,
            unit="x",
            samples=[offload / exact],
            baselines=base,
        )
    print(f"exact is at most {worst:.3%} above any other method's plan (0.1 % allowed)")


def bench_real(path: Path) -> None:
    """Predict the four real plans on cluster 3 from their measured stage times."""
    for row in csv.DictReader(path.read_text().splitlines()):
        if not row["measured_e2e_s"]:
            continue
        prefill, decode = (
            tuple(float(row[f"{phase}_stage{j}_ms"]) / 1e3 for j in range(4))
            for phase in ("prefill", "decode")
        )
        t = StageTimes(prefill_s=prefill, decode_s=decode)
        mp, md = int(row["prefill_microbatches"]), int(row["decode_microbatches"])
        measured = float(row["measured_e2e_s"])
        ours = makespan(t, mp=mp, md=md, n=100).total_s
        paper = published_code_time(t, mp=mp, md=md, n=100).total_s
        write_row(
            FILE,
            bench="planner_real",
            case={"cluster": "03", "plan": row["plan"]},
            unit="s",
            samples=[measured],
            predicted=ours,
            baselines={"paper_formula": paper},
            device="3 x T4 + V100, measured by the LLM-PQ authors",
        )
        print(
            f"{row['plan']:12s} measured {measured:7.2f} s, predicted {ours:7.2f} "
            f"({ours / measured - 1:+.1%}), paper's formula {paper:7.2f} "
            f"({paper / measured - 1:+.1%})"
        )


def bench_random(count: int) -> None:
    """Compare exact and the integer program on random problems."""
    differences = 0
    for seed in range(count):
        rng = random.Random(seed)
        objective = rng.choice(["makespan", "paper"])
        p = random_problem(rng, objective=objective, layers=(4, 9), devices=(1, 2))
        values = []
        for solver in (solve_exact, solve_ilp):
            try:
                values.append(solver(p, gap=1e-9).value)
            except Infeasible:
                values.append(float("inf"))
        same = values[0] == values[1] or abs(values[0] - values[1]) <= 1e-6 * values[0]
        differences += not same
    case = {"cluster": "random", "objective": "both", "method": "exact = ilp"}
    write_row(FILE, bench="planner_differences", case=case, unit="1", samples=[differences])
    print(f"{differences} differences in {count} random problems")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("times", "methods", "scale", "real", "random"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=60.0, help="of each method")
    parser.add_argument("--count", type=int, default=500, help="random problems")
    parser.add_argument("--noisy", action="store_true", help="the machine was busy: mark the rows")
    parser.add_argument("--against", type=Path, help="another checkout, for `times`")
    validation = ROOT / "benchmarks" / "data" / "llmpq_cluster3_e2e_validation.csv"
    parser.add_argument("--measured", type=Path, default=validation, help="CSV of stage times")
    args = parser.parse_args()
    if args.against is not None:
        bench_against(args.against.resolve(), args.repeats, args.noisy)
    elif args.part == "times":
        bench_times(args.repeats, args.noisy)
    elif args.part == "scale":
        bench_scale(args.repeats, args.noisy)
    elif args.part == "methods":
        bench_methods(args.time_limit)
    elif args.part == "real":
        bench_real(args.measured)
    else:
        bench_random(args.count)


if __name__ == "__main__":
    main()
