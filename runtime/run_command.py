"""`llmpq-dist run`: a batch file through a plan.

Reads rows, turns them into requests, starts the pipeline, writes answers as they come and a
summary at the end. What ends the run early leaves every finished row in the output file.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from llmpq.cluster import Cluster
from llmpq.errors import BadPlanError, ExitCode
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.runtime.batch_io import OrderedWriter, finished_lines, read_rows
from llmpq.runtime.batch_rows import Answer, Defaults, Row, answer_line, error_line
from llmpq.runtime.device_links import LINK_CHOICES
from llmpq.runtime.kv_choice import AUTO, with_kv
from llmpq.runtime.output_paths import check_files
from llmpq.runtime.pipeline import MAX_TIMEOUT_S, Deadlines, Launch, Pipeline, Update
from llmpq.runtime.progress import ProgressReporter
from llmpq.runtime.report import JobResult, build_report, print_summary
from llmpq.runtime.request import Request
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.runtime.scheduler import Limits
from llmpq.runtime.speculation_choice import add_speculation_arguments, choose_speculation
from llmpq.runtime.stage_actor import StageSettings, limits_of
from llmpq.runtime.stage_loop import Finished
from llmpq.runtime.tokenizer import Tokenizer
from llmpq.runtime.trace import write_chrome_trace

_log = logging.getLogger("llmpq.run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `run`."""
    job = parser.add_argument_group("job")
    job.add_argument(
        "--strat_file_name", "--plan", dest="plan", required=True, metavar="PLAN",
        help="plan.json of llmpq-algo; the .json may be left out",
    )  # fmt: skip
    job.add_argument("--model", metavar="DIR", help="model directory (default: the plan's)")
    job.add_argument("-i", "--input", required=True, metavar="FILE", help="prompts")
    job.add_argument("-o", "--output", required=True, metavar="FILE", help="answers, JSONL")
    job.add_argument(
        "--kv-cache-dtype", "--kv_cache_dtype", default=AUTO, metavar="KV",
        help="kv16, kv8, kv4 or kv2 (int8, int4, int2) instead of what the plan says",
    )  # fmt: skip
    job.add_argument("--cluster", metavar="YAML", help="check that the plan was made for it")
    job.add_argument(
        "--resume", action="store_true", help="keep the rows that --output has, run the others"
    )
    job.add_argument("--trace", metavar="FILE", help="write a Chrome/Perfetto trace")
    job.add_argument("--report", metavar="FILE", help="write the report as JSON")
    job.add_argument("--json", action="store_true", help="print the report as JSON, not as tables")
    _add_sampling(parser.add_argument_group("tokens (rows may say otherwise)"))
    add_speculation_arguments(parser.add_argument_group("speculation"))
    _add_launch(parser.add_argument_group("launch"))


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    defaults = Defaults()
    group.add_argument(
        "--max_tokens", "--max-tokens", "--max_tokens_to_generate", type=int, metavar="N",
        help="new tokens a row (default: the plan's)",
    )  # fmt: skip
    group.add_argument("--temperature", type=float, default=defaults.temperature, help="0: greedy")
    group.add_argument("--top-k", "--top_k", type=int, metavar="K", help="default: all tokens")
    group.add_argument("--top-p", "--top_p", type=float, default=defaults.top_p, metavar="P")
    group.add_argument("--seed", type=int, default=defaults.seed, help="row i draws from seed + i")
    group.add_argument(
        "--ignore-eos", "--ignore_eos", action="store_true", help="always generate N tokens"
    )


