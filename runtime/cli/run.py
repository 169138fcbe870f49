"""`llmpq-dist run`: a batch file through a plan.

Reads rows, turns them into requests, starts the pipeline, writes answers as they come and a
summary at the end. What ends the run early leaves every finished row in the output file.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from llmpq.checkpoints.hub import local_model
from llmpq.checkpoints.quantization_config import require_method
from llmpq.commands.command_line import refuse_without_effect
from llmpq.commands.output_paths import check_files, require_folder, write_all
from llmpq.errors import CONTINUE, DeadlineError, ExitCode, StageLostError
from llmpq.models.generation_config import read_generation_config
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.runtime.cli.plan_file import load_engines
from llmpq.runtime.cli.run_flags import RunOptions, check_flags, defaults_of
from llmpq.runtime.elastic.control_socket import answering
from llmpq.runtime.entrypoints.engines import Engines
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.launch.choose_launcher import choose_backend
from llmpq.runtime.launch.plans.auto_plan import DEFAULT_NEW_TOKENS, Lengths, plan_for
from llmpq.runtime.options.engine_options import AUTO, PLANNED, EngineOptions
from llmpq.runtime.report.job_report import (
    JobReport,
    JobResult,
    build_report,
    plain_comparison,
    print_summary,
    without_timeline,
    write_report,
)
from llmpq.runtime.requests.request import Progress
from llmpq.runtime.requests.request_output import NO_ROOM, RequestOutput
from llmpq.runtime.text.batch_io import OrderedWriter, finished_lines, read_rows, require_no_answers
from llmpq.runtime.text.batch_rows import BatchRow, answer_line, error_line
from llmpq.runtime.text.made_with import made_by, made_with, replaced
from llmpq.runtime.text.request_factory import PreparedPrompt
from llmpq.runtime.text.token_journal import TokenJournal, begun_answers
from llmpq.runtime.text.tokenizer import Tokenizer

_log = logging.getLogger("llmpq.run")


ENGINE = "engine"
"""Key of an answer's line: which engine of several made it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A batch file, read and checked against what the engine has room for."""

    rows: Sequence[BatchRow]
    done: Mapping[int, Any]
    """Rows that were finished before, by index."""
    prompts: Mapping[int, PreparedPrompt]
    """Of the rows to answer, by index."""
    errors: dict[int, str]
    """Row index -> why it cannot be a request, or was failed as one."""
    begun: Mapping[int, Sequence[int]]
    """Tokens that an earlier run left of answers, by index."""
    made_with: MadeWith
    """What a row's answer is made with: its line says it."""


class MadeWith:
    """Says what answers are made with, also where the plan changes meanwhile."""

    def __init__(self, plan: Plan | Topology, model_dir: str) -> None:
        self._model_dir, self._default_tokens = model_dir, plan.workload.gen_len
        self._known = [(own, made_by(own, model_dir)) for own in plan.plans]
        self._planned = self._known[0][1]

    def __call__(self, row: BatchRow, plan: Plan | None = None) -> Mapping[str, Any]:
        """Return it of a row that ended under a plan; None: the first one."""
        common = next((common for own, common in self._known if own is plan or plan is None), None)
        if common is None:
            assert plan is not None
            common = replaced(self._planned, made_by(plan, self._model_dir))
            self._known = [*self._known[-MOST_PLANS:], (plan, common)]
        return made_with(row, common, self._default_tokens)

    def any_of(self, row: BatchRow) -> list[Mapping[str, Any]]:
        """Return it of a row that any engine of the plan has answered."""
        return [made_with(row, common, self._default_tokens) for _, common in self._known]


MOST_PLANS = 64
"""Plans whose answers' notes are kept at hand."""


