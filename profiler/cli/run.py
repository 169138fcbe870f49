"""`llmpq-profile run` and `merge`: arguments in, costs.json and a table out."""

from __future__ import annotations

import argparse
import logging
from functools import reduce
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llmpq.cluster import Cluster, Device
from llmpq.cost_model import CostModel
from llmpq.errors import ExitCode
from llmpq.model_spec import ModelSpec
from llmpq.output_paths import check_files
from llmpq.precision import WEIGHT_ONLY, KVPrecision, Precision
from llmpq.profiler.cli.tables import links_table, profile_tables
from llmpq.profiler.timing.cases import Case, Sampling, model_spec
from llmpq.profiler.timing.profile_host import (
    Job,
    Outcome,
    default_copies,
    devices_here,
    run,
)
from llmpq.profiler.timing.sample_file import SampleLog
from llmpq.profiler.timing.shape_grid import cases, make_grid
from llmpq.runtime.cli.flags_without_effect import refuse_idle
from llmpq.workload import DTYPE_BYTES, Dtype

log = logging.getLogger(__name__)

GPU_SECONDS = 0.01
"""Of repeats a case on a GPU, whose graphs vary by 0.2 %."""
REST_S = 5e-3
"""Pause before a timed call where there will be several stages: each waits for the others."""
NOISY = 0.15
"""Median noise above which the run is called noisy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    bits = ",".join(str(p.weight_bits) for p in WEIGHT_ONLY)
    parser.add_argument("--model", required=True, help="model directory, or a built-in name")
    parser.add_argument("--cluster", type=Path, required=True, help="cluster YAML")
    parser.add_argument("-o", "--output", type=Path, required=True, help="costs.json to write")
    parser.add_argument("--samples", type=Path, help="samples.jsonl to resume from and append to")
    parser.add_argument("--device", help="only this device kind (default: all kinds present here)")
    parser.add_argument(
        "--dtype", choices=DTYPE_BYTES, help="activations (default: float32 on CPU, else the model)"
    )
    parser.add_argument("--bits", default=bits, help=f"precisions to time (default {bits})")
    parser.add_argument("--kv", default="kv16", help="KV precisions to time (default kv16)")
    parser.add_argument("--verify", default="", help="also time verifying of this many tokens: 2,4")
    parser.add_argument("--temperature", type=float, default=0.0, help="time sampled tokens")
    parser.add_argument("--top-k", type=int, help="with --temperature (default: all tokens)")
    parser.add_argument("--top-p", type=float, default=1.0, help="with --temperature")
    parser.add_argument("--quick", action="store_true", help="few shapes, short repeats")
    parser.add_argument("--max-batch", type=int, help="largest micro-batch (default 16 quick, 32)")
    parser.add_argument(
        "--max-len", type=int, help="longest prompt or cache (default 2048, quick 256)"
    )
    parser.add_argument(
        "--max-tokens", type=int, help="most tokens of one prefill (default 4096, on a GPU 32768)"
    )
    parser.add_argument(
        "--job", help="time only what jobs of such prompt and new tokens need: 512/100"
    )
    parser.add_argument(
        "--copies",
        type=int,
        help="processes that time at once (default: CPU stages of the node, as cores allow)",
    )
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Profile and write costs.json; exit 8 if a case or a link could not be measured."""
    job = make_job(args)
    samples_path = args.samples or args.output.with_suffix(".samples.jsonl")
    check_files(
        {"--cluster": args.cluster}, {"--output": args.output, "--samples": str(samples_path)}
    )
    with SampleLog(samples_path) as samples, _progress() as progress:
        task = progress.add_task("starting", total=_num_cases(job))

        def on_case(case: Case) -> None:
            progress.update(task, advance=1, description=case.target.title)

        outcome = run(job, samples, on_case)
    outcome.costs.save_json(args.output)
    report(outcome)
    log.info("wrote %s (samples: %s)", args.output, samples_path)
    complete = not (outcome.failed or outcome.failed_links)
    return ExitCode.DONE if complete else ExitCode.SOME_ROWS_FAILED


