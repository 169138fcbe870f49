"""Acceptance and speed of every speculation mode, as rows of `speculation.jsonl`.

    python benchmarks/speculation.py                    the demo model on examples/heldout.txt
    python benchmarks/speculation.py --model DIR --text FILE --gammas 3
    python benchmarks/speculation.py --on cuda:0 --dtype bfloat16 --rows FILE   acceptance on a GPU

`acceptance`: at many places of held-out text, draft gamma tokens once and verify them, greedily;
the value is the share of judged drafts (those up to the first refused one) that are accepted. Free
running text would flatter: small models repeat themselves. `speculation`: tokens per second of CPU
time of free running greedy decoding; the baseline is the same engine on the same target without
drafts, in the same run, each in an engine that holds only what it needs.
On the CPU most drafts save no time: rounding and unpacking cost more than the bytes they save.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lib.rows import write_row

from llmpq.kernels import gpu_timing
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.speculation import SpeculationMode
from llmpq.precision import Precision
from llmpq.runtime.drafts.drafters import Acceptance, FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.requests.request import Request
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import planned_pool
from llmpq.workload import Workload
from reference.open_stages import OpenStages

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Mode:
    """A way of drafting, and the target it drafts for."""

    name: SpeculationMode
    target: Precision


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is run."""

    tokens: Sequence[int]
    windows: int
    """Places of the text at which drafts are judged."""
    requests: int
    prompt_len: int
    max_new: int


MODES = (
    Mode("qspec", Precision.W4A16),
    Mode("w4kv4", Precision.W16A16),
    Mode("w4kv4", Precision.W8A16),
    Mode("kv4", Precision.W16A16),
    Mode("ngram", Precision.W16A16),
)


def jobs(tokens: Sequence[int], count: int, prompt_len: int, max_new: int) -> list[Request]:
    """Return evenly spaced windows of a text as prompts."""
    stride = (len(tokens) - prompt_len) // count
    return [
        Request(id=i, prompt=tuple(tokens[i * stride : i * stride + prompt_len]), max_new=max_new)
        for i in range(count)
    ]


def scheduler_of(engine: OpenStages, drafter: FixedDrafter | None) -> Scheduler:
    """Return a scheduler of all requests at once, as a job has them."""
    plan = engine.plan
    pool = planned_pool(
        engine.spec, plan.workload, None, prefill_microbatch=plan.prefill_microbatch
    )
    limits = PoolLimits(
        num_blocks=pool.num_blocks,
        window=pool.window,
        window_blocks=pool.window_blocks,
        max_rows=pool.slots,
        max_len=pool.max_len + 1,
        step_tokens=plan.prefill_step_tokens,
        decode_rows=plan.decode_microbatch,
        prefix_cache=False,
    )
    return Scheduler(limits, drafter=drafter)


def measure_acceptance(engine: OpenStages, mode: Mode, gamma: int, work: Work) -> Acceptance:
    """Draft and verify once behind every window."""
    drafter = FixedDrafter(mode.name, gamma)
    windows = jobs(work.tokens, work.windows, work.prompt_len, gamma + 2)
    engine.run(scheduler_of(engine, drafter), windows)
    return drafter.acceptance


def measure_speed(
    engine: OpenStages, plain: OpenStages, mode: Mode, gamma: int, work: Work
) -> tuple[list[float], list[float]]:
    """Return tokens/s with drafts and without, in turn; the tokens must be the same.

    `plain` is an engine of its own: some drafts keep a copy of the cache that every step feeds.
    """
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        runs = []
        for place, drafter in enumerate((FixedDrafter(mode.name, gamma), None)):
            used = engine if drafter is not None else plain
            requests = jobs(work.tokens, work.requests, work.prompt_len, work.max_new)
            started_s = time.thread_time()
            runs.append(used.run(scheduler_of(engine, drafter), requests))
            seconds = time.thread_time() - started_s
            rates[place].append(sum(map(len, runs[-1].tokens.values())) / seconds)
        assert engine.plan.workload.dtype != "float32" or runs[0].tokens == runs[1].tokens
    return rates