def main(options: RunOptions) -> int:
    """Run a batch file through a plan; returns the exit code."""
    check_flags(options)
    plan = None if options.plan is None else load_engines(options.plan)
    model_dir = options.model
    if model_dir is None and plan is not None:
        model_dir = plan.model.path
    if model_dir is None:
        raise ValueError("the plan names no model directory; give one with --model DIR")
    model_dir = str(local_model(model_dir))
    engine = replace(options.engine, offline=True)
    read_generation_config(model_dir, engine.generation_config)  # before anything is loaded
    if engine.quantization is not None:
        require_method(model_dir, engine.quantization)  # ... or planned
    for own in () if plan is None else plan.plans:
        own.require_model(ModelSpec.from_directory(model_dir))
    if isinstance(plan, Topology):
        _require_several(options)
    check_files(
        {"--input": options.input, "--plan": options.plan, "--cluster": _path(engine.cluster)},
        {
            "--output": options.output,
            "--trace": _path(engine.trace),
            "--report": options.report,
        },
    )
    if not (options.resume or options.overwrite):
        require_no_answers(options.output)
    rows, tokenizer = read_rows(options.input, defaults_of(options)), Tokenizer(model_dir)
    if plan is None:
        plan, engine = _made_plan(options, engine, model_dir, rows, tokenizer)
    # before the output is touched
    llm = _engines(model_dir, plan, engine, use_tqdm=not options.json)
    if options.compare_plain and llm.options.speculate is None and options.engine.speculate != AUTO:
        refuse_without_effect(
            {"--compare-plain": True}, "without drafts, and the plan has none", "give --speculate"
        )
    on_ray = any(choose_backend(own, engine) == "ray" for own in llm.plan.plans)
    if engine.layer_cache is not None and not on_ray:
        require_folder("--layer-cache", str(engine.layer_cache))  # elsewhere the stages look
    job = _job(rows, options, llm, model_dir, tokenizer)
    for own in llm.plan.plans if options.tune and job.prompts else ():
        _tune(own, ModelSpec.from_directory(model_dir))
    with llm, OrderedWriter(options.output, len(rows), done=job.done) as writer:
        try:
            report = _run(job, options, llm, writer)
        except (StageLostError, DeadlineError) as error:
            raise _with_advice(error) from None
        _show(report, llm, options)
    if job.errors:
        sys.stderr.write(f"{_failed(job)}; see their 'error' in {options.output}\n")
        return ExitCode.SOME_ROWS_FAILED
    return ExitCode.DONE


def _engines(
    model_dir: str, plan: Plan | Topology, engine: EngineOptions, *, use_tqdm: bool
) -> LLM | Engines:
    """Return what answers: one engine, or those of a plan of several."""
    if isinstance(plan, Topology):
        return Engines(model_dir, plan, engine, start=False, use_tqdm=use_tqdm)
    return LLM(model_dir, plan=plan, options=engine, start=False, use_tqdm=use_tqdm)


def _require_several(options: RunOptions) -> None:
    """Refuse what is of one engine alone, where the plan has several."""
    pages = [path for path in options.report if path.lower().endswith((".html", ".htm"))]
    if pages:
        raise ValueError(
            f"--report '{pages[0]}': a page is of one engine and the plan has several; give a name "
            "that ends in .json"
        )
    if options.compare_plain:
        raise ValueError(
            "--compare-plain is of one engine and the plan has several; leave it out, or plan with "
            "llmpq-algo --engines 1"
        )


def _path(value: object) -> str | None:
    return None if value is None else str(value)


def _with_advice(error: StageLostError | DeadlineError) -> Exception:
    """Return a loss with the flags of this command that go on from it."""
    if isinstance(error, DeadlineError) and error.deadline is not None:
        more = f" with --deadlines {error.deadline}=SECONDS"
        return DeadlineError(f"{error}{more}{CONTINUE}", deadline=error.deadline)
    return type(error)(f"{error}{CONTINUE}")


def _made_plan(
    options: RunOptions,
    engine: EngineOptions,
    model_dir: str,
    rows: Sequence[BatchRow],
    tokenizer: Tokenizer,
) -> tuple[Plan, EngineOptions]:
    """Plan for the rows and the devices there are, and show the plan."""
    lengths = lengths_of(rows, tokenizer, ModelSpec.from_directory(model_dir))
    made = plan_for(model_dir, lengths, engine)
    if not options.json and sys.stdout is not None:
        sys.stdout.write(f"{lengths.text()}\n{made.text(shutil.get_terminal_size((110, 0))[0])}\n")
        sys.stdout.flush()
    return made.plan, replace(engine, **PLANNED)


def _tune(plan: Plan, spec: ModelSpec) -> None:
    """Tune the plan's products on this machine's GPU; the stages read what is found."""
    from llmpq.runtime.backends.tune_products import job_of, line, tune

    for found in tune(job_of(plan, spec)):
        _log.info("%s", line(found))


