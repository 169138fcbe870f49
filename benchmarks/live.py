"""Live requests through LLM's own API: traces of real services replayed, and a soak test.

    python benchmarks/live.py replay --model DIR [--plan plan.json] --trace azure_2023_conv \\
        --requests 600 --shares 0.5 0.7 0.9 [--shrink 8] [--no-chunks]
    python benchmarks/live.py soak --model DIR [--plan plan.json] --requests 2000 --rounds 10

`replay` first serves all requests at once: tokens/s, and the highest rate that can be sustained.
Then it plays their arrivals at shares of that rate and reports what a reader of the streams sees:
time to first token, time per output token, the longest gaps, and goodput: the share of requests
within MLPerf's limits for Llama-3.1-8B. `--shrink` divides lengths, for small models on a CPU.
`--rate` is for a rate that is known: nothing is served at once first. `--no-chunks` takes prompts
whole.
Without a plan `LLM` takes this machine's devices. On GPUs `--precision w4a16 --max-num-seqs 256`
makes a plan of a precision by hand, of several stages with `--splits 17` (the layers where they
end; `--sms 132 48` for smaller cards).
Every replay has prompts of its own, so that none is found again. A row's `busy` is each stage's:
its device's time in steps by the time of the replay.

`soak` sends requests of mixed lengths, a fifth aborted at random, a twentieth of bad parameters;
every answer has to be the greedy one or a refusal, and no block or memory may be left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from lib.live_plans import by_hand
from lib.rows import write_row
from lib.traces import Arrival, names, read_trace

from llmpq import LLM, SamplingParams
from llmpq.precision import KVPrecision

LIMITS = {"server": (2.0, 0.1), "interactive": (0.5, 0.03)}
"""MLPerf inference, Llama-3.1-8B: seconds to the first token, seconds per output token."""
QUANTILES = (0.5, 0.95, 0.99)


@dataclass
class Seen:
    """What the reader of one stream saw, in seconds since it was sent."""

    prompt_tokens: int
    output_tokens: int
    pieces_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Until the first piece."""
        return self.pieces_s[0]

    @property
    def per_token_s(self) -> float:
        """Mean time of a token after the first."""
        return (self.pieces_s[-1] - self.pieces_s[0]) / max(1, self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """The times without anything new."""
        pairs = zip(self.pieces_s, self.pieces_s[1:], strict=False)
        return [after - before for before, after in pairs]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def play(llm: LLM, jobs: Sequence[tuple[float, list[int], int]]) -> tuple[list[Seen], float]:
    """Send prompts at their times (s); return what was seen and the seconds it took."""
    started_s = time.perf_counter()

    async def one(at_s: float, prompt: list[int], new: int) -> Seen:
        await asyncio.sleep(max(0.0, started_s + at_s - time.perf_counter()))
        seen, sent_s = Seen(len(prompt), new), time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        async for _ in llm.stream(prompt, params):
            seen.pieces_s.append(time.perf_counter() - sent_s)
        if not seen.pieces_s:  # tokens without text
            seen.pieces_s.append(time.perf_counter() - sent_s)
        return seen

    seen = await asyncio.gather(*(one(*job) for job in jobs))
    return list(seen), time.perf_counter() - started_s


def report(
    args: argparse.Namespace, llm: LLM, kind: str, seen: Sequence[Seen], wall_s: float
) -> float:
    """Print and append the rows of one replay; return the requests per second."""
    stages = llm.plan.stages
    case = {
        "trace": args.trace,
        "requests": len(seen),
        "shrink": args.shrink,
        "arrivals": kind,
        "model": Path(str(llm.plan.model.path)).name,
        "kv": llm.plan.workload.kv.value,
        "stages": len(stages),
        "step_tokens": 0 if args.no_chunks else args.step_tokens,
        "precision": ",".join(sorted({p.value for s in stages for p in s.precisions})),
        "pool": True,
        "slots": llm.plan.workload.batch,
    }
    if len(stages) > 1:
        case["layers"] = [stage.num_layers for stage in stages]
        case["sms"] = [stage.sms or 0 for stage in stages]
    values = {
        "throughput": (sum(s.output_tokens for s in seen) / wall_s, "tokens/s"),
        "requests": (len(seen) / wall_s, "requests/s"),
    }
    for share in QUANTILES:
        name = f"p{share * 100:.0f}"
        values[f"ttft_{name}"] = (1e3 * quantile([s.first_s for s in seen], share), "ms")
        values[f"tpot_{name}"] = (1e3 * quantile([s.per_token_s for s in seen], share), "ms")
        longest = [max(s.gaps_s, default=0.0) for s in seen]
        values[f"gap_{name}"] = (1e3 * quantile(longest, share), "ms")
        every = [gap_s for s in seen for gap_s in s.gaps_s] or [0.0]
        values[f"token_gap_{name}"] = (1e3 * quantile(every, share), "ms")
    for name, (first_s, token_s) in LIMITS.items():
        good = sum(s.first_s <= first_s and s.per_token_s <= token_s for s in seen)
        values[f"goodput_{name}"] = (good / len(seen), "share of requests")
    for number, record in enumerate(llm.trace.take(llm.engine.client)):
        values[f"busy_{number}"] = (record.busy_s / wall_s, "share of time")
        for step, total in record.totals.items():
            mean_ms, rows = 1e3 * (total.mean_s or 0.0), total.rows / total.steps
            print(
                f"{kind:>12} stage {number}: {total.steps} {step} of {rows:.0f}: {mean_ms:.2f} ms"
            )
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    for name, (value, unit) in values.items():
        print(f"{kind:>12} {name:>20} {value:10.3f} {unit}")
        write_row(
            args.rows,
            bench=f"live_{name}",
            case=case,
            unit=unit,
            samples=[value],
            noisy=args.noisy,
            device=gpu,
        )
    print(f"{kind:>12} {wall_s:.1f} s, {llm.stats()['gauges']}", flush=True)
    return len(seen) / wall_s


def replay(args: argparse.Namespace) -> None:
    """Serve a trace at once, then at shares of the rate that this showed."""
    trace = read_trace(args.trace, args.requests)

    def jobs(turn: int) -> list[tuple[float, list[int], int]]:
        first = turn * len(trace)
        return [job(row, first + number, args.shrink) for number, row in enumerate(trace)]

    longest = max(len(prompt) for _, prompt, _ in jobs(0))
    # Chunks off: a step takes any prompt whole, beside all rows that decode.
    step_tokens = longest + args.max_num_seqs if args.no_chunks else args.step_tokens
    plan = args.plan
    if args.precision is not None:
        plan = by_hand(
            args.model,
            prompt_len=longest,
            gen_len=max(new for *_, new in jobs(0)),
            slots=args.max_num_seqs,
            precision=args.precision,
            kv=args.kv,
            splits=tuple(args.splits),
            sms=tuple(args.sms),
        )
    started_s = time.perf_counter()
    with LLM(
        args.model,
        plan=plan,
        max_num_batched_tokens=step_tokens,
        enable_prefix_caching=not args.no_prefix_cache,
        stages_apart=True,  # as servers have it: who reads the streams computes nothing
    ) as llm:
        print(f"started in {time.perf_counter() - started_s:.1f} s", flush=True)
        asyncio.run(play(llm, [(0.0, prompt, new) for _, prompt, new in jobs(99)[: args.warm_up]]))
        llm.trace.take(llm.engine.client)
        rate = args.rate
        if rate is None:
            seen, wall_s = asyncio.run(
                play(llm, [(0.0, prompt, new) for _, prompt, new in jobs(0)])
            )
            rate = report(args, llm, "at once", seen, wall_s)
        span_s = trace[-1].at_s - trace[0].at_s
        for turn, share in enumerate(args.shares, start=1):
            speed = len(trace) / (rate * share) / span_s
            timed = [(at_s * speed, prompt, new) for at_s, prompt, new in jobs(turn)]
            seen, wall_s = asyncio.run(play(llm, timed))
            report(args, llm, f"{share} of rate", seen, wall_s)


def job(row: Arrival, number: int, shrink: int) -> tuple[float, list[int], int]:
    """Return when a row is sent, its prompt and its new tokens."""
    prompt = row.prompt(500, number)[: max(1, row.prompt_tokens // shrink)]
    return row.at_s, prompt, max(2, row.output_tokens // shrink)


def soak(args: argparse.Namespace) -> None:
    """Send rounds of requests, some aborted and some bad; fail if anything is wrong or left."""
    rng = random.Random(0)
    trunk = [5 + n % 90 for n in range(400)]
    prompts = [trunk[: rng.randint(1, 400)] + [7 + n] * rng.randint(1, 60) for n in range(40)]
    most = 60
    with LLM(args.model, plan=args.plan, max_num_batched_tokens=args.step_tokens) as llm:
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        wanted = [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts]
        texts = [llm.generate([p], params)[0].text for p in prompts]
        rss, objects = [], []
        for round_ in range(args.rounds):
            counts = asyncio.run(one_round(llm, prompts, texts, rng, args.requests, most))
            gauges = llm.stats()["gauges"]
            assert gauges.get("blocks_held", 0) == 0, gauges
            assert llm.stats()["running"] == llm.stats()["waiting"] == 0
            rss.append(resident_mib())
            objects.append(len(gc.get_objects()))
            memory = f"{rss[-1]:.0f} MiB, {objects[-1]} objects"
            print(f"round {round_}: {counts}, {memory}, {gauges}", flush=True)
        first = min(1, len(rss) - 1)
        assert objects[-1] <= 1.001 * objects[first], objects
        assert [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts] == wanted
        stages = len(llm.plan.stages)
    case = {"requests": args.requests, "rounds": args.rounds, "stages": stages}
    growth = rss[-1] / rss[first] - 1
    write_row(args.rows, bench="live_soak", case=case, unit="growth of memory", samples=[growth])


def resident_mib() -> float:
    """Return the memory of this process and its stages, without what allocators keep for later."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    me = psutil.Process()
    each = [process.memory_info().rss for process in (me, *me.children(recursive=True))]
    return float(sum(each)) / 2**20


async def one_round(
    llm: LLM,
    prompts: Sequence[list[int]],
    texts: Sequence[str],
    rng: random.Random,
    count: int,
    most: int,
) -> dict[str, int]:
    """Send requests at once; return how many ended how. `AssertionError` for a wrong answer."""
    counts = {"whole": 0, "aborted": 0, "refused": 0}

    async def one(index: int, new: int, leave_after: int | None) -> None:
        text = ""
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        async for piece in llm.stream(prompts[index], params):
            text += piece
            if leave_after is not None and len(text) >= leave_after:
                break
        assert texts[index].startswith(text.rstrip("\ufffd")), (index, text, texts[index])
        counts["whole" if leave_after is None else "aborted"] += 1

    async def bad(kind: int) -> None:
        wrong: list[object] = [[], [10**9], [5] * 10**5, "never"]
        try:
            if wrong[kind] == "never":
                SamplingParams(temperature=-1)
            async for _ in llm.stream(wrong[kind]):  # type: ignore[arg-type]
                pass
        except ValueError as error:
            assert str(error)
            counts["refused"] += 1
            return
        raise AssertionError(f"{wrong[kind]!r:.40} was served")

    work = []
    for _ in range(count):
        draw = rng.random()
        if draw < 0.05:
            work.append(bad(rng.randrange(4)))
        else:
            leave = rng.randint(1, 60) if draw < 0.25 else None
            work.append(one(rng.randrange(len(prompts)), rng.randint(1, most), leave))
    await asyncio.gather(*work)
    return counts


def main() -> None:
    """Read flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["replay", "soak"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan")
    parser.add_argument("--rows", default="live.jsonl", help="file in results/ to append to")
    parser.add_argument("--trace", choices=names(), default="azure_2023_conv")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.7, 0.9])
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths")
    parser.add_argument("--step-tokens", type=int, help="of any step (default: the engine's own)")
    parser.add_argument("--precision", help="plan a GPU by hand: w16a16, w4a16, ...")
    parser.add_argument("--kv", type=KVPrecision, default=KVPrecision.KV16, help="with --precision")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="with --precision")
    parser.add_argument("--splits", type=int, nargs="*", default=[], help="with --precision")
    parser.add_argument("--sms", type=int, nargs="*", default=[], help="of each stage; 0: all")
    parser.add_argument("--rate", type=float, help="requests/s that can be sustained, if known")
    parser.add_argument("--warm-up", type=int, default=4, help="requests before all others")
    parser.add_argument("--no-chunks", action="store_true", help="prompts whole, for comparison")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--noisy", action="store_true", help="others share this machine")
    args = parser.parse_args()
    {"replay": replay, "soak": soak}[args.what](args)


if __name__ == "__main__":
    main()
