"""`llmpq-dist run`: a batch file through a plan.

Reads rows, turns them into requests, starts the pipeline, writes answers as they come and a
summary at the end. What ends the run early leaves every finished row in the output file.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from llmpq.checkpoints.generation_config import read_generation_config
from llmpq.checkpoints.hub import local_model
from llmpq.cluster import Cluster
from llmpq.commands.output_paths import check_files, naming, require_folder
from llmpq.errors import CONTINUE, DeadlineError, ExitCode, StageLostError
from llmpq.file_form import replace_text
from llmpq.gpu_memory import plan_within
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.precision import KVPrecision
from llmpq.runtime.auto_plan import DEFAULT_NEW_TOKENS, Lengths, plan_for
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.cli.run_flags import (
    RunOptions,
    check_flags,
    deadlines_of,
    defaults_of,
    kv_pool_wish,
    launch_of,
)
from llmpq.runtime.cli.speculation_choice import choose_speculation
from llmpq.runtime.launch.choose_launcher import choose_backend
from llmpq.runtime.launch.engine import Engine, Update
from llmpq.runtime.launch.plans.planned_kv import AUTO, with_kv
from llmpq.runtime.launch.plans.pool_plan import RequestLimits, request_limits
from llmpq.runtime.launch.stages.stage_settings import StageSettings
from llmpq.runtime.report.job_report import JobResult, build_report, print_summary
from llmpq.runtime.report.progress import LoadBar, ProgressReporter
from llmpq.runtime.request import Finished, Request
from llmpq.runtime.text.answer_text import answer_text
from llmpq.runtime.text.batch_io import OrderedWriter, finished_lines, read_rows, require_no_answers
from llmpq.runtime.text.batch_rows import AnswerText, BatchRow, answer_line, error_line
from llmpq.runtime.text.made_with import made_by, made_with
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.trace import StageRecord, write_chrome_trace

_log = logging.getLogger("llmpq.run")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A batch file, read and checked against a plan."""

    plan: Plan
    spec: ModelSpec
    rows: Sequence[BatchRow]
    requests: Sequence[Request]
    errors: Mapping[int, str]
    """Row index -> why it cannot be a request."""
    made: Callable[[BatchRow], Mapping[str, Any]] | None = None
    """What a row's answer is made with: its line says it."""


def main(options: RunOptions) -> int:
    """Run a batch file through a plan; returns the exit code."""
    check_flags(options)
    plan = None if options.plan is None else load_plan(options.plan)
    model_dir = options.model or (plan.model.path if plan is not None else None)
    if model_dir is None:
        raise ValueError("the plan names no model directory; give one with --model DIR")
    model_dir = str(local_model(model_dir))
    options = replace(options, model=model_dir)
    generation = read_generation_config(model_dir, options.generation_config)
    spec = generation.with_ends(ModelSpec.from_directory(model_dir))
    cluster = None if options.cluster is None else Cluster.load(options.cluster)
    if plan is not None:
        plan.require_model(spec)
        plan = with_kv(plan, spec, options.kv_cache_dtype)
        plan = plan_within(plan, options.gpu_memory_utilization)
        if cluster is not None:
            plan.require_cluster(cluster.name, cluster.fingerprint())
    check_files(
        {"--input": options.input, "--plan": options.plan, "--cluster": options.cluster},
        {"--output": options.output, "--trace": options.trace, "--report": options.report},
    )
    if not (options.resume or options.overwrite):
        require_no_answers(options.output)
    rows, tokenizer = read_rows(options.input, defaults_of(options)), Tokenizer(model_dir)
    if plan is None:
        plan = _made_plan(options, model_dir, rows, tokenizer, cluster)
    if options.layer_cache is not None and choose_backend(plan, launch_of(options)) != "ray":
        require_folder("--layer-cache", options.layer_cache)  # elsewhere the stages look
    made = partial(made_with, common=made_by(plan, model_dir), default_tokens=plan.workload.gen_len)
    done = finished_lines(options.output, rows, made) if options.resume else {}
    settings = _settings(options, plan)  # before the output file is touched
    limits = request_limits(plan, spec, settings)
    job = make_job(plan, spec, rows, tokenizer, limits=limits, skip=done, made=made)
    if options.tune and job.requests:
        _tune(plan, spec)
    with OrderedWriter(options.output, len(rows), done=done) as writer:
        if job.requests:
            try:
                report, records = _run(job, options, settings, cluster, writer, tokenizer)
            except (StageLostError, DeadlineError) as error:
                raise _with_advice(error) from None
        else:
            _write_errors(job, writer)
            _log.info("nothing to run: %s", _why_nothing(job, len(done)))
            report, records = _report_of_nothing(job), []
    _show(report, records, job, options)
    if job.errors:
        sys.stderr.write(f"{_failed(job)}; see their 'error' in {options.output}\n")
        return ExitCode.SOME_ROWS_FAILED
    return ExitCode.DONE