def lengths_of(rows: Sequence[BatchRow], tokenizer: Tokenizer, spec: ModelSpec) -> Lengths:
    """Return the lengths of the rows that the model can serve."""
    prompts, new_tokens = [], []
    for row in rows:
        try:
            room = spec.max_positions
            length = len(_tokens(row, tokenizer, room)) if row.error is None else 0
        except ValueError:
            continue
        left = spec.max_positions - length
        if length > 0 and left > 0:
            prompts.append(length)
            new_tokens.append(min(row.max_tokens or DEFAULT_NEW_TOKENS, left))
    return Lengths(prompts=prompts or [1], new_tokens=new_tokens or [1])


def _tokens(row: BatchRow, tokenizer: Tokenizer, room: int) -> list[int]:
    if row.messages:
        return tokenizer.encode_chat(row.messages, room=room)
    if isinstance(row.prompt, str):
        return tokenizer.encode(row.prompt, room=room)
    return list(row.prompt)


def _job(
    rows: Sequence[BatchRow],
    options: RunOptions,
    llm: LLM | Engines,
    model_dir: str,
    tokenizer: Tokenizer,
) -> Job:
    """Turn rows into prompts; one that there is no room for becomes an error."""
    made = MadeWith(llm.plan, model_dir)
    done = finished_lines(options.output, rows, made.any_of) if options.resume else {}
    left = begun_answers(options.output, rows, made.any_of, done) if options.resume else {}
    prompts, errors = prepare_rows(rows, llm, tokenizer, skip=done)
    begun = {index: tokens for index, tokens in left.items() if index in prompts}
    prompts |= {index: prompts[index].going_on(tokens) for index, tokens in begun.items()}
    return Job(rows=rows, done=done, prompts=prompts, errors=errors, begun=begun, made_with=made)


def prepare_rows(
    rows: Sequence[BatchRow], llm: LLM | Engines, tokenizer: Tokenizer, *, skip: Container[int] = ()
) -> tuple[dict[int, PreparedPrompt], dict[int, str]]:
    """Return the prompts of rows, and why the others cannot run, each by the row's index."""
    prompts: dict[int, PreparedPrompt] = {}
    errors: dict[int, str] = {}
    for row in rows:
        if row.index in skip:
            continue
        try:
            if row.error is not None:
                raise ValueError(row.error)
            prompts[row.index] = llm.prepare(
                _tokens(row, tokenizer, llm.max_model_len),
                row.params(llm.plan.workload.gen_len),
                request_id=str(row.index),
                priority=row.priority,
            )
        except ValueError as error:
            errors[row.index] = str(error)
    return prompts, errors


def _run(job: Job, options: RunOptions, llm: LLM | Engines, writer: OrderedWriter) -> JobReport:
    """Start the engine, write answers as they come; return the report."""
    if not job.prompts:
        _write_errors(job, writer)
        _log.info("nothing to run: %s", _why_nothing(job))
        return _report_of_nothing(llm.plan, job)
    stages = llm.plan.stages
    _log.info("starting %d stage%s", len(stages), "" if len(stages) == 1 else "s")
    llm.start()
    _write_errors(job, writer)
    devices = [(index, device) for index, stage in enumerate(stages) for device in stage.members]
    for (index, stage), place in zip(devices, llm.stage_places, strict=True):
        where = ", ".join(filter(None, (place.address, place.device, place.uuid)))
        named = f"{stage.device} on {stage.node}"
        _log.info("stage %d: %s (%s: %s), pid %d", index, named, place.host, where, place.pid)
    outputs: list[RequestOutput] = []
    rows, prompts = [job.rows[index] for index in job.prompts], list(job.prompts.values())
    journal = TokenJournal(options.output, job.rows, partial(_made_by, job, llm), job.begun)
    journal.begin()
    under_way = dict(job.prompts)

    def on_progress(progress: Progress) -> None:
        shown.update(progress, writer.num_finished)
        journal.take(lambda: [(i, *llm.begun(prompt)) for i, prompt in under_way.items()])

    with ExitStack() as stack:
        if isinstance(llm, LLM):
            stack.enter_context(answering(llm))
        shown = stack.enter_context(llm.progress_of(prompts, len(job.rows), quiet=options.json))
        for index, output in llm.as_completed(prompts, on_progress=on_progress):
            row = rows[index]
            del under_way[row.index]
            shown.end(output, prompts[index].most_tokens)
            if output.failure is not None:
                job.errors[row.index] = output.failure
                writer.write(row.index, error_line(row, output.failure, code="server_error"))
                continue
            outputs.append(output)
            plan = llm.plan_of(output)
            line = answer_line(row, output, plan.model.name, job.made_with(row, plan))
            writer.write(row.index, line if output.engine is None else _named(line, output))
    journal.end()
    cut = sum(output.outputs[0].stop_reason == NO_ROOM for output in outputs)
    if cut:
        _log.warning(
            "%d of %d answers ended before their max_tokens, with the %d tokens there is room for",
            cut,
            len(outputs),
            llm.max_model_len,
        )
    report = llm.job_report(outputs, num_failed=len(job.errors))
    report["errors"] = _error_rows(job)
    if options.compare_plain and llm.options.speculate is not None:
        _log.info("again without drafts, to compare")
        undrafted = [prompt.without_drafts() for prompt in prompts]
        plain = [output for _, output in llm.as_completed(undrafted)]
        report["speculation"]["plain"] = plain_comparison(outputs, plain)
    return report


