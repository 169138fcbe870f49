"""`llmpq-dist bench`: LLM-PQ's offline job, timed; the report has vLLM's field names.

A batch of equally long random prompts, a fixed number of greedy tokens each: one warm-up job, then
`--repeat` timed ones. Runs a plan, or a whole model on this machine's first GPU, or its CPU.

Drafts are those of `llmpq-dist run` with the same plan and flags, on a checkpoint's weights only:
random ones do not accept drafts as a trained model does, and their speed-up would be none.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console

from llmpq.checkpoints.gguf_file import is_model
from llmpq.checkpoints.hub import local_model
from llmpq.commands.output_paths import check_files, naming
from llmpq.devices.this_machine import read_host, useful_threads
from llmpq.errors import ExitCode
from llmpq.file_form import explain
from llmpq.model_spec import ModelSpec, builtin_name
from llmpq.plan import Plan, QuantizationForm
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.cli.run_flags import kv_pool_wish
from llmpq.runtime.cli.speculation_choice import Drafts, choose_speculation
from llmpq.runtime.cli.tool_flags import JOB, BenchOptions
from llmpq.runtime.launch.launcher import Launch
from llmpq.runtime.launch.plans.hand_plan import hand_plan, on_gpu
from llmpq.runtime.report.job_report import print_summary
from llmpq.runtime.tools.bench_jobs import Bench, run_jobs
from llmpq.runtime.tools.bench_rows import add_rows, read_baselines, summary
from llmpq.workload import DTYPE_BYTES, Workload

_log = logging.getLogger("llmpq.bench")


def main(options: BenchOptions) -> int:
    """Time the job; returns the exit code."""
    if options.repeat < 1 or options.warm_up < 0:
        raise ValueError(
            f"--repeat must be >= 1, --warm-up >= 0, got {options.repeat}, {options.warm_up}"
        )
    baselines = read_baselines(options.baseline)
    check_files({"--plan": options.plan, "--costs": options.costs}, {"--rows": options.rows})
    bench = make_bench(options)
    reports = run_jobs(bench)
    report = summary(reports, num_jobs=bench.warm_up + bench.repeat)

    def show() -> None:
        if options.json:
            sys.stdout.write(json.dumps(report, indent=1) + "\n")
        else:
            print_summary(report, Console(width=None if sys.stdout.isatty() else 110))
        sys.stdout.flush()

    def add() -> None:
        add_rows(
            Path(str(options.rows)), _case(bench), report, bench.plan, baselines, options.commit
        )

    writers = {"standard output": show} | ({} if options.rows is None else {options.rows: add})
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
    case: dict[str, Any] = {
        "model": bench.spec.name,
        "weights": "dummy" if bench.dummy else "checkpoint",
        "graphs": bench.graphs,
    }
    return {**case, "kv_pool": True} if bench.gpu_pool else case


def make_bench(options: BenchOptions) -> Bench:
    """Read the plan, or make the plan of a whole model on one device."""
    plan = load_plan(options.plan) if options.plan is not None else None
    model = options.model or (plan.model.path if plan is not None else None)
    if model is None:
        raise ValueError("nothing to run: give --plan PLAN or --model DIR|NAME")
    dummy = options.load_format == "dummy"
    if is_model(model) or ("/" in model and not (dummy and builtin_name(model) is not None)):
        model = str(local_model(model, config_only=dummy))
    is_directory = is_model(model)
    spec = ModelSpec.from_directory(model) if is_directory else ModelSpec.by_name(model)
    if not is_directory and not dummy:
        raise ValueError(f"'{model}' is no directory of weights; add --load-format dummy")
    if plan is None:
        plan = single_plan(spec, options)
    plan.require_model(spec)
    _require_positions(plan, spec)
    drafts = _drafts(plan, options)
    return Bench(
        plan=plan,
        spec=spec,
        model=model,
        dummy=options.load_format == "dummy",
        graphs=not options.no_graphs,
        gpu_pool=kv_pool_wish(options.kv_pool, options.no_kv_pool),
        warm_up=options.warm_up,
        repeat=options.repeat,
        seed=options.seed,
        links=options.links or "auto",
        launch=Launch(
            backend="threads" if options.in_process else options.backend or "auto",
            ray_address=options.ray_address,
            master_addr=options.master_addr,
        ),
        drafts=drafts,
        compare=options.compare_plain,
    )


def _require_positions(plan: Plan, spec: ModelSpec) -> None:
    work = plan.workload
    if work.max_len > spec.max_positions:
        raise ValueError(
            f"the job: prompts of {work.prompt_len} tokens and {work.gen_len} new ones are beyond "
            f"the {spec.max_positions} positions of {spec.name}; shorten --prompt or --gen, or "
            "re-plan"
        )


def _drafts(plan: Plan, options: BenchOptions) -> Drafts:
    """Return how `llmpq-dist run` would draft; nothing on random weights, which is said."""
    if options.load_format == "dummy":
        if plan.speculation is not None and options.speculate is None:
            _log.warning(
                "the plan's drafts (%s, gamma %d) are left out, this times plain decoding: random "
                "weights accept drafts as no trained model does; give a directory of weights to "
                "time them",
                plan.speculation.mode,
                plan.speculation.gamma,
            )
        return Drafts()
    wish = (options.speculate, options.gamma, options.costs)
    drafts = choose_speculation(plan, *wish, compare=options.compare_plain, model=options.model)
    if drafts.mode is not None:
        _log.warning(
            "drafts of %s: prompts are random tokens, text may be accepted more or less often "
            "(llmpq-dist run --compare-plain tells)",
            drafts.mode,
        )
    return drafts


def single_plan(spec: ModelSpec, options: BenchOptions) -> Plan:
    """Return the plan of a whole model on this machine's first GPU, or on its CPU."""
    given = {name: getattr(options, name) for name in JOB}
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
            quantization=QuantizationForm(
                symmetric=options.symmetric,
                head_bits=options.head_bits,
                cpu_activations=options.cpu_activations or "exact",
            ),
            threads=useful_threads(
                read_host().threads,
                spec.num_params * DTYPE_BYTES[job["dtype"]],
                job["batch"],
            ),
            prefill_microbatch=_or(options.prefill_microbatch, job["batch"]),
            decode_microbatch=_or(options.decode_microbatch, job["batch"]),
        )
    except ValidationError as error:
        raise ValueError(f"the job: {explain(error, Plan)}") from None
    return on_gpu(plan) if torch.cuda.is_available() else plan


def _or(value: int | None, default: int) -> int:
    """Return the default where nothing was given; 0 is refused later."""
    return default if value is None else value
