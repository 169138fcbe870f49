"""`llmpq-profile indicator`: a model and a text in, omega.json and a table out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from llmpq.checkpoints.gguf_file import is_model
from llmpq.checkpoints.hub import local_model
from llmpq.commands.input_text import text_of
from llmpq.errors import ExitCode
from llmpq.models.model_spec import ModelSpec, builtin_name
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.cli.flags import OmegaRequest
from llmpq.profiler.cli.tables import omega_table
from llmpq.profiler.timing.cases import model_spec
from llmpq.sensitivity import Sensitivity
from llmpq.sizes.memory import Quantization

if TYPE_CHECKING:
    from llmpq.profiler.quality.omega import HessianObserver, VarianceObserver
    from llmpq.profiler.quality.output_error import OutputErrorObserver

log = logging.getLogger(__name__)

Tables = tuple[Mapping[Precision, Sequence[float]], Mapping[KVPrecision, Sequence[float]], str]
"""Omega of every layer by precision, of weights and of KV, and how it was computed."""


def main(request: OmegaRequest) -> int:
    """Compute omega and write it."""
    if request.kind != "random":
        _require_weights(request)
        request = replace(request, model=str(local_model(request.model)))
    spec = model_spec(request.model)
    precisions = tuple(Precision.parse(b) for b in request.bits.split(","))
    kv = tuple(KVPrecision.parse(b) for b in request.kv.split(",") if b)
    started = time.perf_counter()
    tables = _random if request.kind == "random" else _observed
    weights, caches, note = tables(request, spec, precisions, kv)
    sensitivity = Sensitivity(
        indicator=request.kind,
        model=spec.name,
        model_fingerprint=spec.fingerprint(),
        num_layers=spec.num_layers,
        weights={p: tuple(values) for p, values in weights.items()},
        kv={k: tuple(values) for k, values in caches.items()},
        note=note,
    )
    seconds = time.perf_counter() - started
    sensitivity.save_json(request.output)
    Console().print(omega_table(sensitivity))
    log.info("wrote %s (%s indicator, %.1f s)", request.output, request.kind, seconds)
    return ExitCode.DONE


def _require_weights(request: OmegaRequest) -> None:
    """Refuse a built-in name: it has a config alone. With an owner, it is one of the hub."""
    built_in = "/" not in request.model and builtin_name(request.model) is not None
    if built_in and not is_model(request.model):
        raise ValueError(
            f"--kind {request.kind} reads real weights: --model must be a directory, a GGUF file "
            "or a name on Hugging Face's hub such as Qwen/Qwen3-0.6B, got the built-in name "
            f"'{request.model}', which works with --kind random"
        )


def _random(
    request: OmegaRequest,
    spec: ModelSpec,
    precisions: tuple[Precision, ...],
    kv: tuple[KVPrecision, ...],
) -> Tables:
    from llmpq.profiler.quality.omega import random_tables

    if request.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {request.seed}")
    weights, caches = random_tables(spec.num_layers, precisions, kv, seed=request.seed)
    note = f"uniform random numbers, seed {request.seed}: says nothing about the model"
    return weights, caches, note


def _observed(
    request: OmegaRequest,
    spec: ModelSpec,
    precisions: tuple[Precision, ...],
    kv: tuple[KVPrecision, ...],
) -> Tables:
    import torch

    from llmpq.profiler.quality.observation import cut_windows, observe
    from llmpq.runtime.backends.backend import usable_device
    from llmpq.runtime.weights.quantized_checkpoint import open_dequantized

    if request.text is None:
        raise ValueError(f"--kind {request.kind} needs calibration text: give --text FILE")
    device = usable_device(request.device)
    # Half the cores: with all of them taken, OpenMP's threads spin while other programs run.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    length = min(request.window, spec.max_positions)
    windows = cut_windows(
        _tokens(request, request.text), count=request.windows, length=length, where=request.text
    )
    observer, how = _observer(request, spec, precisions, kv)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("layers", total=spec.num_layers)
        observe(
            spec,
            open_dequantized(request.model, spec),
            windows,
            observer,
            device=device,
            on_layer=lambda _: progress.advance(task),
        )
    note = f"{how}; {len(windows)} windows of {length} tokens of {request.text.name}"
    return observer.table, observer.kv_table, note


def _observer(
    request: OmegaRequest,
    spec: ModelSpec,
    precisions: tuple[Precision, ...],
    kv: tuple[KVPrecision, ...],
) -> tuple[HessianObserver | VarianceObserver | OutputErrorObserver, str]:
    """Return what sees every layer's inputs, and in words what it computes of them."""
    from llmpq.profiler.quality.omega import HessianObserver, VarianceObserver
    from llmpq.profiler.quality.output_error import OutputErrorObserver
    from llmpq.profiler.quantize.recipes import Settings, num_outliers

    quantization = Quantization(symmetric=request.symmetric)
    if request.kind == "hessian":
        how = "top eigenvalue of 2 X^T X / T, times |Q(W) - W|^2"
        return HessianObserver(precisions, kv, quantization), how
    if request.kind == "output":
        # As many as `llmpq-quantize` keeps in every linear, wide ones included.
        kept = replace(quantization, outliers=num_outliers(spec, Settings()))
        how = "mean squared error of every linear's output, inputs rounded where they will be"
        return OutputErrorObserver(precisions, kv, kept), how
    rounding, granularity = request.rounding, request.granularity
    how = f"eq. (3), {rounding} rounding, a step per {granularity}"
    return VarianceObserver(precisions, kv, rounding, granularity, quantization), how


def _tokens(request: OmegaRequest, path: Path) -> list[int]:
    """Read and tokenise the calibration text."""
    from llmpq.runtime.text.tokenizer import Tokenizer

    for name in ("windows", "window"):
        if getattr(request, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(request, name)}")
    return Tokenizer(request.model).encode(text_of("--text", path), special=False)
