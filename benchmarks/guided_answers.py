"""Answers that must be JSON of random schemas: do all fit, and what does it cost?

    python benchmarks/guided_answers.py [--model examples/demo-7m] [--requests 200] [--write]
    python benchmarks/guided_answers.py --model DIR --batch 32 --write         # on a GPU

Every request has a schema of its own whose texts are bounded. Then the same prompts are answered
with as many tokens each and no guide: the row is guided tokens/s over unguided, median of rounds
taken in turns, `--batch` requests at once. A model of random weights answers as well: with
benchmarks/serve_share.py's `write_checkpoint` its vocabulary has all of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from guides import schema, valid
from lib.rows import write_row

from llmpq import LLM, SamplingParams, StructuredOutputsParams
from llmpq.model_spec import ModelSpec

LONGEST = 400


def tokens_per_s(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> float:
    """Return the new tokens a second of a batch."""
    started = time.perf_counter()
    answers = llm.generate(prompts, params)
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    return tokens / (time.perf_counter() - started)


def main() -> None:
    """Count what fits, then time guided and unguided rounds in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="examples/demo-7m")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", action="store_true", help="no blocks of KV on a GPU")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    schemas = [schema(random.Random(seed)) for seed in range(options.requests)]
    guided = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(json=wanted),
            temperature=1.0,
            seed=seed,
            max_tokens=LONGEST,
        )
        for seed, wanted in enumerate(schemas)
    ]
    prompts = [f"record {seed} = " for seed in range(options.requests)]
    on_gpu = torch.cuda.is_available()
    with LLM(
        options.model,
        max_num_seqs=options.batch,
        kv_pool=False if options.slots else None,
        stages_apart=on_gpu,
    ) as llm:
        vocab = ModelSpec.from_directory(options.model).vocab
        answers = llm.generate(prompts, guided)
        fits = sum(
            answer.outputs[0].finish_reason == "stop" and valid(answer.text, wanted)
            for answer, wanted in zip(answers, schemas, strict=True)
        )
        print(f"{fits} of {options.requests} answers are JSON of their schemas")
        free = [
            SamplingParams(
                temperature=1.0,
                seed=seed,
                ignore_eos=True,
                max_tokens=len(answer.outputs[0].token_ids),
            )
            for seed, answer in enumerate(answers)
        ]
        some = slice(0, 8 * options.batch)
        shares, guided_s, unguided_s = [], [], []
        for _ in range(options.rounds):
            with_guide = tokens_per_s(llm, prompts[some], guided[some])
            without = tokens_per_s(llm, prompts[some], free[some])
            shares.append(with_guide / without)
            guided_s.append(with_guide)
            unguided_s.append(without)
            print(f"guided {with_guide:.0f} tokens/s, unguided {without:.0f}: {shares[-1]:.3f}")
    if options.write:
        case = {
            "model": Path(options.model).name,
            "batch": options.batch,
            "requests": options.requests,
            "fit": fits,
            "vocab": vocab,
            "pool": on_gpu and not options.slots,
        }
        gpu = torch.cuda.get_device_name(0) if on_gpu else None
        rates = {"guided_tokens_per_s": statistics.median(guided_s),
                 "unguided_tokens_per_s": statistics.median(unguided_s)}  # fmt: skip
        write_row("guides.jsonl", bench="guided_answers", case=case, unit="guided / unguided",
                  samples=shares, baselines=rates, device=gpu, noisy=gpu is None)  # fmt: skip
    print(json.dumps({"fit": fits, "of": options.requests}))


if __name__ == "__main__":
    main()
