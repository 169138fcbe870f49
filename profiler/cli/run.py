"""`llmpq-profile run` and `merge`: arguments in, costs.json and a table out."""

from __future__ import annotations

import logging
import os
from collections import Counter
from functools import reduce

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llmpq.commands.output_paths import check_files
from llmpq.costs.cost_model import CostModel, Shares
from llmpq.devices.cluster import Cluster, Device
from llmpq.devices.default_dtype import default_dtype
from llmpq.devices.joined_devices import default_shares, group_kinds, is_cut
from llmpq.devices.this_machine import this_machine, usable_cores
from llmpq.errors import ExitCode
from llmpq.missing_packages import require_modules
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import parse_shares, shares_text
from llmpq.plans.capabilities import execution_modes, lacking_sentence, packed_kv_sentence
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.cli.flags import MergeRequest, ProfileRequest, job_lengths
from llmpq.profiler.cli.tables import links_table, profile_tables, sums_table
from llmpq.profiler.timing.cases import Effort, Sampling, TimedCase, model_spec
from llmpq.profiler.timing.latency_fit import FEWEST_SHAPES
from llmpq.profiler.timing.profile_host import (
    HostProfile,
    ProfileJob,
    default_copies,
    devices_here,
    run,
)
from llmpq.profiler.timing.sample_file import SampleLog
from llmpq.profiler.timing.shape_grid import TIMED_LAYERS, Reach, make_grid

log = logging.getLogger(__name__)

GPU_SECONDS = 0.01
"""Of repeats a case on a GPU, whose graphs vary by 0.2 %."""
REST_S = 5e-3
"""Pause before a timed call where there will be several stages: each waits for the others."""
NOISY = 0.15
"""Median noise above which the run is called noisy."""


def main(request: ProfileRequest) -> int:
    """Profile and write costs.json; exit 8 if a case or a link could not be measured."""
    require_modules("torch", "sklearn")  # of the processes that measure, and of the fit at the end
    job = make_job(request)
    samples_path = request.samples or request.output.with_suffix(".samples.jsonl")
    check_files(
        {"--cluster": None if request.cluster is None else str(request.cluster)},
        {"--output": str(request.output), "--samples": str(samples_path)},
    )
    require_shapes(job)
    log.info("%s", foresight(job))
    with SampleLog(samples_path) as samples, _progress() as progress:
        total = sum(len(job.cases_of(device)) for device in job.devices)
        task = progress.add_task("starting", total=total)

        def on_case(case: TimedCase) -> None:
            progress.update(task, advance=1, description=case.target.title)

        outcome = run(job, samples, on_case)
    outcome.costs.save_json(request.output)
    report(outcome)
    log.info("wrote %s (samples: %s)", request.output, samples_path)
    complete = not (outcome.failed or outcome.failed_links)
    return ExitCode.DONE if complete else ExitCode.SOME_ROWS_FAILED


def merge(request: MergeRequest) -> int:
    """Join cost files."""
    models = [CostModel.load_json(path) for path in request.files]
    reduce(CostModel.merged, models).save_json(request.output)
    log.info(
        "wrote %s: %s",
        request.output,
        ", ".join(sorted({k for m in models for k in m.device_kinds})),
    )
    return ExitCode.DONE


