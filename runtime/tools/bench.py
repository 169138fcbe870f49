"""`llmpq-dist bench`: LLM-PQ's offline job, timed; the report has vLLM's field names.

A batch of equally long random prompts, a fixed number of greedy tokens each: one warm-up job, then
`--repeat` timed ones. Runs a plan, or a whole model on this machine's first GPU, or its CPU.

Drafts are those of `llmpq-dist run` with the same plan and flags, on a checkpoint's weights only:
random ones do not accept drafts as a trained model does, and their speed-up would be none.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console

from llmpq.checkpoints.gguf_file import is_model
from llmpq.commands.command_line import refuse_without_effect
from llmpq.commands.output_paths import check_files, write_all
from llmpq.devices.default_dtype import default_dtype
from llmpq.devices.this_machine import read_host, this_machine, useful_threads
from llmpq.errors import ExitCode
from llmpq.file_form import explain
from llmpq.models.model_spec import ModelSpec, builtin_name
from llmpq.plans.plan import Plan, QuantizationForm
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.cli.tool_flags import JOB, BenchOptions
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.launch.plans.manual_plan import manual_plan, on_gpu
from llmpq.runtime.launch.plans.plan_choice import read_model
from llmpq.runtime.options.engine_options import AUTO
from llmpq.runtime.report.job_report import (
    plain_comparison,
    print_summary,
    without_timeline,
    write_report,
)
from llmpq.runtime.requests.sampling_params import SamplingParams
from llmpq.runtime.text.request_factory import PreparedPrompt
from llmpq.runtime.tools.bench_rows import add_rows, read_baselines, summary
from llmpq.runtime.tools.chaos import chaos_of
from llmpq.workload import DTYPE_BYTES, Workload

_log = logging.getLogger("llmpq.bench")


def main(options: BenchOptions) -> int:
    """Time the job; returns the exit code."""
    if options.repeat < 1 or options.warm_up < 0:
        raise ValueError(
            f"--repeat must be >= 1, --warm-up >= 0, got {options.repeat}, {options.warm_up}"
        )
    if options.chaos is not None and not 0 < options.chaos < float("inf"):
        raise ValueError(f"--chaos must be a positive number of seconds, got {options.chaos}")
    baselines = read_baselines(options.baseline)
    check_files(
        {"--plan": options.plan, "--costs": _path(options.engine.costs)},
        {"--rows": options.rows, "--report": options.report},
    )
    with open_bench(options) as llm:
        llm.start()
        _log.info("loaded in %.1f s", llm.startup_s)
        chaos = None if options.chaos is None else chaos_of(llm, options.chaos, seed=options.seed)
        with chaos or nullcontext():
            reports = run_jobs(
                llm,
                warm_up=options.warm_up,
                repeat=options.repeat,
                seed=options.seed,
                compare=options.compare_plain,
            )
    report = summary(reports, num_jobs=options.warm_up + options.repeat)

    def show() -> None:
        if options.json:
            sys.stdout.write(json.dumps(without_timeline(report), indent=1) + "\n")
        else:
            print_summary(report, Console(width=None if sys.stdout.isatty() else 110))
        sys.stdout.flush()

    def add() -> None:
        path = Path(str(options.rows))
        add_rows(path, _case(llm), report, llm.plan, baselines, options.commit)

    writers: dict[str, Callable[[], None]] = {"standard output": show} | (
        {} if options.rows is None else {options.rows: add}
    )
    for path in options.report:
        writers[path] = partial(write_report, path, report, llm.plan)
    write_all(writers, kept="what was written elsewhere is whole")
    return ExitCode.DONE


def _path(value: object) -> str | None:
    return None if value is None else str(value)


def _case(llm: LLM) -> dict[str, Any]:
    """Return what distinguishes this job's rows from others."""
    return {
        "model": llm.plan.model.name,
        "weights": "checkpoint" if llm.options.load_format == "auto" else "dummy",
        "graphs": not llm.options.enforce_eager,
    }


