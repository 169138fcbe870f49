"""`llmpq-profile indicator`: a model and a text in, omega.json and a table out."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from llmpq.errors import ExitCode
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import WEIGHT_ONLY, KVPrecision, Precision
from llmpq.profiler.cli.tables import omega_table
from llmpq.profiler.timing.cases import model_spec
from llmpq.runtime.cli.flags_without_effect import refuse_idle
from llmpq.sensitivity import Sensitivity

log = logging.getLogger(__name__)

OBSERVED = ("variance", "hessian", "output")
"""Kinds that read weights and a text."""
DEFAULTS: Mapping[str, Any] = {
    "seed": 0, "rounding": "deterministic", "granularity": "group", "text": None, "windows": 16,
    "window": 256, "symmetric": False, "device": "cpu",
}  # fmt: skip
"""What a flag that some kind does not heed says when it is not given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `indicator`."""
    bits = ",".join(str(p.weight_bits) for p in WEIGHT_ONLY)
    kinds = (*OBSERVED, "random")
    parser.set_defaults(main=main, **DEFAULTS)
    parser.add_argument("--kind", choices=kinds, default=kinds[0], help="method")
    parser.add_argument("--model", required=True, help="model directory (random: or a name)")
    parser.add_argument("--text", type=Path, help="calibration text, UTF-8 (not for random)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="omega.json to write")
    parser.add_argument("--bits", default=bits, help=f"precisions: {bits} (default), w8a8, w4a4")
    parser.add_argument("--kv", default="kv8,kv4,kv2", help="KV precisions (default kv8,kv4,kv2)")
    parser.add_argument(
        "--rounding", choices=("deterministic", "stochastic"), help="default deterministic"
    )
    parser.add_argument(
        "--granularity",
        choices=("group", "tensor"),
        help="a step per stored group of weights, or the paper's one per matrix (default group)",
    )
    parser.add_argument("--windows", type=int, help="calibration windows (default 16)")
    parser.add_argument("--window", type=int, help="tokens of one (default 256)")
    parser.add_argument("--symmetric", action="store_true", help="grids without zero points")
    parser.add_argument("--device", help="torch device (default cpu)")
    parser.add_argument("--seed", type=int, help="of --kind random (default 0)")


def main(args: argparse.Namespace) -> int:
    """Compute omega and write it."""
    _refuse_idle_flags(args)
    spec = model_spec(args.model)
    precisions = tuple(Precision.parse(b) for b in args.bits.split(","))
    kv = tuple(KVPrecision.parse(b) for b in args.kv.split(",") if b)
    started = time.perf_counter()
    if args.kind == "random":
        sensitivity = _random(args, spec, precisions, kv)
    else:
        sensitivity = _observed(args, spec, precisions, kv)
    seconds = time.perf_counter() - started
    sensitivity.save_json(args.output)
    Console().print(omega_table(sensitivity))
    log.info("wrote %s (%s indicator, %.1f s)", args.output, args.kind, seconds)
    return ExitCode.DONE


def _refuse_idle_flags(args: argparse.Namespace) -> None:
    """`ValueError` for flags that this kind does not heed."""
    heeded = {
        "seed": ("random",),
        "rounding": ("variance",),
        "granularity": ("variance",),
        **dict.fromkeys(("text", "windows", "window", "symmetric", "device"), OBSERVED),
    }
    for name, kinds in heeded.items():
        given = args.kind not in kinds and getattr(args, name) != DEFAULTS[name]
        refuse_idle({f"--{name}": given}, f"with --kind {args.kind}", f"it is for {_or(kinds)}")


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)


def _random(
    args: argparse.Namespace,
    spec: ModelSpec,
    precisions: tuple[Precision, ...],
    kv: tuple[KVPrecision, ...],
) -> Sensitivity:
    from llmpq.profiler.quality.omega import random_tables

    if args.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {args.seed}")
    weights, caches = random_tables(spec.num_layers, precisions, kv, seed=args.seed)
    return Sensitivity(
        indicator="random",
        model=spec.name,
        model_fingerprint=spec.fingerprint(),
        num_layers=spec.num_layers,
        weights={p: tuple(values) for p, values in weights.items()},
        kv={k: tuple(values) for k, values in caches.items()},
        note=f"uniform random numbers, seed {args.seed}: says nothing about the model",
    )


def _observed(
    args: argparse.Namespace,
    spec: ModelSpec,
    precisions: tuple[Precision, ...],
    kv: tuple[KVPrecision, ...],
) -> Sensitivity:
    import torch

    from llmpq.profiler.quality.observation import cut_windows, observe
    from llmpq.profiler.quality.omega import HessianObserver, VarianceObserver
    from llmpq.profiler.quality.output_error import OutputErrorObserver
    from llmpq.profiler.quantize.recipes import Settings, num_outliers
    from llmpq.runtime.tools.evaluate import usable_device
    from llmpq.runtime.weights.sources import CheckpointSource

    if not Path(args.model).is_dir():
        raise ValueError(
            f"--kind {args.kind} reads real weights: --model must be a model directory, got "
            f"'{args.model}'; a built-in name works with --kind random"
        )
    device = usable_device(args.device)
    # Half the cores: with all of them taken, OpenMP's threads spin while other programs run.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    quantization = Quantization(symmetric=args.symmetric)
    length = min(args.window, spec.max_positions)
    windows = cut_windows(_tokens(args), count=args.windows, length=length, where=args.text)
    observer: HessianObserver | VarianceObserver | OutputErrorObserver
    if args.kind == "hessian":
        observer = HessianObserver(precisions, kv, quantization)
        how = "top eigenvalue of 2 X^T X / T, times |Q(W) - W|^2"
    elif args.kind == "output":
        # As many as `llmpq-quantize` keeps in every linear, wide ones included.
        kept = replace(quantization, outliers=num_outliers(spec, Settings()))
        observer = OutputErrorObserver(precisions, kv, kept)
        how = "mean squared error of every linear's output, inputs rounded where they will be"
    else:
        observer = VarianceObserver(precisions, kv, args.rounding, args.granularity, quantization)
        how = f"eq. (3), {args.rounding} rounding, a step per {args.granularity}"
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("layers", total=spec.num_layers)
        observe(
            spec,
            CheckpointSource(args.model, spec),
            windows,
            observer,
            device=device,
            on_layer=lambda _: progress.advance(task),
        )
    return Sensitivity(
        indicator=args.kind,
        model=spec.name,
        model_fingerprint=spec.fingerprint(),
        num_layers=spec.num_layers,
        weights={p: tuple(values) for p, values in observer.table.items()},
        kv={k: tuple(values) for k, values in observer.kv_table.items()},
        note=f"{how}; {len(windows)} windows of {length} tokens of {args.text.name}",
    )


def _tokens(args: argparse.Namespace) -> list[int]:
    """Read and tokenise the calibration text."""
    from llmpq.runtime.text.tokenizer import Tokenizer

    if args.text is None:
        raise ValueError(f"--kind {args.kind} needs calibration text: give --text FILE")
    for name in ("windows", "window"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text '{args.text}' cannot be read as UTF-8 text: {error}") from None
    return Tokenizer(args.model).encode(text, special=False)
