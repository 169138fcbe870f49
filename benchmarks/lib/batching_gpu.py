"""Continuous against static batching on a GPU: what `continuous_batching.py --device cuda` runs.

A large model's shape with dummy weights, 256 requests: prompts lognormal with ShareGPT's quartiles
(295, 1076, 3714 tokens, clipped to 4096), outputs lognormal (median 200, sigma 1.0, clipped to
16..1024). The same engine serves them both ways, on one GPU or on a stage per GPU; seconds are
those of the whole job. The value is continuous tokens/s, the baseline static.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import time
from pathlib import Path

import torch

from llmpq.kernels.gpu_timing import write_row
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.hand_plan import hand_plan
from llmpq.runtime.launch.stages.stage_settings import limits_of
from llmpq.runtime.request import Request
from llmpq.runtime.weights.sources import RandomSource
from llmpq.workload import Workload
from reference.open_stages import OpenStages

QUARTILES = (295, 1076, 3714)
"""Of ShareGPT's prompts, in tokens."""
LONGEST_PROMPT, SHORTEST_OUTPUT, LONGEST_OUTPUT = 4096, 16, 1024
MEDIAN_OUTPUT, SIGMA_OUTPUT = 200, 1.0
UPPER_QUARTILE = 0.6745
"""Of a standard normal distribution."""


def requests(count: int, vocab: int, seed: int) -> list[Request]:
    """Return requests whose prompts and outputs have lognormal lengths."""
    rng = random.Random(seed)
    low, median, high = QUARTILES
    sigma = math.log(high / low) / 2 / UPPER_QUARTILE

    def length(middle: float, spread: float, least: int, most: int) -> int:
        return min(most, max(least, round(rng.lognormvariate(math.log(middle), spread))))

    return [
        Request(
            id=number,
            prompt=tuple(rng.randrange(3, vocab) for _ in range(length(median, sigma, 1, 4096))),
            max_new=length(MEDIAN_OUTPUT, SIGMA_OUTPUT, SHORTEST_OUTPUT, LONGEST_OUTPUT),
        )
        for number in range(count)
    ]


def make_engine(args: argparse.Namespace) -> OpenStages:
    """Return the engine: a whole model, or a stage per GPU."""
    spec = ModelSpec.by_name(args.gpu_model)
    if args.layers is not None:
        spec = dataclasses.replace(spec, num_layers=args.layers)
    workload = Workload(
        batch=args.slots, prompt_len=LONGEST_PROMPT, gen_len=LONGEST_OUTPUT, dtype="bfloat16"
    )
    stages = args.stages
    plan = hand_plan(
        spec,
        workload,
        precision=Precision.parse(args.bits),
        splits=[spec.num_layers * i // stages for i in range(1, stages)],
        prefill_microbatch=args.prefill_rows,
        decode_microbatch=args.slots // stages,
    )
    source = RandomSource(spec, device="cuda:0")
    devices = [f"cuda:{index}" for index in range(stages)]
    return OpenStages(plan, spec, source, device=devices if stages > 1 else devices[0])


def described(args: argparse.Namespace) -> str:
    """Return the model's name, and how much of it was run."""
    whole = ModelSpec.by_name(args.gpu_model)
    part = "" if args.layers is None else f", {args.layers} of {whole.num_layers} layers"
    return f"{whole.name}{part}"


def warm_up(engine: OpenStages, slots: int) -> None:
    """Capture the decode step of every number of rows, and compile what prompts need."""
    job = [
        Request(id=i, prompt=(5,) * (16 + 40 * (i % 9)), max_new=8 + 2 * i) for i in range(slots)
    ]
    engine.run(Scheduler(limits_of(engine.plan)), job)


def main(args: argparse.Namespace) -> None:
    """Measure and append the row."""
    engine = make_engine(args)
    warm_up(engine, args.slots)
    spec = engine.computes[0].model.spec
    rates: dict[str, list[float]] = {"continuous": [], "static": []}
    for _ in range(args.repeats):
        for batching in rates:
            job = requests(args.requests, spec.vocab, args.seed)
            for device in range(args.stages):
                torch.cuda.synchronize(device)
            started_s = time.perf_counter()
            run = engine.run(Scheduler(limits_of(engine.plan, batching)), job)
            seconds = time.perf_counter() - started_s
            tokens = sum(len(request.tokens) for request in run.finished)
            rates[batching].append(tokens / seconds)
            print(
                f"{batching:10} {tokens} tokens, {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
            )
            for name, total in run.records[0].totals.items():
                print(f"    {name}: {total.steps} steps, {total.rows} rows, {total.busy_s:.2f} s")
    static = sorted(rates["static"])[len(rates["static"]) // 2]
    write_row(
        Path(args.rows),
        bench="continuous_batching",
        case={
            "model": described(args),
            "requests": args.requests,
            "slots": args.slots,
            "stages": args.stages,
            "measure": f"tokens/s of the job, {args.bits}, dummy weights",
        },
        unit="tokens/s",
        samples=rates["continuous"],
        baselines={"static": static},
        commit=args.commit,
        program="python benchmarks/continuous_batching.py",
    )
    print(f"continuous / static = {rates['continuous'][0] / static:.2f}")
