"""Batch jobs on a GPU, and what the chance of a stop token costs.

    python benchmarks/pool_jobs.py [--write] [--jobs 32x512/100,32x128/200] [--precisions ...]

Llama-3.1-8B with random weights takes the jobs in turns. Rows: tokens/s where every row may end
with a token that it happens not to draw, with those of rows that end by their length alone beside.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from lib.rows import write_row

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.precision import Precision
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.launch.plans.manual_plan import manual_plan, on_gpu
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import Request
from llmpq.workload import Workload

KINDS = ("pool", "pool_stop")


def main() -> None:
    """Measure every precision and job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in name or a directory")
    parser.add_argument("--jobs", default="32x512/100,32x128/200")
    parser.add_argument("--precisions", default="w16a16,w4a16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    known = Path(args.model).is_dir()
    spec = ModelSpec.from_directory(args.model) if known else ModelSpec.by_name(args.model)
    for job in args.jobs.split(","):
        batch, prompt_len, gen_len = map(int, job.replace("x", "/").split("/"))
        workload = Workload(batch=batch, prompt_len=prompt_len, gen_len=gen_len)
        for precision in args.precisions.split(","):
            plan = manual_plan(
                spec,
                workload,
                precision=Precision(precision),
                prefill_microbatch=batch,
                decode_microbatch=batch,
            )
            rates = measured(on_gpu(plan) if torch.cuda.is_available() else plan, spec, args)
            tell(args, spec, job, precision, rates)


def measured(plan: Plan, spec: ModelSpec, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the tokens/s of each kind of job, a value a round, all kinds in turns."""
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    settings = StageSettings(
        model_dir=args.model,
        options=EngineOptions(load_format="dummy", backend="threads", offline=True),
    )
    with PipelineClient.start(plan, settings) as engine:
        for round_ in range(1 + args.rounds):
            for kind in KINDS:
                asked = requests(plan.workload, spec, round_, stops="stop" in kind)
                started_s = time.perf_counter()
                finished = engine.serve(asked)
                took_s = time.perf_counter() - started_s
                tokens = sum(len(one.tokens) for one in finished)
                if round_ > 0:  # the first one warms up
                    rates[kind].append(tokens / took_s)
        engine.end()
    return rates


def requests(workload: Workload, spec: ModelSpec, round_: int, *, stops: bool) -> list[Request]:
    """Return a job's requests, new ones each round; `stops`: a token may end each of them."""
    rng = random.Random(2 * round_ + stops)  # a prompt seen before would be found again
    return [
        Request(
            id=1000 * round_ + number + (500 if stops else 0),
            prompt=tuple(rng.randrange(spec.vocab) for _ in range(workload.prompt_len)),
            max_new=workload.gen_len,
            stop_ids=frozenset({spec.vocab - 1}) if stops else frozenset(),
        )
        for number in range(workload.batch)
    ]


def tell(
    args: argparse.Namespace,
    spec: ModelSpec,
    job: str,
    precision: str,
    rates: dict[str, list[float]],
) -> None:
    """Print, and write, stops against none."""
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    print(f"{job} {precision}: " + ", ".join(f"{k} {v:.0f}" for k, v in medians.items()))
    print(f"  stops {medians['pool_stop'] / medians['pool']:.4f} of none", flush=True)
    if args.write:
        write_row(
            "pool.jsonl",
            bench="pool_job_stops",
            case={"model": spec.name, "weights": "dummy", "job": job, "precision": precision},
            unit="tokens/s",
            samples=rates["pool_stop"],
            baselines={"pool": medians["pool"]},
            device=torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        )


if __name__ == "__main__":
    main()
