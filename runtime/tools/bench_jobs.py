"""A job of `llmpq-dist bench`, run and repeated on the stages of a plan."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.runtime.cli.speculation_choice import Drafts
from llmpq.runtime.launch.engine import Engine
from llmpq.runtime.launch.launcher import Launch
from llmpq.runtime.launch.stages.stage_settings import LinkChoice, StageSettings
from llmpq.runtime.report.job_report import JobResult, build_report
from llmpq.runtime.request import Finished, Request
from llmpq.runtime.trace import LoadReport, StageRecord

_log = logging.getLogger("llmpq.bench")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One job, ready to be repeated."""

    plan: Plan
    spec: ModelSpec
    model: str
    dummy: bool
    graphs: bool
    gpu_pool: bool | None
    warm_up: int
    repeat: int
    seed: int
    links: LinkChoice = "auto"
    launch: Launch = Launch()
    drafts: Drafts = Drafts()
    compare: bool = False
    """Serve every job again without drafts."""


def prompts_of(bench: Bench, job: int, *, may_draft: bool = True) -> list[Request]:
    """Return a job's requests, new ones each time: random prompts, no stop, greedy."""
    workload = bench.plan.workload
    rng = random.Random(bench.seed * 1000 + job)
    return [
        Request(
            id=index,
            prompt=tuple(rng.randrange(bench.spec.vocab) for _ in range(workload.prompt_len)),
            max_new=workload.gen_len,
            may_draft=may_draft,
        )
        for index in range(workload.batch)
    ]


def run_jobs(bench: Bench) -> list[dict[str, Any]]:
    """Time the job on the plan's stages; return the report of every timed repetition."""
    plan, started_s = bench.plan, time.perf_counter()
    with Engine.start(plan, _settings(bench), launch=bench.launch) as engine:
        startup_s = time.perf_counter() - started_s
        _log.info("loaded in %.1f s", startup_s)

        def job(index: int) -> JobResult:
            finished = engine.serve(prompts_of(bench, index))
            records, counts, plain = engine.records(), engine.speculation(), None
            if bench.compare:
                plain = engine.serve(prompts_of(bench, index, may_draft=False))
                engine.records()  # what the plain job left is no part of the next one's
            return _result(bench, engine.load_reports, records, finished, startup_s, counts, plain)

        reports = _repeat(bench, job)
        peaks = engine.peak_memory()
        engine.end()
    for report in reports:
        if any(peaks):
            report["peak_memory_bytes"] = max(peaks)
    return reports


def _settings(bench: Bench) -> StageSettings:
    return StageSettings(
        model_dir=bench.model,
        load_format="dummy" if bench.dummy else "auto",
        speculate=bench.drafts.mode,
        gamma=bench.drafts.gamma,
        costs=bench.drafts.costs,
        graphs=bench.graphs,
        gpu_pool=bench.gpu_pool,
        links=bench.links,
    )


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
    bench: Bench,
    loads: Sequence[LoadReport],
    records: Sequence[StageRecord],
    finished: Sequence[Finished],
    startup_s: float,
    speculation: dict[str, Any] | None,
    plain: Sequence[Finished] | None,
) -> JobResult:
    workload = bench.plan.workload
    return JobResult(
        plan=bench.plan,
        loads=loads,
        records=records,
        finished=finished,
        num_failed=0,
        prompt_tokens=workload.batch * workload.prompt_len,
        startup_s=startup_s,
        speculation=speculation,
        plain=plain,
    )
