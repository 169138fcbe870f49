"""Perplexity of a model on a text, whole or as a plan quantises it: `llmpq-dist eval`.

Protocol: the text as one stream of tokens, no special tokens, cut into windows that do not
overlap; every token of a window but its first is predicted from those before it in the window.
Perplexity is exp(mean negative log-likelihood), in float32.

Legend: B windows at once, Q tokens of a window, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.precision import Precision
from llmpq.runtime.generate import LocalPipeline
from llmpq.runtime.stage_model import DTYPES
from llmpq.runtime.step import Step
from llmpq.runtime.tokenizer import Tokenizer

MAX_WINDOW = 2048
"""Longest window, as in the papers; a shorter trained context shortens it."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A perplexity and what it was measured on."""

    value: float
    num_tokens: int
    """Tokens predicted."""
    num_windows: int
    window: int

    def protocol(self) -> str:
        """Return how it was measured, in one line."""
        return (
            f"{self.num_tokens} tokens predicted in {self.num_windows} non-overlapping windows of "
            f"at most {self.window} tokens, no special tokens"
        )


def perplexity(
    pipeline: LocalPipeline,
    tokens: Sequence[int],
    *,
    window: int | None = None,
    on_window: Callable[[int, float], None] | None = None,
) -> Perplexity:
    """Return the perplexity of a token stream; `on_window` hears of windows done and the value."""
    length = window or min(MAX_WINDOW, pipeline.spec.max_positions)
    pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise ValueError(f"perplexity needs a text of at least 2 tokens, got {len(tokens)}")
    caches = pipeline.caches(1, length)
    total, count = 0.0, 0
    for index, piece in enumerate(pieces):
        tokens_BQ = torch.tensor([piece], device=pipeline.device)
        step = Step.of([0], [0], [len(piece)], device=pipeline.device)
        logits_BQV = pipeline.logits(tokens_BQ, step, caches, all_positions=True)
        total += _loss_sum(logits_BQV[:, :-1], tokens_BQ[:, 1:])
        count += len(piece) - 1
        if on_window is not None:
            on_window(index + 1, math.exp(total / count))
    return Perplexity(
        value=math.exp(total / count), num_tokens=count, num_windows=len(pieces), window=length
    )


def _loss_sum(logits_BQV: Tensor, targets_BQ: Tensor) -> float:
    """Return the summed negative log-likelihood, a few hundred positions at a time."""
    rows, targets = logits_BQV.flatten(0, 1), targets_BQ.flatten()
    losses = [
        functional.cross_entropy(part.float(), target, reduction="sum")
        for part, target in zip(rows.split(256), targets.split(256), strict=True)
    ]
    return float(torch.stack(losses).sum())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `llmpq-dist eval`."""
    parser.add_argument("--model", required=True, help="local Hugging Face model directory")
    parser.add_argument("--text", required=True, help="text file to predict")
    parser.add_argument(
        "--precision", help="precision of all layers, or one per layer with commas (default w16a16)"
    )
    parser.add_argument("--strat_file_name", help="plan whose precisions and quantisation to use")
    parser.add_argument("--symmetric", action="store_true", help="quantise without zero points")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: the plan's, or float32")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Print the perplexity of `--text` and the protocol; return the exit code."""
    spec = ModelSpec.from_directory(args.model)
    precisions, quantization, planned_dtype = _precisions(args, spec)
    dtype = args.dtype or planned_dtype
    device = usable_device(args.device)
    try:
        text = Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text '{args.text}' cannot be read as UTF-8 text: {error}") from None
    tokens = Tokenizer(args.model).encode(text, special=False)
    pipeline = LocalPipeline.from_directory(
        args.model,
        precisions=precisions,
        scheme=quantization.scheme,
        dtype=DTYPES[dtype],
        device=device,
    )
    result = perplexity(pipeline, tokens, on_window=None if args.json else _show_progress)
    described = describe(precisions)
    if args.json:
        row = {"model": spec.name, "precision": described, "dtype": dtype, **asdict(result)}
        sys.stdout.write(json.dumps(row) + "\n")
    else:
        sys.stdout.write(
            f"perplexity {result.value:.4f}  ({spec.name}, {described}, {dtype})\n"
            f"{result.protocol()}\n"
        )
    return 0


def usable_device(name: str) -> torch.device:
    """Return the torch device of that name; `ValueError` if this machine has none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device '{name}' is not a torch device; expected cpu or cuda") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"--device '{name}' is not supported; expected cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(
            f"--device '{name}': torch sees {count} CUDA devices here; leave --device out to use "
            "the CPU, or check nvidia-smi and that torch is built with CUDA"
        )
    return device


def describe(precisions: Sequence[Precision]) -> str:
    """Return runs of equal precisions: `w8a16 x2, w4a16 x6`."""
    runs: list[tuple[Precision, int]] = []
    for precision in precisions:
        if runs and runs[-1][0] is precision:
            runs[-1] = (precision, runs[-1][1] + 1)
        else:
            runs.append((precision, 1))
    return ", ".join(f"{precision.value} x{count}" for precision, count in runs)


def _precisions(
    args: argparse.Namespace, spec: ModelSpec
) -> tuple[tuple[Precision, ...], Quantization, str]:
    """Return the precision of every layer, how it is stored, and the dtype, from plan or option."""
    if args.strat_file_name:
        if args.precision or args.symmetric:
            raise ValueError("--strat_file_name says the precisions; leave out the other options")
        plan = Plan.load(args.strat_file_name)
        plan.require_model(spec)
        return plan.precisions, plan.quantization.settings(), plan.workload.dtype
    chosen = [Precision.parse(name) for name in (args.precision or "w16a16").split(",")]
    if len(chosen) == 1:
        chosen *= spec.num_layers
    if len(chosen) != spec.num_layers:
        raise ValueError(
            f"--precision names {len(chosen)} layers, {spec.name} has {spec.num_layers}; give one "
            "precision for all, or one per layer"
        )
    return tuple(chosen), Quantization(symmetric=args.symmetric), "float32"


def _show_progress(windows: int, value: float) -> None:
    """Overwrite one line of a terminal; `\\x1b[K` clears what the line before left."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{windows} windows, perplexity so far {value:.4f}\x1b[K\r")