def _with_advice(error: StageLostError | DeadlineError) -> Exception:
    """Return a loss with the flags of this command that go on from it."""
    if isinstance(error, DeadlineError) and error.deadline is not None:
        more = f" with --{error.deadline}-timeout"
        return DeadlineError(f"{error}{more}{CONTINUE}", deadline=error.deadline)
    return type(error)(f"{error}{CONTINUE}")


def _made_plan(
    options: RunOptions,
    model_dir: str,
    rows: Sequence[BatchRow],
    tokenizer: Tokenizer,
    cluster: Cluster | None,
) -> Plan:
    """Plan for the rows and the devices there are, and show the plan."""
    lengths = lengths_of(rows, tokenizer, ModelSpec.from_directory(model_dir))
    wish = options.kv_cache_dtype
    made = plan_for(
        model_dir,
        lengths,
        cluster=cluster,
        from_ray=options.from_ray,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv=KVPrecision.KV16 if wish == AUTO else KVPrecision.parse(wish),
        profile=options.profile,
        prefer=options.prefer or "quality",
    )
    if not options.json and sys.stdout is not None:
        sys.stdout.write(f"{lengths.text()}\n{made.text(shutil.get_terminal_size((110, 0))[0])}\n")
        sys.stdout.flush()
    return made.plan


def _tune(plan: Plan, spec: ModelSpec) -> None:
    """Tune the plan's products on this machine's GPU; the stages read what is found."""
    from llmpq.runtime.tools.tune_products import job_of, line, tune

    for found in tune(job_of(plan, spec)):
        _log.info("%s", line(found))


def lengths_of(rows: Sequence[BatchRow], tokenizer: Tokenizer, spec: ModelSpec) -> Lengths:
    """Return the lengths of the rows that the model can serve."""
    prompts, new_tokens = [], []
    for row in rows:
        try:
            length = len(_tokens(row, tokenizer)) if row.error is None else 0
        except ValueError:
            continue
        wanted = row.max_tokens or DEFAULT_NEW_TOKENS
        if length > 0 and length + wanted - 1 <= spec.max_positions:
            prompts.append(length)
            new_tokens.append(wanted)
    return Lengths(prompts=prompts or [1], new_tokens=new_tokens or [1])


def _tokens(row: BatchRow, tokenizer: Tokenizer) -> list[int]:
    if row.messages:
        return tokenizer.encode_chat(row.messages)
    return tokenizer.encode(row.prompt) if isinstance(row.prompt, str) else list(row.prompt)


def _why_nothing(job: Job, num_done: int) -> str:
    before = f"{num_done} of {len(job.rows)} rows were finished before"
    if not job.errors:
        return before
    refused = f"{len(job.errors)} of {len(job.rows)} rows were refused"
    return f"{refused}, {before}" if num_done else refused


