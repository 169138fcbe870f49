"""Tokens per second of one stage against Hugging Face `generate`, in the same run.

    python benchmarks/hf_generate.py                       batch 8, float32, one thread
    python benchmarks/hf_generate.py --model DIR --batch 8 --prompt 64 --new 64 --threads 2

Both decode greedily on the CPU with the same number of threads and must give the same tokens; runs
alternate, so that other load falls on both. The row's value is the median of ours, its baseline
the median of theirs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lib.rows import write_row
from transformers import AutoModelForCausalLM

from llmpq.runtime.models.stage_model import DTYPES
from reference.pipeline import ReferencePipeline

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo-7m"
Tokens = list[list[int]]


def tokens_per_s(generate: Callable[[], Tokens], expected: int) -> tuple[float, Tokens]:
    """Time one call."""
    start_s = time.perf_counter()
    tokens = generate()
    return expected / (time.perf_counter() - start_s), tokens


def main() -> None:
    """Measure and append one row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of every prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ours = ReferencePipeline.from_directory(args.model, dtype=DTYPES[args.dtype])
    theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype]).eval()
    prompts = torch.randint(1, ours.spec.vocab, (args.batch, args.prompt))

    def run_ours() -> Tokens:
        return ours.generate(prompts.tolist(), max_new=args.new)

    def run_theirs() -> Tokens:
        tokens = theirs.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=args.new,
            do_sample=False,
            pad_token_id=0,
        )
        rows: Tokens = tokens[:, args.prompt :].tolist()
        return rows

    # No row may stop early, on either side.
    theirs.generation_config.eos_token_id = None
    expected = args.batch * args.new
    samples: dict[str, list[float]] = {"ours": [], "hf": []}
    for index in range(args.repeat + 1):
        speed, tokens = tokens_per_s(run_ours, expected)
        hf_speed, hf_tokens = tokens_per_s(run_theirs, expected)
        if args.dtype == "float32" and tokens != hf_tokens:
            raise SystemExit("the two generate different tokens: nothing to compare")
        if index:  # the first run warms up
            samples["ours"].append(speed)
            samples["hf"].append(hf_speed)
    hf = statistics.median(samples["hf"])
    case = {
        "model": ours.spec.name,
        "batch": args.batch,
        "prompt": args.prompt,
        "new": args.new,
        "threads": args.threads,
        "dtype": args.dtype,
    }
    row = write_row(
        "hf_generate.jsonl",
        bench="hf_generate",
        case=case,
        unit="tokens/s",
        samples=samples["ours"],
        baselines={"hf": hf},
        # Our own threads keep the load average at their number.
        noisy=os.getloadavg()[0] > args.threads + 1,
    )
    print(f"{row['value']:.1f} tokens/s, Hugging Face generate {hf:.1f}: {row['value'] / hf:.2f}x")


if __name__ == "__main__":
    main()
