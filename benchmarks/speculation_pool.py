"""Drafts by the model on a GPU beside plain decoding.

    python benchmarks/speculation_pool.py --model DIR --mode w4kv4 --gamma 4 --batch 16

One batch job of prompts of one length, after a warm-up job: plain, then with drafts. Each row says
tokens/s and how many answers are those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from llmpq.runtime.llm import LLM
from llmpq.runtime.sampling_params import SamplingParams


def measure(model: str, prompts: list[list[int]], options: dict, *, new: int, repeats: int) -> dict:
    """Return what a way of drafting gives."""
    wanted = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    with LLM(
        model, max_num_seqs=len(prompts), max_model_len=len(prompts[0]) + new, **options
    ) as llm:
        llm.generate(prompts, wanted)
        seconds = []
        for _ in range(repeats):
            since = time.perf_counter()
            answers = llm.generate(prompts, wanted)
            seconds.append(time.perf_counter() - since)
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        return {
            "tokens_per_s": tokens / statistics.median(seconds),
            "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        }


def main() -> None:
    """Measure and print a row each."""
    what = argparse.ArgumentParser(description=__doc__)
    what.add_argument("--model", required=True)
    what.add_argument("--mode", default="w4kv4", choices=["qspec", "kv4", "w4kv4", "ngram"])
    what.add_argument("--gamma", type=int, default=4)
    what.add_argument("--batch", type=int, default=16)
    what.add_argument("--prompt-len", type=int, default=512)
    what.add_argument("--gen-len", type=int, default=200)
    what.add_argument("--repeats", type=int, default=3)
    what.add_argument("--dtype", default="auto")
    what.add_argument("--rows", help="append the rows to this file, too")
    args = what.parse_args()
    prompts = [
        [11 + (row * 31 + at * 7) % 997 for at in range(args.prompt_len)]
        for row in range(args.batch)
    ]
    drafts = {"speculate": args.mode, "gamma": args.gamma}
    ways = {
        "plain": {"dtype": args.dtype},
        "drafts": {"dtype": args.dtype, **drafts},
    }
    first = None
    for name, options in ways.items():
        got = measure(args.model, prompts, options, new=args.gen_len, repeats=args.repeats)
        tokens = got.pop("tokens")
        first = first or tokens
        same = sum(a == b for a, b in zip(first, tokens, strict=True))
        row = {"what": "speculation_pool", "way": name, **vars(args), **got, "same_rows": same}
        print(json.dumps(row))
        if args.rows:
            with open(args.rows, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
