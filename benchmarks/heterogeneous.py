"""Unequal GPUs, emulated on equal ones: the exact plan against other planners', same runtime.

    python benchmarks/heterogeneous.py plan --costs costs.json --out DIR CLUSTER.yaml ...
    python benchmarks/heterogeneous.py run DIR/*.json --rows out.jsonl

`plan` needs no GPU. Every baseline keeps its stages and gets the micro-batches that are best for
them. `exact` is the fastest plan whose sum of omega is at most that of the `pipeedge` plan, over
the KV precisions of `--kv`; `exact-kv16` the same with the baselines' 16-bit KV cache.

`run` needs as many GPUs as the plans have stages; weights are random, made on the devices, so that
any size can be timed. Rows: `e2e` (output tokens a second), `fidelity` (seconds, beside those
predicted) and, per cluster, `heterogeneous` (the exact plans' tokens a second beside the others';
`sum` writes them from the rows of a run that was cut). A plan that fails is reported and the others
are run; the exit code is then 8.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lib.heterogeneous_plans import make_plans

from llmpq.errors import ExitCode, LlmpqError
from llmpq.plans.plan import Plan

WARM_UP_TOKENS = 3
OURS = ("exact", "exact-kv16")

log = logging.getLogger("heterogeneous")


def main() -> int:
    """Run one part; return the exit code, with one sentence where it is not 0."""
    args = make_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        return run_part(args)
    except (LlmpqError, ValueError, OSError) as error:
        log.error("%s", error)
        return int(getattr(error, "exit_code", ExitCode.USAGE))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    planning = parts.add_parser("plan", help="make the plans")
    planning.add_argument("clusters", nargs="+", type=Path, metavar="CLUSTER.yaml")
    planning.add_argument("--costs", required=True, help="costs.json of llmpq-profile")
    planning.add_argument("--out", required=True, type=Path, metavar="DIR")
    planning.add_argument("--batch", type=int, default=32)
    planning.add_argument("--prompt", type=int, default=512)
    planning.add_argument("--gen", type=int, default=100)
    planning.add_argument("--bits", default="16,8,4,3", help="precisions to choose from")
    planning.add_argument("--kv", default="16,8,4", help="KV bits the exact plan may choose from")
    planning.add_argument("--time-limit", type=float, default=60.0, help="of each search")
    running = parts.add_parser("run", help="measure them")
    running.add_argument("plans", nargs="+", type=Path, metavar="PLAN.json")
    running.add_argument("--repeat", type=int, default=2)
    running.add_argument("--rows", type=Path, required=True, help="file the rows are appended to")
    running.add_argument("--commit")
    running.add_argument("--baseline", action="append", default=[], metavar="MODEL:NAME=VALUE",
                         help="tokens/s of another engine on the same job, whole GPUs")  # fmt: skip
    running.add_argument("--gpus", help="GPU of each stage: 0,0 (default 0,1,...)")
    running.add_argument("--limit", type=float, default=120.0, help="seconds of a load or a job")
    running.add_argument("--time-limit", type=float, default=1e9, help="load no plans after it")
    running.add_argument("--together", type=int, default=1,
                         help="plans of a cluster to load at once; they run in turn")  # fmt: skip
    running.add_argument("--links", default="auto", choices=("auto", "peer", "nccl", "gloo"))
    summing = parts.add_parser("sum", help="write the `heterogeneous` rows of a file of rows")
    summing.add_argument("rows", type=Path)
    return parser


def run_part(args: argparse.Namespace) -> int:
    """Plan, measure or sum up; return the exit code."""
    if args.part == "plan":
        make_plans(args)
    elif args.part == "sum":
        sum_up(args.rows)
    else:
        args.started_s = time.perf_counter()
        failed = measure(args)
        if failed:
            log.error("%d of %d plans failed: %s", len(failed), len(args.plans), ", ".join(failed))
            return int(ExitCode.SOME_ROWS_FAILED)
    return int(ExitCode.DONE)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a plan took, job by job."""

    total_s: list[float]
    prefill_s: list[float]
    records: Sequence[Any]


