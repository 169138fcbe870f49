"""What drawing tokens costs on a GPU, and what is left of greedy decoding's tokens/s.

    python benchmarks/sampling_gpu.py --rows FILE

First `sample` alone on random logits, from call to token with the host's part, beside torch's
operators (`probabilities` and `draw`, what the CPU runs). `sharp` logits have nine tenths of their
mass in the first hundred tokens, as a trained model's mostly do; `flat` ones do not. Then a job of
dummy weights in the engine, every request sampled, beside the same job decoded greedily; its
temperature makes the dummies' logits sharp (the mass is printed).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from llmpq.kernels.gpu_timing import write_row
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.hand_plan import hand_plan
from llmpq.runtime.launch.stages.stage_settings import limits_of
from llmpq.runtime.models.sampling import TokenChoice, draw, probabilities, sample, uniform
from llmpq.runtime.request import Request
from llmpq.runtime.weights.sources import RandomSource
from llmpq.workload import Workload
from reference.open_stages import OpenStages

LOGITS = {"sharp": 6.0, "flat": 3.0}
"""Standard deviations."""
WAYS = {
    "temperature": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
}
SHARP_TEMPERATURE = 0.1
CALLS, REPEATS = 20, 5


def operators(logits_BV: Tensor, params: list[TokenChoice], steps: list[int]) -> Tensor:
    """Draw with torch's operators."""
    numbers = [uniform(p.seed, step) for p, step in zip(params, steps, strict=True)]
    probs_BV = probabilities(logits_BV, params)
    return draw(probs_BV, torch.tensor(numbers, dtype=torch.float64).to(logits_BV.device))


def call_us(call: Callable[[], object]) -> list[float]:
    """Return samples of the mean time of a call, the device's work included."""
    samples = []
    for repeat in range(REPEATS + 1):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        if repeat:
            samples.append((time.perf_counter() - started_s) / CALLS * 1e6)
    return samples


def time_calls(args: argparse.Namespace, vocab: int) -> None:
    """Time draws alone."""
    for rows in (1, 8, 32):
        for name, deviation in LOGITS.items():
            logits = (torch.randn(rows, vocab, device="cuda") * deviation).to(torch.bfloat16)
            for way, words in WAYS.items():
                params = [TokenChoice(temperature=1.0, seed=row, **words) for row in range(rows)]
                steps = [7] * rows
                samples = call_us(lambda: sample(logits, params, steps))  # noqa: B023
                peer = sorted(call_us(lambda: operators(logits, params, steps)))  # noqa: B023
                case = {"rows": rows, "vocab": vocab, "logits": name, "way": way}
                beside = {"operators": peer[REPEATS // 2]}
                add(args, "sampling", case, "us", samples, beside)
                us = sorted(samples)[REPEATS // 2]
                print(f"{rows:2} rows {name:5} {way:20} {us:7.0f} us, operators {peer[2]:7.0f}")


def time_job(args: argparse.Namespace) -> None:
    """Run a job greedily and sampled."""
    spec = ModelSpec.by_name(args.model)
    workload = Workload(batch=args.batch, prompt_len=128, gen_len=args.new, dtype="bfloat16")
    plan = hand_plan(
        spec,
        workload,
        precision=Precision.parse(args.bits),
        prefill_microbatch=args.batch,
        decode_microbatch=args.batch,
    )
    engine = OpenStages(plan, spec, RandomSource(spec, device="cuda:0"), device="cuda:0")
    greedy = 0.0
    for way, words in {"greedy": None, **WAYS}.items():
        rates = []
        for repeat in range(4):
            job = [
                Request(
                    id=row,
                    prompt=tuple((row * 977 + place * 31) % spec.vocab for place in range(128)),
                    max_new=args.new,
                    sampling=TokenChoice()
                    if words is None
                    else TokenChoice(temperature=SHARP_TEMPERATURE, seed=row, **words),
                )
                for row in range(args.batch)
            ]
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            run = engine.run(Scheduler(limits_of(plan)), job)
            if repeat:
                tokens = sum(len(request.tokens) for request in run.finished)
                rates.append(tokens / (time.perf_counter() - started_s))
        rate = sorted(rates)[1]
        greedy = greedy or rate
        case: dict[str, object] = {"model": args.model, "precision": args.bits}
        case |= {"batch": args.batch, "way": way}
        case |= {"new": args.new, "drawn": "one kernel"}
        add(args, "sampling_job", case, "tokens/s", rates, {"greedy": greedy})
        print(f"{way:20} {rate:7.0f} tokens/s, {rate / greedy:.3f} of greedy")
    logits = engine.computes[0]._decode._captured[args.batch].output.logits_BV
    assert logits is not None
    mass = torch.softmax(logits.float() / SHARP_TEMPERATURE, dim=-1).topk(128).values.sum(dim=-1)
    print(f"mass of the 128 most likely tokens: {mass.min():.2f} to {mass.max():.2f}")


def add(
    args: argparse.Namespace,
    bench: str,
    case: dict[str, object],
    unit: str,
    samples: list[float],
    beside: dict[str, float],
) -> None:
    """Append a row."""
    row = {"bench": bench, "case": case, "unit": unit, "samples": samples, "baselines": beside}
    how = {"commit": args.commit, "program": "python benchmarks/sampling_gpu.py"}
    write_row(Path(args.rows), **row, **how)  # type: ignore[arg-type]


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in architecture")
    parser.add_argument("--bits", default="w4a16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=100, help="tokens a request")
    parser.add_argument("--only", choices=("calls", "job"), help="one of the two")
    parser.add_argument("--rows", required=True, help="result file to append to")
    parser.add_argument("--commit", help="commit a row names, where git cannot tell")
    args = parser.parse_args()
    if args.only != "job":
        time_calls(args, ModelSpec.by_name(args.model).vocab)
    if args.only != "calls":
        time_job(args)


if __name__ == "__main__":
    main()