def make_job(
    request: ProfileRequest,
    cluster: Cluster | None = None,
    *,
    devices: tuple[Device, ...] | None = None,
) -> ProfileJob:
    """Check the arguments and resolve model, cluster and grid.

    `cluster`: instead of the file; `devices`: of another host, instead of those found here.
    """
    spec = model_spec(request.model)
    if cluster is None:
        cluster = this_machine() if request.cluster is None else Cluster.load(request.cluster)
    if devices is None:
        devices = devices_here(cluster, request.device)
    on_gpu = any(not d.spec.is_cpu for d in devices)
    for name in ("max_batch", "max_len", "max_tokens", "copies"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    kv = tuple(KVPrecision.parse(b) for b in request.kv.split(","))
    dtype = request.dtype or default_dtype(spec, cluster)
    for precision in kv if on_gpu else ():
        ways = execution_modes(gpu=True, kv=precision, drafts=False, dtype=dtype)
        lacking = lacking_sentence(spec, ways, max_len=1)
        if lacking is None and precision is not KVPrecision.KV16:
            lacking = packed_kv_sentence((d.kind, d.spec) for d in devices)
        if lacking is not None:
            raise ValueError(lacking)
    kinds = {d.profile_kind for d in devices}
    shares = _shares(request.tensor_parallel, spec, cluster)
    return ProfileJob(
        model=request.model,
        spec=spec,
        devices=devices,
        copies={d.profile_kind: request.copies or default_copies(cluster, d) for d in devices},
        precisions=tuple(Precision.parse(b) for b in request.bits.split(",")),
        kv=kv,
        dtype=dtype,
        grid=make_grid(
            spec,
            Reach(
                max_batch=request.max_batch,
                max_len=request.max_len,
                max_tokens=request.max_tokens,
                job=_job(request.job, spec),
                cached_tokens=_room(devices, spec),
            ),
            quick=request.quick,
            on_gpu=on_gpu,
            verify_q=_counts(request.verify),
        ),
        sampling=_sampling(request),
        effort=Effort(
            seconds=0.02 if request.quick else GPU_SECONDS if on_gpu else 0.1,
            min_repeats=3,
            rest_s=REST_S if len(cluster.devices) > 1 else 0.0,
        ),
        links=len(cluster.devices) > 1,
        cpu_activations=request.cpu_activations,
        shares=shares,
        groups=tuple(g for g in group_kinds(cluster.devices) if shares and kinds.issuperset(g)),
    )


def _shares(text: str | None, spec: ModelSpec, cluster: Cluster) -> tuple[Shares, ...]:
    """Return the shares of layers whose parts are timed: as asked, or those of a node's GPUs."""
    if text is not None:
        found = [parse_shares(part) for part in text.split(",")]
        if len(cluster.devices) == 1 and any(found):
            raise ValueError(
                f"--tensor-parallel {text}: the cluster has one device, which shares stages with "
                "no other; leave it out"
            )
    else:
        found = list(default_shares([d for d in cluster.devices if not d.spec.is_cpu]))
    for shares in found if text is not None else ():
        if shares and not is_cut(spec, shares):
            raise ValueError(
                f"--tensor-parallel {shares_text(shares)}: layers of {spec.name} cannot be shared "
                "so; take fewer devices"
            )
    return tuple(one for one in dict.fromkeys(found) if one and is_cut(spec, one))


def _room(devices: tuple[Device, ...], spec: ModelSpec) -> int | None:
    """Return the tokens whose KV takes a quarter of the smallest GPU while layers are timed."""
    memory = [device.spec.memory for device in devices if not device.spec.is_cpu]
    token_bytes = 2 * spec.kv_vectors * spec.kv_heads * spec.head_dim
    return min(memory) // (4 * TIMED_LAYERS * token_bytes) if memory else None


def _sampling(request: ProfileRequest) -> Sampling:
    """Return how tokens are sampled."""
    return Sampling.parse_data(
        {"temperature": request.temperature, "top_k": request.top_k, "top_p": request.top_p},
        where="sampling",
    )


def report(outcome: HostProfile) -> None:
    """Print the tables, and say what failed or was noisy."""
    console = Console()
    for table in profile_tables(outcome):
        console.print(table)
    if outcome.costs.links:
        console.print(links_table(outcome.costs))
    if outcome.costs.sums:
        console.print(sums_table(outcome.costs))
    for target in dict.fromkeys(case.target for case in outcome.failed):
        log.warning("left out %s: not all of its cases could be measured", target.title)
    for case, error in outcome.failed.items():
        log.warning("not measured: %s: %s", case.title, error)
    noise = sorted(outcome.noise.values())
    if noise and noise[len(noise) // 2] > NOISY:
        log.warning(
            "the times are noisy (median +-%.0f %%), as they are beside other programs (load %.1f "
            "on %d cores); profile again on an idle machine",
            100 * noise[len(noise) // 2],
            os.getloadavg()[0],
            usable_cores(),
        )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def require_shapes(job: ProfileJob) -> None:
    """Raise `ValueError`, before anything is timed, where a part has too few shapes for a fit."""
    timed = (case for device in job.devices for case in job.cases_of(device) if not case.launch)
    for target, count in Counter(case.target for case in timed).items():
        if count < FEWEST_SHAPES:
            raise ValueError(
                f"{target.title} would be timed at {count} shape{'s' * (count != 1)}, its fit "
                f"needs {FEWEST_SHAPES}: give a larger --max-batch or --max-len"
            )


def foresight(job: ProfileJob) -> str:
    """Return how many cases a job has; how long each takes is seen once some are timed."""
    count = sum(len(job.cases_of(device)) for device in job.devices)
    return (
        f"{count:,} cases on {', '.join(device.profile_kind for device in job.devices)}; fewer "
        "with --quick, --bits or --job; those on disk are not timed again"
    )


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ValueError(f"--verify: expected numbers such as 2,4, got '{text}'") from None
    if any(count < 2 for count in counts):
        raise ValueError(f"--verify: a verify step has at least 2 tokens, got '{text}'")
    return counts


def _job(text: str | None, spec: ModelSpec) -> tuple[int, int] | None:
    """Return prompt tokens and new tokens of `512/100`."""
    if text is None:
        return None
    prompt, gen = job_lengths(text, least_gen=2)
    if prompt + gen > spec.max_positions:
        raise ValueError(
            f"--job: {text} needs {prompt + gen} positions, {spec.name} has {spec.max_positions}"
        )
    return prompt, gen