def _failed(job: Job) -> str:
    """Return how many rows have an error; all of them have one cause, often."""
    if len(job.errors) < len(job.rows):
        return f"{len(job.errors)} of {len(job.rows)} rows failed"
    index, message = next(iter(job.errors.items()))
    return f"every row was refused, {len(job.rows)} in all (row {index}: {message})"


def make_job(
    plan: Plan,
    spec: ModelSpec,
    rows: Sequence[BatchRow],
    tokenizer: Tokenizer,
    *,
    limits: RequestLimits,
    skip: Mapping[int, Any],
    made: Callable[[BatchRow], Mapping[str, Any]] | None = None,
) -> Job:
    """Turn rows into requests; a row that there is no room for becomes an error."""
    requests: list[Request] = []
    errors: dict[int, str] = {}
    for row in rows:
        if row.index in skip:
            continue
        try:
            if row.error is not None:
                raise ValueError(row.error)
            requests.append(_request(row, plan, spec, limits, tokenizer))
        except ValueError as error:
            errors[row.index] = str(error)
    return Job(plan=plan, spec=spec, rows=rows, requests=requests, errors=errors, made=made)


def _request(
    row: BatchRow, plan: Plan, spec: ModelSpec, limits: RequestLimits, tokenizer: Tokenizer
) -> Request:
    tokens = _tokens(row, tokenizer)
    if tokens and max(tokens) >= spec.vocab:
        raise ValueError(f"token {max(tokens)} is not in the vocabulary of {spec.vocab}")
    request = Request(
        id=row.index,
        prompt=tuple(tokens),
        max_new=row.max_tokens or plan.workload.gen_len,
        stop_ids=frozenset() if row.ignore_eos else frozenset(spec.eos_token_ids),
        stop_texts=row.stop,
        sampling=row.sampling,
    )
    limits.check(request)
    return request


def _run(
    job: Job,
    options: RunOptions,
    settings: StageSettings,
    cluster: Cluster | None,
    writer: OrderedWriter,
    tokenizer: Tokenizer,
) -> tuple[dict[str, Any], Sequence[StageRecord]]:
    """Start the pipeline, write answers as they come; return the report and the stages' records."""
    started_s = time.monotonic()
    stages = job.plan.stages
    compare = options.compare_plain and settings.speculate is not None
    _log.info("starting %d stage%s", len(stages), "" if len(stages) == 1 else "s")
    bar = LoadBar(quiet=options.json)
    start = Engine.start(
        job.plan,
        settings,
        cluster=cluster,
        deadlines=deadlines_of(options),
        launch=replace(launch_of(options), on_load=bar.on_load),
    )
    with bar, start as pipeline:
        bar.stop()
        startup_s = time.monotonic() - started_s
        _write_errors(job, writer)
        for index, (stage, place) in enumerate(zip(stages, pipeline.places, strict=True)):
            where = ", ".join(filter(None, (place.address, place.device, place.uuid)))
            named = f"{stage.device} on {stage.node}"
            _log.info("stage %d: %s (%s: %s), pid %d", index, named, place.host, where, place.pid)
        with ProgressReporter(len(job.rows), quiet=options.json) as progress:
            updates = pipeline.updates()
            pipeline.submit(job.requests, more=compare)
            finished = _serve(job, updates, writer, tokenizer, progress, more=compare)
        records = pipeline.records()
        report = build_report(
            JobResult(
                plan=job.plan,
                loads=pipeline.load_reports,
                records=records,
                finished=finished,
                num_failed=len(job.errors),
                prompt_tokens=sum(len(request.prompt) for request in job.requests),
                startup_s=startup_s,
                speculation=pipeline.speculation(),
                places=[place.as_report() for place in pipeline.places],
                plain=_serve_plainly(job, pipeline, updates) if compare else None,
            )
        )
    return report, records


def _write_errors(job: Job, writer: OrderedWriter) -> None:
    """Begin the output with the rows that cannot be requests."""
    writer.begin()
    for index, message in job.errors.items():
        _log.warning("row %d: %s", index, message)
        writer.write(index, error_line(job.rows[index], message))


