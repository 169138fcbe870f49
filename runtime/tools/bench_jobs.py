"""A job of `llmpq-dist bench`, run and repeated: through Ray, or in this process."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.runtime.backends.cuda_stage import CudaStageCompute
from llmpq.runtime.cli.speculation_choice import Drafts
from llmpq.runtime.drafts.drafters import AutoDrafter, FixedDrafter, speculation_report
from llmpq.runtime.engine.mailbox import Finished
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.stage_actor import make_drafter
from llmpq.runtime.launch.stage_settings import LinkChoice, StageSettings, limits_of
from llmpq.runtime.launch.threads import EngineRun, ThreadEngine
from llmpq.runtime.report.job_report import JobResult, build_report
from llmpq.runtime.request import Request
from llmpq.runtime.trace import LoadReport, StageRecord
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.runtime.weights.sources import RandomSource, TensorSource

_log = logging.getLogger("llmpq.bench")


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
    loads, drafter = _with_drafts(bench, engine)
    startup_s = time.perf_counter() - started_s
    _log.info("loaded in %.1f s", startup_s)

    def serve(requests: Sequence[Request]) -> EngineRun:
        return engine.run(Scheduler(limits_of(plan), drafter=drafter), requests)

    def job(index: int) -> JobResult:
        run = serve(prompts_of(bench, index))
        counts = speculation_report(drafter) if drafter is not None else None
        plain = None
        if bench.compare:
            plain = serve(prompts_of(bench, index, may_draft=False)).finished
        return _result(bench, loads, run.records, run.finished, startup_s, counts, plain)

    reports = _repeat(bench, job)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
        for report in reports:
            report["peak_memory_bytes"] = peak
    return reports


def _with_drafts(
    bench: Bench, engine: ThreadEngine
) -> tuple[list[LoadReport], FixedDrafter | None]:
    """Prepare the stages for drafts, if any; return what they hold then and who drafts."""
    mode = bench.drafts.mode
    if mode is None:
        return engine.loads, None
    workload = bench.plan.workload
    loads = [
        replace(load, draft_bytes=compute.enable_speculation(mode, workload))
        for compute, load in zip(engine.computes, engine.loads, strict=True)
    ]
    drafter = make_drafter(bench.plan, _settings(bench))
    if drafter is None:
        first = engine.computes[0]
        assert isinstance(first, CudaStageCompute), "draft lengths need a cost model"
        times = first.step_times()
        drafter = AutoDrafter(mode, times, lengths=times.lengths)
    return loads, drafter


def run_through_ray(bench: Bench) -> list[dict[str, Any]]:
    """Time the job on the plan's stages, placed by Ray."""
    # Ray takes seconds to import and is not needed in-process.
    from llmpq.runtime.launch.engine import Engine
    from llmpq.runtime.launch.launcher import Launch

    plan, started_s = bench.plan, time.perf_counter()
    launch = Launch(ray_address=bench.ray_address, master_addr=bench.master_addr)
    with Engine.start(plan, _settings(bench), launch=launch) as pipeline:
        startup_s = time.perf_counter() - started_s
        updates = pipeline.updates()
        num_jobs = bench.warm_up + bench.repeat

        def serve(requests: Sequence[Request], *, more: bool) -> list[Finished]:
            pipeline.submit(requests, more=more)
            finished: list[Finished] = []
            while len(finished) < plan.workload.batch:
                finished += next(updates).finished
            if not more:
                for _ in updates:
                    pass
            return finished

        def job(index: int) -> JobResult:
            more, plain = index + 1 < num_jobs, None
            finished = serve(prompts_of(bench, index), more=more or bench.compare)
            records, counts = pipeline.records(), pipeline.speculation()
            if bench.compare:
                plain = serve(prompts_of(bench, index, may_draft=False), more=more)
                pipeline.records()  # what the plain job left is no part of the next one's
            return _result(
                bench, pipeline.load_reports, records, finished, startup_s, counts, plain
            )

        return _repeat(bench, job)


def _settings(bench: Bench) -> StageSettings:
    is_directory = Path(bench.model).is_dir()
    return StageSettings(
        model_dir=str(Path(bench.model).resolve()) if is_directory else bench.model,
        load_format="dummy" if bench.dummy else "auto",
        speculate=bench.drafts.mode,
        gamma=bench.drafts.gamma,
        costs=bench.drafts.costs,
        graphs=bench.graphs,
        links=bench.links,
    )


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
