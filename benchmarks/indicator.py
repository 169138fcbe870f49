"""What an indicator costs and what it is worth.

    python benchmarks/indicator.py --model examples/demo-7m --text examples/heldout.txt

Rows `bench: indicator`: processor seconds of the variance and the Hessian indicator on the same
windows, on one thread (loading included, the tokeniser's not). Rows `bench: indicator-rank`:
Spearman correlation of each indicator's omega with the loss that quantising that layer alone
really costs, in nats a token.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lib.rows import write_row
from scipy.stats import spearmanr

from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import WEIGHT_ONLY, KVPrecision, Precision
from llmpq.profiler.quality.observation import cut_windows, observe
from llmpq.profiler.quality.omega import HessianObserver, VarianceObserver, random_tables
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.tools.evaluate import perplexity
from llmpq.runtime.weights.sources import CheckpointSource
from reference.pipeline import ReferencePipeline

KV = (KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2)
RANKED = (Precision.W4A16, Precision.W3A16)
Observer = VarianceObserver | HessianObserver
WINDOW = 256
FILE = "indicator.jsonl"


def main() -> None:
    """Time the indicators, then rank layers by them and by what quantising costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("examples/demo-7m"))
    parser.add_argument("--text", type=Path, default=Path("examples/heldout.txt"))
    parser.add_argument("--windows", type=int, default=16, help="calibration windows of 256 tokens")
    parser.add_argument("--eval-tokens", type=int, default=4096, help="tokens the loss is taken on")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each indicator")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = ModelSpec.from_directory(args.model)
    tokens = Tokenizer(args.model).encode(args.text.read_text(), special=False)
    held_out, rest = tokens[: args.eval_tokens], tokens[args.eval_tokens :]
    windows = cut_windows(rest, count=args.windows, length=WINDOW, where=args.text)
    observed = {name: timed(name, make, spec, args, windows) for name, make in observers().items()}
    losses = {p: layer_losses(spec, args.model, held_out, p) for p in RANKED}
    for precision in RANKED:
        tables = {name: observer.table[precision] for name, observer in observed.items()}
        tables["random"] = random_tables(spec.num_layers, WEIGHT_ONLY, KV, seed=0)[0][precision]
        for name, omegas in tables.items():
            rho = float(spearmanr(omegas, losses[precision]).statistic)
            case = {"model": spec.name, "indicator": name, "precision": precision.value}
            write_row(
                "indicator.jsonl", bench="indicator-rank", case=case, unit="rho", samples=[rho]
            )
            print(f"{precision.value} {name:30} rank correlation {rho:+.2f}")


def observers() -> dict[str, Callable[[], Observer]]:
    """Return a maker of each indicator, by name."""
    made: dict[str, Callable[[], Observer]] = {
        "hessian": lambda: HessianObserver(WEIGHT_ONLY, KV, Quantization())
    }
    for rounding in ("deterministic", "stochastic"):
        for granularity in ("group", "tensor"):
            made[f"variance {rounding} {granularity}"] = lambda r=rounding, g=granularity: (
                VarianceObserver(  # type: ignore[misc]
                    WEIGHT_ONLY, KV, r, g, Quantization()
                )
            )
    return made


def timed(
    name: str,
    make: Callable[[], Observer],
    spec: ModelSpec,
    args: argparse.Namespace,
    windows: Sequence[Sequence[int]],
) -> Observer:
    """Run one indicator several times and write its row."""
    samples = []
    for _ in range(args.repeats):
        observer, started = make(), time.process_time()
        source = CheckpointSource(args.model, spec)
        observe(spec, source, windows, observer, device=torch.device("cpu"))
        samples.append(time.process_time() - started)
    case = {"model": spec.name, "indicator": name, "tokens": len(windows) * WINDOW}
    row = write_row(FILE, bench="indicator", case=case, unit="s", samples=samples)
    print(f"{name:30} {row['value']:.2f} s")
    return observer


def layer_losses(
    spec: ModelSpec, model: Path, tokens: Sequence[int], precision: Precision
) -> list[float]:
    """Return the loss, in nats a token, that quantising each layer alone adds."""

    def loss(precisions: Sequence[Precision]) -> float:
        pipeline = ReferencePipeline.from_directory(model, precisions=precisions)
        return math.log(perplexity(pipeline.scores, tokens, window=512).value)

    plain = [Precision.W16A16] * spec.num_layers
    base = loss(plain)
    return [loss([*plain[:i], precision, *plain[i + 1 :]]) - base for i in range(spec.num_layers)]


if __name__ == "__main__":
    main()
