"""A batch job on the paged engine beside the same job on slots of the plan's length, on this CPU.

    python benchmarks/batch_engines.py [--model examples/demo-7m] [--rounds 5] [--write]

Both engines hold the same weights in one process and take the job in turns, so that what others do
on this machine meets both alike. The value is tokens a second of CPU time, paged over slots, the
median of the rounds; every round's tokens must be equal.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from continuous_batching import MODEL, requests
from lib.rows import write_row

from llmpq.model_spec import ModelSpec
from llmpq.runtime.engine.paged_scheduler import PagedScheduler
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.hand_plan import hand_plan
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.launch.stages.stage_settings import StageSettings, limits_of
from llmpq.runtime.request import Request
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.workload import Workload
from reference.open_stages import OpenStages


@dataclass(frozen=True)
class Case:
    """A job and the plan it is served by."""

    name: str
    prompt_len: int
    gen_len: int
    batch: int
    num_stages: int
    make: Callable[[int], list[Request]]


def equal_rows(count: int, prompt_len: int, new: int, vocab: int) -> list[Request]:
    """Return requests of one length."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(3, vocab) for _ in range(prompt_len)) for _ in range(count)]
    return [Request(id=n, prompt=prompt, max_new=new) for n, prompt in enumerate(prompts)]


def cases() -> list[Case]:
    """Return what is compared: short, long and unequal prompts, on one stage and on two."""
    found = []
    for stages in (1, 2):
        for batch in (1, 8, 32):
            for prompt, new in ((32, 48), (384, 16)):
                found.append(
                    Case(
                        f"{prompt}/{new}", prompt, new, batch, stages,
                        lambda vocab, b=batch, p=prompt, n=new: equal_rows(2 * b, p, n, vocab),
                    )
                )  # fmt: skip
        found.append(Case("lognormal", 400, 400, 8, stages, lambda vocab: requests(24, vocab, 0)))
    return found


def measure(case: Case, spec: ModelSpec, model: str, rounds: int) -> list[float]:
    """Return paged over slots, a round each; `AssertionError` if a token differs."""
    plan = hand_plan(
        spec,
        Workload(
            batch=case.batch, prompt_len=case.prompt_len, gen_len=case.gen_len, dtype="float32"
        ),
        splits=[spec.num_layers // case.num_stages] if case.num_stages > 1 else [],
        prefill_microbatch=min(4, case.batch),
        decode_microbatch=max(1, case.batch // case.num_stages),
    )
    source = CheckpointSource(model, spec)
    pool = PoolPlan(plan, spec, StageSettings(model_dir=model))
    slots = OpenStages(plan, spec, source)
    paged = OpenStages(plan, spec, source, pool=pool.size)
    limits = limits_of(plan)
    ratios = []
    for number in range(rounds + 1):
        rates, tokens = [], []
        for stages, scheduler in (
            (slots, Scheduler(limits)),
            (paged, PagedScheduler(pool.limits)),
        ):
            started_s = time.process_time()
            run = stages.run(scheduler, case.make(spec.vocab))
            rates.append(1 / (time.process_time() - started_s))
            tokens.append(run.tokens)
        assert tokens[0] == tokens[1], "the engines' tokens differ"
        if number:  # the first round warms up
            ratios.append(rates[1] / rates[0])
    return ratios


def main() -> None:
    """Measure every case and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = ModelSpec.from_directory(args.model)
    for case in cases():
        ratios = measure(case, spec, args.model, args.rounds)
        middle = sorted(ratios)[len(ratios) // 2]
        print(
            f"{case.num_stages} stages, batch {case.batch:2}, {case.name:9}: {middle:.2f} of slots "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
        if args.write:
            what = {
                "model": Path(args.model).name, "stages": case.num_stages, "batch": case.batch,
                "lengths": case.name, "dtype": "float32", "measure": "tokens per s of CPU time",
            }  # fmt: skip
            write_row("engine.jsonl", bench="paged_over_slots", case=what, unit="paged / slots",
                      samples=ratios, noisy=True)  # fmt: skip


if __name__ == "__main__":
    main()