def open_bench(options: BenchOptions) -> LLM:
    """Return the engine of the plan, or of a whole model on one device; `start` loads it."""
    plan = load_plan(options.plan) if options.plan is not None else None
    model = options.model
    if model is None and plan is not None:
        model = plan.model.path
    if model is None and plan is not None:
        raise ValueError("the plan names no model directory; give one with --model DIR")
    if model is None:
        raise ValueError("nothing to run: give --plan PLAN or --model DIR|NAME")
    engine = replace(options.engine, offline=True)
    known = is_model(model) or "/" in model or builtin_name(model) is None
    if engine.load_format == "auto" and not known:
        raise ValueError(f"'{model}' is no directory of weights; add --load-format dummy")
    directory, spec = read_model(model, engine)
    plan = plan or single_plan(spec, options)
    _require_positions(plan, spec)
    if engine.load_format != "auto":
        if plan.speculation is not None and engine.speculate is None:
            _log.warning(
                "the plan's drafts (%s, gamma %d) are left out, this times plain decoding: random "
                "weights accept drafts as no trained model does; give a directory of weights to "
                "time them",
                plan.speculation.mode,
                plan.speculation.gamma,
            )
        engine = replace(engine, speculate="off")
    llm = LLM(str(directory), plan=plan, options=engine, start=False)
    mode = llm.options.speculate
    if options.compare_plain and mode is None and engine.speculate != AUTO:
        refuse_without_effect(
            {"--compare-plain": True}, "without drafts, and the plan has none", "give --speculate"
        )
    if mode is not None:
        _log.warning(
            "drafts of %s: prompts are random tokens, text may be accepted more or less often "
            "(llmpq-dist run --compare-plain tells)",
            mode,
        )
    return llm


def run_jobs(
    llm: LLM, *, warm_up: int, repeat: int, seed: int, compare: bool = False
) -> list[dict[str, Any]]:
    """Run warm-ups and timed jobs; return the report of every timed one.

    `compare`: serve every job again without drafts.
    """
    reports: list[dict[str, Any]] = []
    for index in range(warm_up + repeat):
        prompts = prompts_of(llm, seed * 1000 + index)
        outputs = [output.or_raise() for _, output in llm.as_completed(prompts)]
        report = llm.job_report(outputs)
        if compare and llm.options.speculate is not None:
            undrafted = [prompt.without_drafts() for prompt in prompts]
            plain = [output for _, output in llm.as_completed(undrafted)]
            report["speculation"]["plain"] = plain_comparison(outputs, plain)
            llm.trace.take(llm.engine.client)  # the plain job's are no part of the next report
        _log.info("job %d: %.1f tokens/s", index, report["output_throughput"])
        if index >= warm_up:
            reports.append(report)
    peaks = llm.engine.client.peak_memory()
    for done in reports:
        if any(peaks):
            done["peak_memory_bytes"] = max(peaks)
    return reports


def prompts_of(llm: LLM, seed: int) -> list[PreparedPrompt]:
    """Return a job's prompts, new ones for each seed: random tokens, no stop, greedy."""
    work, rng, vocab = llm.plan.workload, random.Random(seed), llm.model_spec.vocab
    params = SamplingParams(max_tokens=work.gen_len, temperature=0, ignore_eos=True)
    return [
        llm.prepare([rng.randrange(vocab) for _ in range(work.prompt_len)], params)
        for _ in range(work.batch)
    ]


def _require_positions(plan: Plan, spec: ModelSpec) -> None:
    work = plan.workload
    if work.max_len > spec.max_positions:
        raise ValueError(
            f"the job: prompts of {work.prompt_len} tokens and {work.gen_len} new ones are beyond "
            f"the {spec.max_positions} positions of {spec.name}; shorten --prompt or --gen, or "
            "re-plan"
        )


def single_plan(spec: ModelSpec, options: BenchOptions) -> Plan:
    """Return the plan of a whole model on this machine's first GPU, or on its CPU."""
    given = {name: getattr(options, name) for name in JOB}
    job = {**JOB, **{name: value for name, value in given.items() if value is not None}}
    dtype = options.dtype or default_dtype(spec, this_machine())
    try:
        plan = manual_plan(
            spec,
            Workload(
                batch=job["batch"],
                prompt_len=job["prompt"],
                gen_len=job["gen"],
                kv=KVPrecision.parse(job["kv"]),
                dtype=dtype,
            ),
            precision=Precision.parse(job["bits"]),
            quantization=QuantizationForm(
                symmetric=options.symmetric,
                head_bits=options.head_bits,
                cpu_activations=options.cpu_activations or "exact",
            ),
            threads=useful_threads(
                read_host().threads,
                spec.num_params * DTYPE_BYTES[dtype],
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
