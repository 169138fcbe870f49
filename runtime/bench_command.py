"""`llmpq-dist bench`: LLM-PQ's offline job, timed; the report has vLLM's field names.

A batch of equally long random prompts, a fixed number of greedy tokens each: one warm-up job, then
`--repeat` timed ones. Runs a plan through Ray, or (`--in-process`) in this process: a plan of CPU
stages, or a whole model on one GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console

from llmpq.device_spec import canonical_kind
from llmpq.errors import ExitCode
from llmpq.file_form import explain
from llmpq.kernels.timing import write_row
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.device_links import LINK_CHOICES, LinkChoice
from llmpq.runtime.hand_plan import hand_plan
from llmpq.runtime.idle_flags import refuse_idle
from llmpq.runtime.loader import RandomSource, TensorSource
from llmpq.runtime.output_paths import naming, require_writable
from llmpq.runtime.quantized_checkpoint import open_checkpoint
from llmpq.runtime.report import JobResult, build_report, print_summary
from llmpq.runtime.request import Request
from llmpq.runtime.scheduler import Scheduler
from llmpq.runtime.stage_actor import limits_of
from llmpq.runtime.stage_compute import LoadReport
from llmpq.runtime.thread_engine import ThreadEngine
from llmpq.workload import Workload

_log = logging.getLogger("llmpq.bench")

JOB: Mapping[str, Any] = {
    "bits": "w16a16", "kv": "kv16", "dtype": "bfloat16", "batch": 32, "prompt": 512, "gen": 100
}  # fmt: skip
"""What a job without a plan is, unless flags say otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `bench`."""
    what = parser.add_argument_group("what to run")
    what.add_argument("--strat_file_name", "--plan", dest="plan", metavar="PLAN",
                      help="plan.json (default: a whole model on one device)")  # fmt: skip
    what.add_argument("--model", metavar="DIR|NAME", help="directory, or a built-in architecture")
    what.add_argument("--load-format", choices=("auto", "dummy"), default="auto",
                      help="dummy: random weights, made on the device")  # fmt: skip
    job = parser.add_argument_group("the job, without a plan")
    job.add_argument("--bits", metavar="PRECISION", help=_default("bits"))
    job.add_argument("--symmetric", action="store_true", help="weights without zeros")
    job.add_argument("--kv", metavar="PRECISION", help=_default("kv"))
    job.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help=_default("dtype"))
    for name in ("batch", "prompt", "gen"):
        job.add_argument(f"--{name}", type=int, metavar="N", help=_default(name))
    job.add_argument("--prefill-microbatch", type=int, metavar="N", help="default: the batch")
    job.add_argument("--decode-microbatch", type=int, metavar="N", help="default: the batch")
    how = parser.add_argument_group("how")
    how.add_argument("--in-process", action="store_true", help="no Ray: threads of this process")
    how.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    how.add_argument("--links", choices=LINK_CHOICES, help="between GPUs (default: auto)")
    how.add_argument("--ray-address", "--address", metavar="ADDRESS", help="join this Ray")
    how.add_argument("--master_addr", "--master-addr", metavar="IP",
                     help="where the stages meet (default 127.0.0.1)")  # fmt: skip
    how.add_argument("--warm-up", type=int, default=1, help="jobs that are not timed")
    how.add_argument("--repeat", type=int, default=3, help="jobs that are")
    how.add_argument("--seed", type=int, default=0, help="of prompts and dummy weights")
    out = parser.add_argument_group("results")
    out.add_argument("--json", action="store_true", help="print the report as JSON")
    out.add_argument("--rows", metavar="FILE", help="append a result row (JSONL)")
    out.add_argument("--commit", help="commit a row names, where git cannot tell")
    out.add_argument("--baseline", action="append", default=[], metavar="NAME=VALUE",
                     help="tokens/s of another engine on the same job, for the row")  # fmt: skip


def _default(name: str) -> str:
    return f"default: {JOB[name]}"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One job, ready to be repeated."""

    plan: Plan
    spec: ModelSpec
    model: str
    dummy: bool
    graphs: bool
    warm_up: int
    repeat: int
    seed: int
    links: LinkChoice = "auto"
    ray_address: str | None = None
    master_addr: str | None = None


def main(args: argparse.Namespace) -> int:
    """Time the job; returns the exit code."""
    if args.repeat < 1 or args.warm_up < 0:
        raise ValueError(
            f"--repeat must be >= 1, --warm-up >= 0, got {args.repeat}, {args.warm_up}"
        )
    _refuse_idle_flags(args)
    if args.rows is not None:
        require_writable("--rows", args.rows)
    bench = make_bench(args)
    reports = run_in_process(bench) if args.in_process else run_through_ray(bench)
    report = summary(reports)
    if args.json:
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        print_summary(report, Console(width=None if sys.stdout.isatty() else 110))
    if args.rows is not None:
        with naming(args.rows, kept="the report is printed, the rows before are kept"):
            add_row(Path(args.rows), bench, report, args)
    return ExitCode.DONE


