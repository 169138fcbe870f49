"""Speculation over several stages, a GPU each.

    python benchmarks/speculation_stages.py --stages 2 --grid 8:1024 --gammas 2 3 --rows FILE

Dummy weights, acceptance replayed, prompts skipped: see speculation_gpu.py. The stages are threads
of one process; the baseline is the same engine without drafts, on the same GPUs in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch
from lib.speculation_bed import PLAIN_STEPS
from lib.speculation_replay import (
    ROOM,
    Guesser,
    Replayed,
    WithoutPrompts,
    add_arguments,
    fill_packed,
    fill_plain,
    measured_acceptance,
    prompts,
    rates,
)
from speculation_gpu import add

from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.backends.gpu.cuda_stage import CudaStageCompute
from llmpq.runtime.cache.dual_kv import DualKV
from llmpq.runtime.cache.plain_kv import PlainKVCache
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.hand_plan import hand_plan
from llmpq.runtime.launch.stages.stage_settings import limits_of
from llmpq.runtime.request import MicroBatch, Request, StepKind
from llmpq.runtime.weights.sources import RandomSource
from llmpq.speculation import SpeculationMode, expected_tokens
from llmpq.workload import Workload
from reference.open_stages import OpenStages

ROUNDS_TIMED = 40


class LoggingScheduler(Scheduler):
    """Keeps when each step's tokens were known, and how many there were by then."""

    log: list[tuple[float, int, int]]

    def complete(self, micro_batch: MicroBatch, tokens: Sequence[Sequence[int]]) -> list[Request]:
        """As the scheduler does."""
        finished = super().complete(micro_batch, tokens)
        if micro_batch.kind in (StepKind.DECODE, StepKind.VERIFY):
            self.log.append((time.perf_counter(), self.generated_tokens, len(finished)))
        return finished


def make_engine(
    args: argparse.Namespace, batch: int, context: int, mode: SpeculationMode | None
) -> OpenStages:
    """Return a stage per GPU whose cache holds noise."""
    spec = ModelSpec.by_name(args.model)
    if args.layers is not None:
        spec = dataclasses.replace(spec, num_layers=args.layers)
    plan = hand_plan(
        spec,
        Workload(batch=batch, prompt_len=context, gen_len=ROOM, dtype=args.dtype),
        precision=Precision.parse(args.target),
        splits=[spec.num_layers * i // args.stages for i in range(1, args.stages)],
        prefill_microbatch=batch // args.stages,
        decode_microbatch=batch // args.stages,
    )
    devices = [f"cuda:{index}" for index in range(args.stages)]
    source = RandomSource(spec, device=devices[0])
    engine = OpenStages(plan, spec, source, device=devices, speculate=mode)
    for compute in engine.computes:
        inner = compute.kv.inner if isinstance(compute.kv, DualKV) else compute.kv
        assert isinstance(inner, PlainKVCache)
        fill_plain(inner)
        if isinstance(compute.kv, DualKV):
            fill_packed(compute.kv.copy)
    return engine


def rate(engine: OpenStages, drafter: FixedDrafter | None, context: int, new: int) -> list[float]:
    """Return samples of tokens/s."""
    batch = engine.plan.workload.batch
    scheduler = LoggingScheduler(limits_of(engine.plan), drafter=drafter)
    scheduler.log = []
    kept = engine.computes
    engine.computes = [WithoutPrompts(compute) for compute in kept]  # type: ignore[misc]
    try:
        texts = enumerate(prompts(batch, context))
        jobs = [Request(id=i, prompt=text, max_new=new) for i, text in texts]
        engine.run(scheduler, jobs)
    finally:
        engine.computes = kept
    return rates(scheduler.log)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--mode", default="w4kv4", help="how drafts are made")
    parser.add_argument("--stages", type=int, default=2, help="one per GPU")
    parser.add_argument("--layers", type=int, help="as many only, to compile kernels; no result")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Measure plain decoding and drafts of some lengths; append the rows."""
    accepted = {
        name: measured_acceptance(args.mode, args.target) if name == "measured" else float(name)
        for name in args.acceptance
    }
    for batch, contexts in args.grid:
        for context in contexts:
            plain_engine = make_engine(args, batch, context, None)
            plain = statistics.median(rate(plain_engine, None, context, PLAIN_STEPS))
            del plain_engine
            engine = make_engine(args, batch, context, args.mode)
            last = engine.computes[-1]
            assert isinstance(last, CudaStageCompute) and last.speculation is not None
            replayed = Replayed(batch, torch.device("cuda", args.stages - 1))
            last.speculation.judge = replayed
            for name in args.acceptance:
                replayed.rate.fill_(accepted[name])
                for gamma in args.gammas or (2, 3, 4):
                    drafter = Guesser(args.mode, gamma)
                    new = int(ROUNDS_TIMED * expected_tokens(accepted[name], gamma))
                    samples = rate(engine, drafter, context, new)
                    case = {
                        "model": args.model,
                        "mode": f"{args.mode} on {args.target}",
                        "stages": args.stages,
                        "batch": batch,
                        "context": context,
                        "dtype": args.dtype,
                        "acceptance": name,
                        "gamma": gamma,
                        "weights": "dummy, acceptance replayed",
                    }
                    beside = {"rate": accepted[name]}
                    add(args, "speculation_stages", case, samples, plain, beside, None)
                    print(
                        f"{args.stages} stages {case['mode']} b{batch} ctx{context} a {name} "
                        f"gamma {gamma}: {statistics.median(samples) / plain:.3f}x, plain "
                        f"{plain:.0f} tok/s",
                        flush=True,
                    )


if __name__ == "__main__":
    main(parse())
