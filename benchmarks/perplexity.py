"""Perplexity of a model per precision, rounding and grid, as rows of `quality.jsonl`.

    python benchmarks/perplexity.py                     the demo model on examples/heldout.txt
    python benchmarks/perplexity.py --model DIR --text FILE --dtype bfloat16
    python benchmarks/perplexity.py --only-head         layers in 16 bits, the output matrix in 8
    python benchmarks/perplexity.py --only-activations  activations of 8 bits meet 8, 4 and 3 bits

Every row states the 16-bit perplexity of the same run as its baseline.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from lib.rows import write_row

from llmpq.kernels.native import library
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision, WeightScheme
from llmpq.runtime.models.linear import round_activations
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.tools.evaluate import longest_window, perplexity
from llmpq.runtime.weights.sources import CheckpointSource
from reference.pipeline import ReferencePipeline

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BITS = (8, 4, 3)


def schemes() -> Iterator[WeightScheme]:
    """Yield every scheme that is compared."""
    for bits in BITS:
        for symmetric in (False, True):
            for clip_search in (True, False):
                yield WeightScheme(bits=bits, symmetric=symmetric, clip_search=clip_search)


def _exact_and_rounded(
    spec: ModelSpec, model: str, bits: int, dtype: torch.dtype, tokens: list[int]
) -> list[float]:
    """Return the perplexities with activations as they are, and rounded to 8 bits."""
    pipeline = ReferencePipeline.build(
        spec,
        CheckpointSource(model, spec),
        precisions=[Precision.parse(str(bits))] * spec.num_layers,
        dtype=dtype,
    )
    values = []
    for rounded in (False, True):
        if rounded:
            round_activations(pipeline.stages[0])
        window = longest_window(spec)
        values.append(perplexity(pipeline.scores, tokens, window=window).value)
    return values


def main() -> None:
    """Measure and append the rows."""
    levels = [level.name for level in library.usable_levels()]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(EXAMPLES / "demo-7m"))
    parser.add_argument("--text", default=str(EXAMPLES / "heldout.txt"))
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-head", action="store_true")
    parser.add_argument("--only-activations", action="store_true")
    parser.add_argument("--level", choices=levels, help="force the CPU's dispatch")
    parser.add_argument("--tokens", type=int, help="of the text, from its start; all of it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.level is not None:
        level = library.LEVELS[args.level]
        library.best_level = lambda: level  # type: ignore[assignment]
    spec = ModelSpec.from_directory(args.model)
    tokens = Tokenizer(args.model).encode(Path(args.text).read_text(), special=False)[: args.tokens]

    def measure(bits: int, scheme: WeightScheme | None, *, head: bool = False) -> float:
        pipeline = ReferencePipeline.build(
            spec,
            CheckpointSource(args.model, spec),
            precisions=[Precision.parse(str(bits))] * spec.num_layers,
            scheme=None if head else lambda precision: scheme,
            head_precision=Precision.W8A16 if head else Precision.W16A16,
            dtype=DTYPES[args.dtype],
        )
        return perplexity(pipeline.scores, tokens, window=longest_window(spec)).value

    case = {"model": spec.name, "text": Path(args.text).name, "dtype": args.dtype}
    case |= {} if args.level is None else {"level": args.level}
    if args.only_activations:
        for bits in BITS:
            pair = _exact_and_rounded(spec, args.model, bits, DTYPES[args.dtype], tokens)
            precision = Precision.parse(str(bits)).value
            write_row(
                "quality.jsonl", bench="perplexity, int8 activations", unit="perplexity",
                samples=pair[1:],
                case=case | {"precision": precision, "rounding": "int8 activations on CPUs"}
                | {"tokens": len(tokens)},
                baselines={"exact activations": pair[0]},
            )  # fmt: skip
            print(f"{precision}  int8 activations  {pair[1]:.4f}  {pair[1] / pair[0] - 1:+.3%}")
        return
    base = measure(16, None)
    write = functools.partial(
        write_row,
        "quality.jsonl",
        bench="perplexity",
        unit="perplexity",
        baselines={"w16a16": base},
    )
    if args.only_head:
        value = measure(16, None, head=True)
        rounding = "output matrix in 8 bits"
        write(case=case | {"precision": "w16a16", "rounding": rounding}, samples=[value])
        print(f"w16a16  {rounding:25} {value:.4f}  {value / base - 1:+.3%}")
        return
    write(case=case | {"precision": "w16a16", "rounding": "none"}, samples=[base])
    print(f"w16a16  {'':25} {base:.4f}")
    for scheme in schemes():
        value = measure(scheme.bits, scheme)
        precision = Precision.parse(str(scheme.bits)).value
        rounding = "symmetric" if scheme.symmetric else "asymmetric"
        rounding += ", clip search" if scheme.clip_search else ", nearest"
        write(case=case | {"precision": precision, "rounding": rounding}, samples=[value])
        print(f"{precision}  {rounding:25} {value:.4f}  {value / base - 1:+.2%}")


if __name__ == "__main__":
    main()
