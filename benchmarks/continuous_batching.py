"""Continuous against static batching in the same engine, as rows of `engine.jsonl`.

    python benchmarks/continuous_batching.py            64 requests through the demo model
    python benchmarks/continuous_batching.py --device cuda --requests 256 --slots 64 --rows FILE
                                                        a large shape: batching_gpu.py

Requests of unequal length (lognormal, medians 64 and 48, sigma 0.8, clipped to 16..400) on one
stage, both ways in turn; the value is continuous tokens/s, the baseline static. Then two stages in
simulated time at the step costs just measured: the share of the time the stages are at work. Last,
what the scheduler itself takes.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lib import batching_gpu
from lib.rows import write_row

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.engine.slot_limits import Limits
from llmpq.runtime.launch.plans.hand_plan import hand_plan
from llmpq.runtime.launch.stages.stage_settings import limits_of
from llmpq.runtime.request import MicroBatch, Request, StepKind
from llmpq.runtime.trace import TraceEvent
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.workload import Workload
from reference.open_stages import OpenRun, OpenStages
from reference.schedule_replay import Replay, StageCost, replay

MODEL = Path(__file__).resolve().parents[1] / "examples" / "demo-7m"
SHORTEST, LONGEST = 16, 400


@dataclass(frozen=True)
class Timed:
    """A run and its speed."""

    tokens_per_s: float
    run: OpenRun


def requests(count: int, vocab: int, seed: int) -> list[Request]:
    """Return requests whose prompts and outputs have lognormal lengths."""
    rng = random.Random(seed)

    def length(median: int) -> int:
        drawn = round(rng.lognormvariate(math.log(median), 0.8))
        return min(LONGEST, max(SHORTEST, drawn))

    return [
        Request(
            id=number,
            prompt=tuple(rng.randrange(3, vocab) for _ in range(length(64))),
            max_new=length(48),
        )
        for number in range(count)
    ]


def fitted_cost(events: Sequence[TraceEvent], num_stages: int) -> StageCost:
    """Fit seconds = a + b * rows * q_len per kind to measured steps, shared by equal stages."""
    fits = {}
    for kind in ("prefill", "decode"):
        steps = [event for event in events if event.kind == kind]
        work = np.array([[1.0, event.rows * event.q_len] for event in steps])
        seconds = np.array([event.end_s - event.start_s for event in steps])
        fits[kind] = np.linalg.lstsq(work, seconds, rcond=None)[0]

    def cost(micro_batch: MicroBatch) -> float:
        kind = "prefill" if micro_batch.kind is StepKind.PREFILL else "decode"
        base, slope = fits[kind]
        elements = len(micro_batch.requests) * micro_batch.q_len
        return float(max(base + slope * elements, 1e-6)) / num_stages

    return cost


def simulate(plan: Plan, batching: str, job: Sequence[Request], cost: StageCost) -> Replay:
    """Replay a job on the plan's stages, all of the same cost."""
    scheduler = Scheduler(limits_of(plan, batching))
    return replay(scheduler, job, [cost] * len(plan.stages))


def timed_rate(engine: OpenStages, scheduler: Scheduler, job: Sequence[Request]) -> Timed:
    """Run a job on one stage; its rate by the thread's own clock leaves other programs out."""
    started_s = time.thread_time()
    run = engine.run(scheduler, job, keep_events=True)
    seconds = time.thread_time() - started_s
    return Timed(sum(len(request.tokens) for request in run.finished) / seconds, run)


def scheduler_cost(steps: int = 200) -> float:
    """Return microseconds of CPU time per step and running request: 256 running, 10,000 waiting."""
    limits = Limits(
        num_slots=256,
        prompt_len=8,
        max_len=16,
        prefill_microbatch=256,
        decode_microbatch=256,
    )
    scheduler = Scheduler(limits)
    for number in range(10_256):
        scheduler.submit(Request(id=number, prompt=(1,) * 8, max_new=2 + number % 8))
    started_s = time.thread_time()
    rows = 0
    for _ in range(steps):
        micro_batch = scheduler.next_micro_batch()
        assert micro_batch is not None
        scheduler.complete(micro_batch, [[0]] * len(micro_batch.requests))
        rows += scheduler.num_running
    return 1e6 * (time.thread_time() - started_s) / rows


def main() -> None:
    """Measure and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    gpu = parser.add_argument_group("with --device cuda")
    gpu.add_argument("--gpu-model", default="llama-3.1-8b", help="built-in architecture")
    gpu.add_argument("--bits", default="w16a16")
    gpu.add_argument("--layers", type=int, help="run only so many layers of it")
    gpu.add_argument("--stages", type=int, default=1, help="one per GPU")
    gpu.add_argument("--prefill-rows", type=int, default=8, help="prompts run together")
    gpu.add_argument("--rows", help="result file to append to")
    gpu.add_argument("--commit", help="commit a row names, where git cannot tell")
    args = parser.parse_args()
    if args.device == "cuda":
        batching_gpu.main(args)
        return
    torch.set_num_threads(1)
    disturbed = os.getloadavg()[0] > (os.cpu_count() or 1) / 2  # others use the processor
    spec = ModelSpec.from_directory(args.model)
    workload = Workload(batch=args.slots, prompt_len=LONGEST, gen_len=LONGEST, dtype="float32")

    def plan(num_stages: int) -> Plan:
        return hand_plan(
            spec,
            workload,
            splits=[spec.num_layers // num_stages] if num_stages > 1 else [],
            decode_microbatch=args.slots // num_stages,
        )

    engine = OpenStages(plan(1), spec, CheckpointSource(args.model, spec))
    rates: dict[str, list[float]] = {"continuous": [], "static": []}
    events: list[TraceEvent] = []
    for repeat in range(args.repeats):
        for batching in rates:
            job = requests(args.requests, spec.vocab, args.seed)
            done = timed_rate(engine, Scheduler(limits_of(engine.plan, batching)), job)
            rates[batching].append(done.tokens_per_s)
            events += done.run.records[0].events
            print(f"{repeat} {batching:10} {rates[batching][-1]:.0f} tokens/s")
    case = {"model": spec.name, "requests": args.requests, "slots": args.slots, "dtype": "float32"}
    static = statistics.median(rates["static"])
    row = write_row(
        "engine.jsonl",
        bench="continuous_batching",
        case=case | {"stages": 1, "measure": "tokens per second of CPU time"},
        unit="tokens/s",
        samples=rates["continuous"],
        baselines={"static": static},
        noisy=disturbed,
    )
    print(f"one stage: continuous / static = {row['value'] / static:.2f}")
    cost = fitted_cost(events, 2)
    simulated = {
        batching: simulate(plan(2), batching, requests(args.requests, spec.vocab, args.seed), cost)
        for batching in rates
    }
    write_row(
        "engine.jsonl",
        bench="continuous_batching",
        case=case | {"stages": 2, "measure": "busy share, simulated time"},
        unit="share",
        samples=[simulated["continuous"].busy_share],
        baselines={"static": simulated["static"].busy_share},
    )
    step = write_row(
        "engine.jsonl",
        bench="scheduler_step",
        case={"running": 256, "waiting": 10_000},
        unit="us per running request",
        samples=[scheduler_cost() for _ in range(args.repeats)],
    )
    print(f"scheduler: {step['value']:.2f} us of CPU time per step and running request")
    for batching, run in simulated.items():
        rate_s = run.tokens / run.makespan_s
        print(
            f"two stages, simulated: {batching:10} busy {run.busy_share:.0%}, {rate_s:.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
