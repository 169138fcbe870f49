"""Prompts that share half of their tokens: the prefill time that the prefix cache saves on a GPU.

    python benchmarks/prefix_saving.py --model DIR [--requests 200] [--tokens 2048] [--write]

One request after the other, one new token each, so that nobody computes what another is about to
share. The value is the share of the device's time in prefill steps that is saved with the cache on.
Predicted: a prompt whose first half is known saves the time of a prompt of that half alone, but for
the first one, which finds nothing; both times are measured with the cache off.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from lib.live_plans import by_hand
from lib.rows import write_row

from llmpq import LLM, SamplingParams
from llmpq.precision import KVPrecision

VOCAB = 500


def main() -> None:
    """Measure halves, whole prompts, and whole prompts that share their halves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--precision", default="w16a16")
    parser.add_argument("--kv", type=KVPrecision, default=KVPrecision.KV16)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rng = random.Random(0)
    trunk, half = tokens(rng, args.tokens // 2), args.tokens // 2
    prompts = [trunk + tokens(rng, args.tokens - half) for _ in range(args.requests)]
    plan = by_hand(
        args.model, prompt_len=args.tokens, gen_len=2, slots=8, precision=args.precision, kv=args.kv
    )
    times: dict[str, float] = {}
    hits = 0
    for cached in (False, True):
        with LLM(args.model, plan=plan, kv_pool=True, enable_prefix_caching=cached) as llm:
            others = [tokens(rng, args.tokens) for _ in range(4)]
            prefill_s(llm, [*others, *(own[:half] for own in others)])
            if not cached:
                times["half"] = prefill_s(llm, [tokens(rng, half) for _ in prompts])
            times["cached" if cached else "whole"] = prefill_s(llm, prompts)
            hits = llm.stats()["gauges"]["prefix_hits"]
    saved = 1 - times["cached"] / times["whole"]
    predicted = (len(prompts) - 1) / len(prompts) * times["half"] / times["whole"]
    print({name: round(1e3 * value, 1) for name, value in times.items()}, "ms;", hits, "tokens hit")
    print(f"saved {saved:.4f} of prefill time, predicted {predicted:.4f}: {saved / predicted:.3f}")
    if args.write:
        case = {
            "model": Path(args.model).name,
            "requests": args.requests,
            "tokens": args.tokens,
            "shared": half,
            "precision": args.precision,
            "kv": args.kv.value,
        }
        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
        baselines = {f"{name}_s": value for name, value in times.items()}
        write_row(
            "pool.jsonl",
            bench="prefix_saving",
            case=case,
            unit="share of prefill time",
            samples=[saved],
            baselines=baselines,
            predicted=predicted,
            device=gpu,
        )


def tokens(rng: random.Random, count: int) -> list[int]:
    """Return a random prompt."""
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def prefill_s(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the device's time for prompts, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times = []
    for prompt in prompts:
        llm.generate([{"prompt_token_ids": prompt}], params)
        (record,) = llm._engine.engine.records()
        times.append(record.busy_s)
    return sum(times)


if __name__ == "__main__":
    main()