def merge(args: argparse.Namespace) -> int:
    """Join cost files."""
    models = [CostModel.load_json(path) for path in args.files]
    reduce(CostModel.merged, models).save_json(args.output)
    log.info(
        "wrote %s: %s", args.output, ", ".join(sorted({k for m in models for k in m.device_kinds}))
    )
    return ExitCode.DONE


def make_job(args: argparse.Namespace) -> Job:
    """Check the arguments and resolve model, cluster and grid."""
    spec, cluster = model_spec(args.model), Cluster.load(args.cluster)
    devices = devices_here(cluster, args.device)
    on_gpu = any(not d.spec.is_cpu for d in devices)
    max_batch = args.max_batch or (16 if args.quick else 32)
    for name in ("max_batch", "max_len", "max_tokens", "copies"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.job and args.max_len:
        raise ValueError(
            "--max-len says nothing beside --job, which names its lengths; leave it out"
        )
    return Job(
        model=args.model,
        spec=spec,
        devices=devices,
        copies={d.profile_kind: args.copies or default_copies(cluster, d) for d in devices},
        precisions=tuple(Precision.parse(b) for b in args.bits.split(",")),
        kv=tuple(KVPrecision.parse(b) for b in args.kv.split(",")),
        dtype=args.dtype or default_dtype(spec, devices),
        grid=make_grid(
            spec,
            quick=args.quick,
            on_gpu=on_gpu,
            max_batch=max_batch,
            max_len=args.max_len,
            max_tokens=args.max_tokens,
            verify_q=_counts(args.verify),
            job=_job(args.job, spec),
        ),
        sampling=_sampling(args),
        rest_s=REST_S if len(cluster.devices) > 1 else 0.0,
        seconds_per_case=0.02 if args.quick else GPU_SECONDS if on_gpu else 0.1,
        min_repeats=3,
        links=len(cluster.devices) > 1,
    )


def _sampling(args: argparse.Namespace) -> Sampling:
    """Return how tokens are sampled; `ValueError` for flags that greedy ones do not heed."""
    sampling = Sampling.parse_data(
        {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p},
        where="sampling",
    )
    if args.temperature == 0:
        given = {"--top-k": args.top_k is not None, "--top-p": args.top_p != 1}
        refuse_idle(given, "on greedy tokens", "add --temperature T")
    return sampling


def default_dtype(spec: ModelSpec, devices: tuple[Device, ...]) -> Dtype:
    """Return float32 for CPUs, which compute fastest in it, and the model's own dtype for GPUs."""
    return "float32" if all(d.spec.is_cpu for d in devices) else spec.dtype


def report(outcome: Outcome) -> None:
    """Print the tables, and say what failed or was noisy."""
    console = Console()
    for table in profile_tables(outcome):
        console.print(table)
    if outcome.costs.links:
        console.print(links_table(outcome.costs))
    for target in dict.fromkeys(case.target for case in outcome.failed):
        log.warning("left out %s: not all of its cases could be measured", target.title)
    for case, error in outcome.failed.items():
        log.warning("not measured: %s: %s", case.title, error)
    noise = sorted(outcome.noise.values())
    if noise and noise[len(noise) // 2] > NOISY:
        log.warning(
            "the times are noisy (median +-%.0f %%): other programs are running; profile again on "
            "an idle machine",
            100 * noise[len(noise) // 2],
        )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _num_cases(job: Job) -> int:
    total = 0
    for device in job.devices:
        kind = device.profile_kind
        total += len(
            cases(
                job.grid,
                device_kind=kind,
                dtype=job.dtype,
                precisions=job.precisions,
                kv=job.kv,
            )
        )
    return total


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
    prompt, _, gen = text.partition("/")
    if not (prompt.isdecimal() and gen.isdecimal() and int(prompt) and int(gen) > 1):
        raise ValueError(f"--job: expected prompt/new tokens such as 512/100, got '{text}'")
    if int(prompt) + int(gen) > spec.max_positions:
        raise ValueError(
            f"--job: {text} needs {int(prompt) + int(gen)} positions, {spec.name} has "
            f"{spec.max_positions}"
        )
    return int(prompt), int(gen)