def measure(args: argparse.Namespace) -> list[str]:
    """Run every plan and write its rows; report a plan that fails, return the names of all such."""
    plans = [(path.name, Plan.load(path)) for path in args.plans]
    groups, failed = grouped(plans, args.together), list[str]()
    stack, engines = place_all(groups[0], args)
    for index, group in enumerate(groups):
        with stack:
            started_s = time.perf_counter()
            problems = start_all(engines)
            log.info("%d plans loaded in %.1f s", len(group), since(started_s))
            late = since(args.started_s) > args.time_limit
            following = None
            if index + 1 < len(groups) and not late:  # their processes import meanwhile
                following = place_all(groups[index + 1], args)
            for (name, plan), engine, problem in zip(group, engines, problems, strict=True):
                if not measure_one(name, plan, engine, problem, args):
                    failed.append(name)
        if following is None:
            if index + 1 < len(groups):
                log.info("time is up: %d plans left out", sum(map(len, groups[index + 1 :])))
            break
        stack, engines = following
    if args.rows.exists():
        sum_up(args.rows)
    return failed


def place_all(
    group: Sequence[tuple[str, Plan]], args: argparse.Namespace
) -> tuple[ExitStack, list[Any]]:
    """Start the processes of several plans; the stack takes them down."""
    stack = ExitStack()
    return stack, [stack.enter_context(make_engine(plan, args)) for _, plan in group]


def grouped(plans: Sequence[tuple[str, Plan]], most: int) -> list[list[tuple[str, Plan]]]:
    """Return the plans in order, at most so many and only those of one cluster together."""
    groups: list[list[tuple[str, Plan]]] = []
    for _, its in groupby(plans, key=lambda item: item[1].cluster.name):
        alike = list(its)
        groups += [alike[i : i + most] for i in range(0, len(alike), most)]
    return groups


def start_all(engines: Sequence[Any]) -> list[Exception | None]:
    """Load the stages of several plans at once; return what went wrong with each."""

    def start(engine: Any) -> Exception | None:
        try:
            engine.begin()
        except (LlmpqError, ValueError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(start, engines))


def measure_one(
    name: str, plan: Plan, engine: Any, problem: Exception | None, args: argparse.Namespace
) -> bool:
    """Time a loaded plan and write its rows, or say why it failed; return whether it ran."""
    try:
        if problem is not None:
            raise problem
        timed = time_jobs(engine, plan, args.repeat)
    except (LlmpqError, ValueError) as error:
        log.warning("%s failed: %s", name, error)
        return False
    write_rows(plan, timed, args)
    report(plan, timed)
    return True


def since(start_s: float) -> float:
    """Return the seconds since a reading of the performance counter."""
    return time.perf_counter() - start_s


def make_engine(plan: Plan, args: argparse.Namespace) -> Any:
    """Start the processes of a plan's stages."""
    from llmpq.runtime.launch.pipeline_client import PipelineClient
    from llmpq.runtime.options.engine_options import Deadlines, EngineOptions
    from llmpq.runtime.options.stage_settings import StageSettings

    settings = StageSettings(
        model_dir=plan.model.name,
        options=EngineOptions(
            load_format="copies",
            links=args.links,
            backend="processes",
            offline=True,
            deadlines=Deadlines(load_s=args.limit, step_s=args.limit),
        ),
    )
    gpus = [int(gpu) for gpu in args.gpus.split(",")] if args.gpus else range(len(plan.stages))
    stages = tuple(
        stage.model_copy(update={"device_index": gpu})
        for stage, gpu in zip(plan.stages, gpus, strict=False)
    )
    return PipelineClient.placed(
        plan.model_copy(update={"stages": stages}),
        settings,
    )


def is_emulated(plan: Plan) -> bool:
    """Whether any stage ran on less than a whole GPU."""
    whole = [m is None or m.limit_bytes > 100 << 30 for m in (s.memory for s in plan.stages)]
    return not all(whole) or any(stage.sms is not None for stage in plan.stages)


def time_jobs(engine: Any, plan: Plan, repeat: int) -> Timed:
    """Warm the stages up and time the job."""
    totals, prefills, records = [], [], []
    for job in range(repeat + 1):
        new = plan.workload.gen_len if job else WARM_UP_TOKENS
        # The first job warms up, with all requests: fewer would decode in groups of other sizes.
        requests, started_s = prompts(plan, job, new), time.perf_counter()
        finished = engine.serve(requests)
        records = engine.records()
        if job:
            totals.append(max(request.total_s for request in finished))
            prefills.append(max(request.first_token_s for request in finished))
        log.info("    job %d: %.1f s", job, since(started_s))
    engine.end()
    return Timed(total_s=totals, prefill_s=prefills, records=records)