def _report_of_nothing(job: Job) -> dict[str, Any]:
    """Return the report of a job that had nothing left to run: no stage was started."""
    return build_report(
        JobResult(
            plan=job.plan.model_copy(update={"stages": ()}),
            loads=(),
            records=(),
            finished=(),
            num_failed=len(job.errors),
            prompt_tokens=0,
            startup_s=0.0,
        )
    )


def _settings(options: RunOptions, plan: Plan) -> StageSettings:
    wish = (options.speculate, options.gamma, options.costs)
    drafts = choose_speculation(plan, *wish, compare=options.compare_plain, model=options.model)
    return StageSettings(
        model_dir=str(options.model),
        trace=options.trace is not None,
        speculate=drafts.mode,
        gamma=drafts.gamma,
        costs=drafts.costs,
        links=options.links,
        gpu_pool=kv_pool_wish(options.kv_pool, options.no_kv_pool),
        copy_weights=options.copy_weights,
        layer_cache=options.layer_cache and str(Path(options.layer_cache).resolve()),
    )


def _serve(
    job: Job,
    updates: Iterator[Update],
    writer: OrderedWriter,
    tokenizer: Tokenizer,
    progress: ProgressReporter,
    *,
    more: bool,
) -> list[Finished]:
    """Write every answer as it comes, to the job's end or, if `more` follows, the last one."""
    requests = {request.id: request for request in job.requests}
    finished: list[Finished] = []
    for update in updates:
        for result in update.finished:
            row = job.rows[result.id]
            answer = _answer(requests[result.id], result, tokenizer)
            made = None if job.made is None else job.made(row)
            writer.write(row.index, answer_line(row, answer, job.plan.model.name, made))
        finished += update.finished
        progress.update(update.progress, writer.num_finished)
        if more and len(finished) == len(requests):
            break
    return finished


def _serve_plainly(job: Job, pipeline: Engine, updates: Iterator[Update]) -> list[Finished]:
    """Serve the same requests again on the same stages, without drafts."""
    _log.info("again without drafts, to compare")
    pipeline.submit([replace(request, may_draft=False) for request in job.requests])
    return [result for update in updates for result in update.finished]


def _answer(request: Request, result: Finished, tokenizer: Tokenizer) -> AnswerText:
    tokens = list(result.tokens)
    text = answer_text(
        tokenizer,
        request.prompt,
        tokens,
        stop_ids=request.stop_ids,
        stop_texts=request.stop_texts,
        min_tokens=request.min_new,
    )
    return AnswerText(
        text=text,
        tokens=tokens,
        finish_reason=result.finish_reason,
        prompt_tokens=len(request.prompt),
    )


def _show(
    report: Mapping[str, Any],
    records: Sequence[StageRecord],
    job: Job,
    options: RunOptions,
) -> None:
    """Print the report and write the files; what one refuses takes nothing of the others."""
    text = json.dumps(report, indent=1) + "\n"

    def show() -> None:
        if options.json:
            sys.stdout.write(text)
        elif report["stages"]:
            print_summary(report, Console(width=None if sys.stdout.isatty() else 110))
        sys.stdout.flush()

    def write_trace() -> None:
        names = [f"stage {i} {stage.device}" for i, stage in enumerate(job.plan.stages)]
        write_chrome_trace(str(options.trace), names, records)

    places: list[tuple[str, Callable[[], None]]] = []
    if sys.stdout is not None:
        places.append(("standard output", show))
    if options.report is not None:
        places.append((options.report, lambda: replace_text(Path(str(options.report)), text)))
    if options.trace is not None and records:
        places.append((options.trace, write_trace))
    refused: list[ValueError] = []
    for place, write in places:
        try:
            with naming(place, kept=f"the answers in '{options.output}' are complete"):
                write()
        except ValueError as error:
            refused.append(error)
    if refused:
        raise refused[0]