def _add_launch(group: argparse._ArgumentGroup) -> None:
    deadlines, launch = Deadlines(), Launch()
    group.add_argument(
        "--ray-address", "--ray_address", "--address", metavar="ADDRESS",
        help="join this Ray ('auto': the one of this machine); default: start one on 127.0.0.1",
    )  # fmt: skip
    group.add_argument(
        "--no_auto", "--no-auto", action="store_true",
        help="start nothing: join the Ray that runs already (as --ray-address auto)",
    )  # fmt: skip
    group.add_argument("--master_addr", "--master-addr", metavar="IP",
                       help="where the stages meet (default: the first stage's host where "
                            "--cluster has several nodes, else 127.0.0.1)")  # fmt: skip
    group.add_argument("--layer-cache", metavar="DIR",
                       help="keep quantised layers here: a restart reads them")  # fmt: skip
    group.add_argument("--links", choices=LINK_CHOICES, default="auto",
                       help="between GPUs; auto: the best that works")  # fmt: skip
    group.add_argument("--master_port", "--master-port", type=int, default=launch.master_port,
                       metavar="PORT", help="default: a free one")  # fmt: skip
    for name, default in (
        ("placement", deadlines.placement_s),
        ("load", deadlines.load_s),
        ("step", deadlines.step_s),
    ):
        group.add_argument(
            f"--{name}-timeout", f"--{name}_timeout", type=float, default=default, metavar="S",
            help=f"seconds (default {default:g})",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """A batch file, read and checked against a plan."""

    plan: Plan
    spec: ModelSpec
    rows: Sequence[Row]
    requests: Sequence[Request]
    errors: Mapping[int, str]
    """Row index -> why it cannot be a request."""


def main(args: argparse.Namespace) -> int:
    """Run a batch file through a plan; returns the exit code."""
    _check_flags(args)
    plan = load_plan(args.plan)
    model_dir = args.model or plan.model.path
    if model_dir is None:
        raise ValueError("the plan names no model directory; give one with --model DIR")
    spec = ModelSpec.from_directory(model_dir)
    plan.require_model(spec)
    plan = with_kv(plan, spec, args.kv_cache_dtype)
    cluster = None
    if args.cluster is not None:
        cluster = Cluster.load(args.cluster)
        plan.require_cluster(cluster.name, cluster.fingerprint())
    check_files(
        {"--input": args.input, "--strat_file_name": args.plan, "--cluster": args.cluster},
        {"--output": args.output, "--trace": args.trace, "--report": args.report},
    )
    rows = read_rows(args.input, _defaults(args))
    done = finished_lines(args.output, rows) if args.resume else {}
    tokenizer = Tokenizer(model_dir)
    job = make_job(plan, spec, rows, tokenizer, skip=done)
    settings = _settings(args, plan)  # before the output file is touched
    with OrderedWriter(args.output, len(rows), done=done) as writer:
        if job.requests:
            report = _run(job, args, settings, cluster, writer, tokenizer)
        else:
            _write_errors(job, writer)
            _log.info("nothing to run: %d of %d rows were finished before", len(done), len(rows))
            report = _report_of_nothing(job)
    _show(report, args)
    if job.errors:
        sys.stderr.write(
            f"{len(job.errors)} of {len(rows)} rows failed; see their 'error' in {args.output}\n"
        )
        return ExitCode.SOME_ROWS_FAILED
    return ExitCode.DONE


def _check_flags(args: argparse.Namespace) -> None:
    """`ValueError` for a value no row could be served with."""
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ValueError(f"--max_tokens must be at least 1, got {args.max_tokens}")
    try:
        SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    if not 0 <= args.master_port < 2**16:
        raise ValueError(
            f"--master_port must be 1 to 65535, or 0 for a free one, got {args.master_port}"
        )
    for name in ("placement", "load", "step"):
        if not 0 < getattr(args, f"{name}_timeout") <= MAX_TIMEOUT_S:
            raise ValueError(
                f"--{name}-timeout must be a positive number of seconds, at most {MAX_TIMEOUT_S}"
            )


def load_plan(name: str) -> Plan:
    """Read a plan by path, with or without `.json`."""
    path = Path(name)
    if not path.exists() and path.with_name(path.name + ".json").exists():
        path = path.with_name(path.name + ".json")
    if path.suffix == ".pkl":
        raise BadPlanError(f"'{path}': llmpq reads no pickle files; make a plan with llmpq-algo")
    return Plan.load(path)


def make_job(
    plan: Plan,
    spec: ModelSpec,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    skip: Mapping[int, Any],
) -> Job:
    """Turn rows into requests; a row that the plan has no room for becomes an error."""
    limits = limits_of(plan)
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
    return Job(plan=plan, spec=spec, rows=rows, requests=requests, errors=errors)


def _request(
    row: Row, plan: Plan, spec: ModelSpec, limits: Limits, tokenizer: Tokenizer
) -> Request:
    if row.messages:
        tokens = tokenizer.encode_chat(row.messages)
    elif isinstance(row.prompt, str):
        tokens = tokenizer.encode(row.prompt)
    else:
        tokens = list(row.prompt)
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
    args: argparse.Namespace,
    settings: StageSettings,
    cluster: Cluster | None,
    writer: OrderedWriter,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Start the pipeline, write answers as they come, return the report."""
    started_s = time.monotonic()
    launch = _launch(args)
    deadlines = Deadlines(
        placement_s=args.placement_timeout, load_s=args.load_timeout, step_s=args.step_timeout
    )
    stages = job.plan.stages
    compare = args.compare_plain and settings.speculate is not None
    _log.info("starting %d stage%s", len(stages), "" if len(stages) == 1 else "s")
    with Pipeline.start(
        job.plan, settings, cluster=cluster, deadlines=deadlines, launch=launch
    ) as pipeline:
        startup_s = time.monotonic() - started_s
        _write_errors(job, writer)
        for index, (stage, pid) in enumerate(zip(stages, pipeline.stage_pids(), strict=True)):
            _log.info("stage %d: %s on %s, pid %d", index, stage.device, stage.node, pid)
        with ProgressReporter(len(job.rows), quiet=args.json) as progress:
            updates = pipeline.updates()
            pipeline.submit(job.requests, more=compare)
            finished = _serve(job, updates, writer, tokenizer, progress, more=compare)
        records = pipeline.records()
        if args.trace is not None:
            names = [f"stage {index} {stage.device}" for index, stage in enumerate(stages)]
            write_chrome_trace(args.trace, names, records)
        return build_report(
            JobResult(
                plan=job.plan,
                loads=pipeline.load_reports,
                records=records,
                finished=finished,
                num_failed=len(job.errors),
                prompt_tokens=sum(len(request.prompt) for request in job.requests),
                startup_s=startup_s,
                speculation=pipeline.speculation(),
                plain=_serve_plainly(job, pipeline, updates) if compare else None,
            )
        )


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


def _settings(args: argparse.Namespace, plan: Plan) -> StageSettings:
    drafts = choose_speculation(plan, args.speculate, args.gamma, args.costs)
    return StageSettings(
        model_dir=str(Path(args.model or plan.model.path or "").resolve()),
        trace=args.trace is not None,
        speculate=drafts.mode,
        gamma=drafts.gamma,
        costs=drafts.costs,
        links=args.links,
        layer_cache=None if args.layer_cache is None else str(Path(args.layer_cache).resolve()),
    )


def _launch(args: argparse.Namespace) -> Launch:
    return Launch(
        ray_address=args.ray_address or ("auto" if args.no_auto else None),
        master_addr=args.master_addr,
        master_port=args.master_port,
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
            writer.write(row.index, answer_line(row, answer, job.plan.model.name))
        finished += update.finished
        progress.update(update.progress, writer.num_finished)
        if more and len(finished) == len(requests):
            break
    return finished


def _serve_plainly(job: Job, pipeline: Pipeline, updates: Iterator[Update]) -> list[Finished]:
    """Serve the same requests again on the same stages, without drafts."""
    _log.info("again without drafts, to compare")
    pipeline.submit([replace(request, may_draft=False) for request in job.requests])
    return [result for update in updates for result in update.finished]


def _answer(request: Request, result: Finished, tokenizer: Tokenizer) -> Answer:
    tokens = list(result.tokens)
    shown = tokens[:-1] if tokens and tokens[-1] in request.stop_ids else tokens
    # Decoding behind the prompt keeps a leading space that some tokenizers drop at the start.
    before = tokenizer.decode(request.prompt)
    whole = tokenizer.decode([*request.prompt, *shown])
    text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(shown)
    for stop in request.stop_texts:
        text = text.split(stop, 1)[0]
    return Answer(
        text=text,
        tokens=tokens,
        finish_reason=result.finish_reason,
        prompt_tokens=len(request.prompt),
    )


def _defaults(args: argparse.Namespace) -> Defaults:
    return Defaults(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )


def _show(report: Mapping[str, Any], args: argparse.Namespace) -> None:
    text = json.dumps(report, indent=1) + "\n"
    if args.report is not None:
        Path(args.report).write_text(text)
    if args.json:
        sys.stdout.write(text)
    elif report["stages"]:
        print_summary(report, Console(width=None if sys.stdout.isatty() else 110))