def prompts(plan: Plan, job: int, new: int) -> list[Any]:
    """Return a job's requests: random prompts, no stop, greedy."""
    from llmpq.models.model_spec import ModelSpec
    from llmpq.runtime.requests.request import Request

    rng, vocab = random.Random(job), ModelSpec.by_name(plan.model.name).vocab
    length = plan.workload.prompt_len
    return [
        Request(id=i, prompt=tuple(rng.randrange(vocab) for _ in range(length)), max_new=new)
        for i in range(plan.workload.batch)
    ]


def write_rows(plan: Plan, timed: Timed, args: argparse.Namespace) -> None:
    """Append the plan's rows: tokens a second, and seconds beside those predicted."""
    from llmpq.kernels.gpu_timing import write_row

    work, predicted = plan.workload, plan.predicted
    case = {
        "model": plan.model.name,
        "precision": "+".join(sorted({p.value for p in plan.precisions})),
        "kv": work.kv.value,
        "dtype": work.dtype,
        "cluster": plan.cluster.name,
        "batch": work.batch,
        "prompt": work.prompt_len,
        "gen": work.gen_len,
        "plan": plan.solver.method,
        "weights": "dummy",
        "stages": len(plan.stages),
        "sum_omega": predicted.sum_omega if predicted else None,
    }
    # Equal whole GPUs: as rows of `llmpq-dist bench`.
    case |= {"emulated": True} if is_emulated(plan) else {"graphs": True, "symmetric": False}
    peers = dict(item.rsplit("=", 1) for item in args.baseline)
    others = {
        name.partition(":")[2]: float(value)
        for name, value in peers.items()
        if name.partition(":")[0] == plan.model.name and not is_emulated(plan)
    }
    tokens = work.batch * work.gen_len
    speeds = [tokens / seconds for seconds in timed.total_s]
    rows = (
        ("e2e", "tok/s", speeds, predicted and predicted.output_tokens_per_s),
        ("fidelity", "s", timed.total_s, predicted and predicted.total_s),
        ("fidelity_prefill", "s", timed.prefill_s, predicted and predicted.prefill_s),
    )
    for bench, unit, samples, expected in rows:
        write_row(
            args.rows,
            bench=bench,
            case=case,
            unit=unit,
            samples=samples,
            predicted=expected,
            baselines=others if bench == "e2e" else None,
            commit=args.commit,
            program="python benchmarks/heterogeneous.py",
        )


def report(plan: Plan, timed: Timed) -> None:
    """Print predicted beside measured, whole and per stage."""
    total_s, prefill_s = statistics.median(timed.total_s), statistics.median(timed.prefill_s)
    predicted = plan.predicted
    if predicted is not None:
        off = predicted.total_s / total_s - 1
        log.info(
            "%s %s: %.2f s (prefill %.2f), predicted %.2f (%.2f): %+.1f %%",
            plan.cluster.name, plan.solver.method, total_s, prefill_s, predicted.total_s,
            predicted.prefill_s, 100 * off,
        )  # fmt: skip
    for stage, record in zip(plan.stages, timed.records, strict=True):
        for kind, expected in (("prefill", stage.prefill_s), ("decode", stage.decode_s)):
            mean_s = record.totals[kind].mean_s if kind in record.totals else None
            if mean_s and expected:
                log.info(
                    "    %s %d layers %s: %.2f ms, predicted %.2f (%+.1f %%)",
                    stage.profile_kind, stage.num_layers, kind, 1e3 * mean_s, 1e3 * expected,
                    100 * (expected / mean_s - 1),
                )  # fmt: skip


def sum_up(path: Path) -> None:
    """Write `heterogeneous` rows of every cluster: the exact plans' speed beside the others'."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["bench"] == "e2e" and row["case"].get("emulated"):
            found.setdefault(row["case"]["cluster"], {})[row["case"]["plan"]] = row
    for cluster, plans in found.items():
        parts = [f"{name} {row['value']:.0f}" for name, row in plans.items()]
        others = {name: row["value"] for name, row in plans.items() if name not in OURS}
        for plan in filter(plans.get, OURS):
            keys = ("model", "cluster", "plan", "kv", "stages", "sum_omega")
            case = {key: plans[plan]["case"][key] for key in keys}
            new = plans[plan] | {"bench": "heterogeneous", "case": case, "baselines": others}
            if others:
                with path.open("a") as out:
                    out.write(json.dumps(new | {"predicted": None}) + "\n")
        sys.stdout.write(f"{cluster}, tokens/s: {', '.join(parts)}\n")


if __name__ == "__main__":
    sys.exit(main())