def _refuse_idle_flags(args: argparse.Namespace) -> None:
    """`ValueError` for flags that nothing would heed."""
    if args.plan is not None:
        names = (*JOB, "symmetric", "prefill_microbatch", "decode_microbatch")
        given = {f"--{n.replace('_', '-')}": getattr(args, n) not in (None, False) for n in names}
        refuse_idle(given, "with --strat_file_name, whose plan says them", "re-plan")
    if args.rows is None:
        given = {"--commit": args.commit is not None, "--baseline": bool(args.baseline)}
        refuse_idle(given, "without a row to write", "add --rows FILE")
    if args.in_process:
        given = {
            "--links": args.links is not None,
            "--ray-address": args.ray_address is not None,
            "--master_addr": args.master_addr is not None,
        }
        refuse_idle(given, "with --in-process", "leave that out")


def make_bench(args: argparse.Namespace) -> Bench:
    """Read the plan, or make the plan of a whole model on one device."""
    plan = Plan.load(args.plan) if args.plan is not None else None
    model = args.model or (plan.model.path if plan is not None else None)
    if model is None:
        raise ValueError("nothing to run: give --plan PLAN or --model DIR|NAME")
    is_directory = Path(model).is_dir()
    spec = ModelSpec.from_directory(model) if is_directory else ModelSpec.by_name(model)
    if not is_directory and args.load_format != "dummy":
        raise ValueError(f"'{model}' is no directory of weights; add --load-format dummy")
    if plan is None:
        plan = single_plan(spec, args)
    plan.require_model(spec)
    return Bench(
        plan=plan,
        spec=spec,
        model=model,
        dummy=args.load_format == "dummy",
        graphs=not args.no_graphs,
        warm_up=args.warm_up,
        repeat=args.repeat,
        seed=args.seed,
        links=args.links or "auto",
        ray_address=args.ray_address,
        master_addr=args.master_addr,
    )


def single_plan(spec: ModelSpec, args: argparse.Namespace) -> Plan:
    """Return the plan of a whole model on this machine's first GPU, or on its CPU."""
    given = {name: getattr(args, name) for name in JOB}
    job = {**JOB, **{name: value for name, value in given.items() if value is not None}}
    try:
        plan = hand_plan(
            spec,
            Workload(
                batch=job["batch"],
                prompt_len=job["prompt"],
                gen_len=job["gen"],
                kv=KVPrecision.parse(job["kv"]),
                dtype=job["dtype"],
            ),
            precision=Precision.parse(job["bits"]),
            prefill_microbatch=_or(args.prefill_microbatch, job["batch"]),
            decode_microbatch=_or(args.decode_microbatch, job["batch"]),
        )
    except ValidationError as error:
        raise ValueError(f"the job: {explain(error, Plan)}") from None
    form = plan.quantization.model_copy(update={"symmetric": args.symmetric})
    plan = plan.model_copy(update={"quantization": form})
    if not torch.cuda.is_available():
        return plan
    kind = canonical_kind(torch.cuda.get_device_name(0))
    change = {"device": f"{kind}-0", "kind": kind, "profile_kind": kind, "threads": None}
    stages = tuple(stage.model_copy(update=change) for stage in plan.stages)
    cluster = plan.cluster.model_copy(update={"name": f"{kind.lower()}x1"})
    return plan.model_copy(update={"stages": stages, "cluster": cluster})


def _or(value: int | None, default: int) -> int:
    """Return the default where nothing was given; 0 is refused later."""
    return default if value is None else value


def prompts_of(bench: Bench, job: int) -> list[Request]:
    """Return a job's requests: random prompts, no stop, greedy."""
    workload = bench.plan.workload
    rng = random.Random(bench.seed * 1000 + job)
    return [
        Request(
            id=index,
            prompt=tuple(rng.randrange(bench.spec.vocab) for _ in range(workload.prompt_len)),
            max_new=workload.gen_len,
        )
        for index in range(workload.batch)
    ]


def run_in_process(bench: Bench) -> list[dict[str, Any]]:
    """Time the job in this process."""
    plan = bench.plan
    on_gpu = not any(stage.is_cpu for stage in plan.stages)
    if on_gpu and len(plan.stages) > 1:
        raise ValueError(
            f"--in-process runs one GPU, the plan has {len(plan.stages)} stages; leave it out"
        )
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started_s = time.perf_counter()
    source = make_source(bench, device)
    engine = ThreadEngine(plan, bench.spec, source, device=device, graphs=bench.graphs)
    loads = engine.loads
    startup_s = time.perf_counter() - started_s
    _log.info("loaded in %.1f s", startup_s)

    def job(index: int) -> JobResult:
        run = engine.run(Scheduler(limits_of(plan)), prompts_of(bench, index))
        return _result(plan, loads, run.records, run.finished, startup_s)

    reports = _repeat(bench, job)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
        for report in reports:
            report["peak_memory_bytes"] = peak
    return reports