def main() -> None:
    """Measure and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(EXAMPLES / "demo-7m"))
    parser.add_argument("--text", default=str(EXAMPLES / "heldout.txt"))
    parser.add_argument("--gammas", type=int, nargs="*", help="default: 2..7")
    parser.add_argument("--modes", nargs="*", help="only these")
    parser.add_argument("--no-speed", action="store_true", help="acceptance only")
    parser.add_argument("--speed-gamma", type=int, default=3)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=192)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--on", default="cpu", help="where acceptance is measured; speed on a CPU")
    parser.add_argument("--rows", help="result file to append to")
    parser.add_argument("--commit", help="commit a row names, where git cannot tell")
    args = parser.parse_args()
    args.gammas = args.gammas or [2, 3, 4, 5, 6, 7]
    torch.set_num_threads(1)
    disturbed = os.getloadavg()[0] > (os.cpu_count() or 1) / 2  # others use the processor
    spec = ModelSpec.from_directory(args.model)
    work = Work(
        tokens=Tokenizer(args.model).encode(Path(args.text).read_text(), special=False),
        windows=args.windows,
        requests=args.requests,
        prompt_len=args.prompt_len,
        max_new=args.max_new,
    )
    workload = Workload(
        batch=args.batch, prompt_len=args.prompt_len, gen_len=args.max_new, dtype=args.dtype
    )
    for mode in MODES:
        if args.modes and mode.name not in args.modes:
            continue
        plan = manual_plan(
            spec,
            workload,
            precision=mode.target,
            prefill_microbatch=args.batch,
            decode_microbatch=args.batch,
        )
        source = CheckpointSource(args.model, spec)
        pool = planned_pool(spec, workload, None, prefill_microbatch=args.batch)
        engine = OpenStages(plan, spec, source, speculate=mode.name, device=args.on, pool=pool)
        case = {
            "model": spec.name,
            "text": Path(args.text).name,
            "mode": f"{mode.name} on {mode.target.value}",
            "batch": args.batch,
            "dtype": args.dtype,
        }
        for gamma in args.gammas:
            seen = measure_acceptance(engine, mode, gamma, work)
            write_acceptance(args, case | {"gamma": gamma}, seen)
        if args.on != "cpu" or args.no_speed:
            continue
        without = OpenStages(plan, spec, source, pool=pool)
        fast, plain = measure_speed(engine, without, mode, args.speed_gamma, work)
        write_row(
            "speculation.jsonl",
            bench="speculation",
            case=case | {"gamma": args.speed_gamma},
            unit="tokens/s",
            samples=fast,
            baselines={"plain": statistics.median(plain)},
            noisy=disturbed,
        )
        ratio = statistics.median(fast) / statistics.median(plain)
        print(f"{case['mode']:16} gamma {args.speed_gamma}: {ratio:.2f}x plain decoding")


def write_acceptance(args: argparse.Namespace, case: dict[str, object], seen: Acceptance) -> None:
    """Append one acceptance row."""
    if seen.per_token is None or seen.tokens_per_verify() is None:
        return
    row: dict[str, Any] = {
        "bench": "acceptance",
        "case": case,
        "unit": "share",
        "samples": [seen.per_token],
        "baselines": {"drafted": sum(seen.drafted), "verifies": seen.verifies},
    }
    if args.rows is None:
        write_row("speculation.jsonl", **row)
    else:
        program = "python benchmarks/speculation.py"
        gpu_timing.write_row(Path(args.rows), **row, commit=args.commit, program=program)
    print(
        f"{case['mode']:16} gamma {case['gamma']}: accepted {seen.per_token:.3f} per token, "
        f"{seen.tokens_per_verify():.2f} tokens a verify"
    )


if __name__ == "__main__":
    main()
