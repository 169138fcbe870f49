"""`llmpq-dist bench`: LLM-PQ's offline job, timed; the report has vLLM's field names.

A batch of equally long random prompts, a fixed number of greedy tokens each: one warm-up job, then
`--repeat` timed ones. Runs a plan, or a whole model on this machine's first GPU, or its CPU.

Drafts are those of `llmpq-dist run` with the same plan and flags, on a checkpoint's weights only:
random ones do not accept drafts as a trained model does, and their speed-up would be none.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console

from llmpq.device_spec import canonical_kind
from llmpq.errors import ExitCode
from llmpq.file_form import explain
from llmpq.model_spec import ModelSpec
from llmpq.output_paths import check_files, naming
from llmpq.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.cli.flags_without_effect import refuse_idle
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.cli.speculation_choice import (
    Drafts,
    add_speculation_arguments,
    choose_speculation,
)
from llmpq.runtime.launch.hand_plan import hand_plan
from llmpq.runtime.launch.launcher import BACKEND_HELP, BACKENDS, Launch
from llmpq.runtime.launch.stage_settings import LINK_CHOICES
from llmpq.runtime.report.job_report import print_summary
from llmpq.runtime.tools.bench_jobs import Bench, run_jobs
from llmpq.runtime.tools.bench_rows import add_rows, read_baselines, summary
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
    add_speculation_arguments(parser.add_argument_group("speculation"))
    how = parser.add_argument_group("how")
    how.add_argument("--backend", choices=BACKENDS, help=BACKEND_HELP)
    how.add_argument("--in-process", action="store_true", help="as --backend threads")
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


def main(args: argparse.Namespace) -> int:
    """Time the job; returns the exit code."""
    if args.repeat < 1 or args.warm_up < 0:
        raise ValueError(
            f"--repeat must be >= 1, --warm-up >= 0, got {args.repeat}, {args.warm_up}"
        )
    _refuse_idle_flags(args)
    baselines = read_baselines(args.baseline)
    check_files({"--strat_file_name": args.plan, "--costs": args.costs}, {"--rows": args.rows})
    bench = make_bench(args)
    reports = run_jobs(bench)
    report = summary(reports, num_jobs=bench.warm_up + bench.repeat)

    def show() -> None:
        if args.json:
            sys.stdout.write(json.dumps(report, indent=1) + "\n")
        else:
            print_summary(report, Console(width=None if sys.stdout.isatty() else 110))
        sys.stdout.flush()

    def add() -> None:
        add_rows(Path(args.rows), _case(bench), report, bench.plan, baselines, args.commit)

    writers = {"standard output": show} | ({} if args.rows is None else {args.rows: add})
    _write_all(writers)
    return ExitCode.DONE


def _write_all(writers: Mapping[str, Callable[[], None]]) -> None:
    """Write to every place; what one refuses takes nothing of the others."""
    refused: list[ValueError] = []
    for place, write in writers.items():
        try:
            with naming(place, kept="what was written elsewhere is whole"):
                write()
        except ValueError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _case(bench: Bench) -> dict[str, Any]:
    """Return what tells this job from others, for its rows."""
    return {
        "model": bench.spec.name,
        "weights": "dummy" if bench.dummy else "checkpoint",
        "graphs": bench.graphs,
    }


def _refuse_idle_flags(args: argparse.Namespace) -> None:
    """`ValueError` for flags that nothing would heed."""
    if args.plan is not None:
        names = (*JOB, "symmetric", "prefill_microbatch", "decode_microbatch")
        given = {f"--{n.replace('_', '-')}": getattr(args, n) not in (None, False) for n in names}
        refuse_idle(given, "with --strat_file_name, whose plan says them", "re-plan")
    elif args.symmetric and not _rounds_weights(args.bits):
        refuse_idle({"--symmetric": True}, "on weights that are not rounded", "add --bits w4a16")
    if args.load_format == "dummy":
        _refuse_dummy_drafts(args)
    if args.rows is None:
        given = {"--commit": args.commit is not None, "--baseline": bool(args.baseline)}
        refuse_idle(given, "without a row to write", "add --rows FILE")
    if args.in_process:
        given = {
            "--links": args.links is not None,
            "--backend": args.backend is not None,
            "--ray-address": args.ray_address is not None,
            "--master_addr": args.master_addr is not None,
        }
        refuse_idle(given, "with --in-process", "drop --in-process")


def _rounds_weights(bits: str | None) -> bool:
    return Precision.parse(bits or JOB["bits"]).weight_bits < 16


def _refuse_dummy_drafts(args: argparse.Namespace) -> None:
    """`ValueError` for flags about drafts where acceptance would mean nothing."""
    given = {
        "--speculate": args.speculate not in (None, "off"),
        "--gamma": args.gamma is not None,
        "--costs": args.costs is not None,
        "--compare-plain": args.compare_plain,
    }
    refuse_idle(
        given,
        "with --load-format dummy, whose random weights accept drafts as no trained model does",
        "give a directory of weights",
    )


def make_bench(args: argparse.Namespace) -> Bench:
    """Read the plan, or make the plan of a whole model on one device."""
    plan = load_plan(args.plan) if args.plan is not None else None
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
    _require_positions(plan, spec)
    drafts = _drafts(plan, args)
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
        launch=Launch(
            backend="threads" if args.in_process else args.backend or "auto",
            ray_address=args.ray_address,
            master_addr=args.master_addr,
        ),
        drafts=drafts,
        compare=args.compare_plain,
    )


def _require_positions(plan: Plan, spec: ModelSpec) -> None:
    work = plan.workload
    if work.max_len > spec.max_positions:
        raise ValueError(
            f"the job: prompts of {work.prompt_len} tokens and {work.gen_len} new ones are beyond "
            f"the {spec.max_positions} positions of {spec.name}; shorten --prompt or --gen, or "
            "re-plan"
        )


def _drafts(plan: Plan, args: argparse.Namespace) -> Drafts:
    """Return how `llmpq-dist run` would draft; nothing on random weights, which is said."""
    if args.load_format == "dummy":
        if plan.speculation is not None and args.speculate is None:
            _log.warning(
                "the plan's drafts (%s, gamma %d) are left out, this times plain decoding: random "
                "weights accept drafts as no trained model does; give a directory of weights to "
                "time them",
                plan.speculation.mode,
                plan.speculation.gamma,
            )
        return Drafts()
    drafts = choose_speculation(
        plan, args.speculate, args.gamma, args.costs, compare=args.compare_plain
    )
    if drafts.mode is not None:
        _log.warning(
            "drafts of %s: prompts are random tokens, text may be accepted more or less often "
            "(llmpq-dist run --compare-plain tells)",
            drafts.mode,
        )
    return drafts


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