def run_through_ray(bench: Bench) -> list[dict[str, Any]]:
    """Time the job on the plan's stages, placed by Ray."""
    # Ray takes seconds to import and is not needed in-process.
    from llmpq.runtime.pipeline import Launch, Pipeline
    from llmpq.runtime.stage_actor import StageSettings

    settings = StageSettings(
        model_dir=bench.model
        if not Path(bench.model).is_dir()
        else str(Path(bench.model).resolve()),
        load_format="dummy" if bench.dummy else "auto",
        graphs=bench.graphs,
        links=bench.links,
    )
    plan, started_s = bench.plan, time.perf_counter()
    launch = Launch(ray_address=bench.ray_address, master_addr=bench.master_addr)
    with Pipeline.start(plan, settings, launch=launch) as pipeline:
        startup_s = time.perf_counter() - started_s
        updates = pipeline.updates()
        num_jobs = bench.warm_up + bench.repeat

        def job(index: int) -> JobResult:
            pipeline.submit(prompts_of(bench, index), more=index + 1 < num_jobs)
            finished: list[Any] = []
            while len(finished) < plan.workload.batch:
                finished += next(updates).finished
            if index + 1 == num_jobs:
                for _ in updates:
                    pass
            records = pipeline.records()
            return _result(plan, pipeline.load_reports, records, finished, startup_s)

        return _repeat(bench, job)


def make_source(bench: Bench, device: torch.device) -> TensorSource:
    """Return where the weights come from."""
    if bench.dummy:
        return RandomSource(bench.spec, seed=bench.seed, device=device)
    return open_checkpoint(bench.model, bench.spec)


def _repeat(bench: Bench, job: Callable[[int], JobResult]) -> list[dict[str, Any]]:
    """Run warm-ups and timed jobs; return the timed ones' reports."""
    reports = []
    for index in range(bench.warm_up + bench.repeat):
        report = build_report(job(index))
        _log.info("job %d: %.1f tokens/s", index, report["output_throughput"])
        if index >= bench.warm_up:
            reports.append(report)
    return reports


def _result(
    plan: Plan, loads: Sequence[LoadReport], records: Any, finished: Any, startup_s: float
) -> JobResult:
    return JobResult(
        plan=plan,
        loads=loads,
        records=records,
        finished=finished,
        num_failed=0,
        prompt_tokens=plan.workload.batch * plan.workload.prompt_len,
        startup_s=startup_s,
    )


def summary(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the report of the median job, with every job's throughput and times."""
    ordered = sorted(reports, key=lambda report: report["output_throughput"])
    median = ordered[(len(ordered) - 1) // 2]
    steps = median["workload"]["gen_len"] - 1
    prefill_ms = [1e3 * report["measured"]["prefill_s"] for report in reports]
    decode_ms = (
        [1e3 * report["measured"]["decode_s"] / steps for report in reports] if steps else []
    )
    return median | {
        "output_throughputs": [report["output_throughput"] for report in reports],
        "prefill_ms": prefill_ms,
        "decode_step_ms": decode_ms,
    }


def add_row(path: Path, bench: Bench, report: dict[str, Any], args: argparse.Namespace) -> None:
    """Append the job's rows: output tokens a second, and the times of its two phases."""
    plan = bench.plan
    baselines = dict(item.split("=", 1) for item in args.baseline)
    precisions = sorted({precision.value for precision in plan.precisions})
    predicted = plan.predicted
    case = {
        "model": bench.spec.name,
        "precision": "+".join(precisions),
        "kv": plan.workload.kv.value,
        "dtype": plan.workload.dtype,
        "cluster": plan.cluster.name,
        "batch": plan.workload.batch,
        "prompt": plan.workload.prompt_len,
        "gen": plan.workload.gen_len,
        "plan": plan.solver.method,
        "weights": "dummy" if bench.dummy else "checkpoint",
        "symmetric": plan.quantization.symmetric,
        "graphs": bench.graphs,
    }
    per_step = 1e3 / max(1, plan.workload.gen_len - 1)
    rows = (
        ("e2e", "tok/s", report["output_throughputs"], predicted and predicted.output_tokens_per_s),
        ("e2e_prefill", "ms", report["prefill_ms"], predicted and 1e3 * predicted.prefill_s),
        ("e2e_step", "ms", report["decode_step_ms"], predicted and predicted.decode_s * per_step),
    )
    for name, unit, samples, expected in rows:
        if samples:
            write_row(
                path,
                bench=name,
                case=case,
                unit=unit,
                samples=samples,
                baselines={k: float(v) for k, v in baselines.items()} if name == "e2e" else None,
                commit=args.commit,
                predicted=expected or None,
                program="llmpq-dist",
            )