def _made_by(job: Job, llm: LLM | Engines, row: BatchRow, engine: int) -> Mapping[str, Any]:
    """Return what the answer to a row that has not ended is made with, by one of the engines."""
    plan = llm.plan if isinstance(llm, LLM) else llm.llms[engine].plan
    return job.made_with(row, plan)


def _named(line: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
    """Return the line of a row with the engine that answered it."""
    return {**line, ENGINE: output.engine}


def _write_errors(job: Job, writer: OrderedWriter) -> None:
    """Begin the output with the rows that cannot be requests."""
    writer.begin()
    for index, message in job.errors.items():
        _log.warning("row %d: %s", index, message)
        writer.write(index, error_line(job.rows[index], message))


MOST_ERRORS = 1000
"""Failed rows that a report names; the output has all of them."""


def _error_rows(job: Job) -> list[dict[str, Any]]:
    """Return which rows failed, and why."""
    named = [{"row": index, "message": message} for index, message in sorted(job.errors.items())]
    return named[:MOST_ERRORS]


def _report_of_nothing(whole: Plan | Topology, job: Job) -> JobReport:
    """Return the report of a job that had nothing left to run: no stage was started."""
    plan = whole.plans[0]
    report = build_report(
        JobResult(
            plan=plan.model_copy(update={"stages": ()}),
            loads=(),
            records=(),
            outputs=(),
            num_failed=len(job.errors),
            startup_s=0.0,
        )
    )
    report["errors"] = _error_rows(job)
    return report


def _why_nothing(job: Job) -> str:
    before = f"{len(job.done)} of {len(job.rows)} rows were finished before"
    if not job.errors:
        return before
    refused = f"{len(job.errors)} of {len(job.rows)} rows were refused"
    return f"{refused}, {before}" if job.done else refused


def _failed(job: Job) -> str:
    """Return how many rows have an error; all of them have one cause, often."""
    if len(job.errors) < len(job.rows):
        return f"{len(job.errors)} of {len(job.rows)} rows failed"
    index, message = next(iter(job.errors.items()))
    return f"every row was refused, {len(job.rows)} in all (row {index}: {message})"


def _show(report: Mapping[str, Any], llm: LLM | Engines, options: RunOptions) -> None:
    """Print the report and write the files; what one refuses takes nothing of the others."""

    def show() -> None:
        if options.json:
            sys.stdout.write(json.dumps(without_timeline(report), indent=1) + "\n")
        elif report["stages"]:
            print_summary(report, Console(width=None if sys.stdout.isatty() else 110))
        sys.stdout.flush()

    writers: dict[str, Callable[[], None]] = {}
    if sys.stdout is not None:
        writers["standard output"] = show
    for path in options.report:
        writers[path] = partial(write_report, path, report, llm.plan.plans[0])
    if options.engine.trace is not None and report["stages"]:
        writers[str(options.engine.trace)] = llm.write_trace
    write_all(writers, kept=f"the answers in '{options.output}' are complete")
