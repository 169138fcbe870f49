"""`llmpq-quantize MODEL OUT --scheme w4a4 --text FILE`: a quantised copy of a model directory.

Schemes: w4a4 (Atom: 4-bit weights and activations, outlier channels in 8 bits), w8a8, and
weight-only: w8a16, w4a16, w3a16. One for all layers, one per layer with commas, or a plan's own.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llmpq.checkpoints.hub import local_model
from llmpq.commands.command_line import run_command
from llmpq.commands.input_text import text_of
from llmpq.errors import ExitCode
from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.precision import K_PADDING, KVPrecision, Precision
from llmpq.profiler.cli.flags import QuantizeRequest, quantize_parser
from llmpq.sizes.memory import Quantization
from llmpq.units import format_size

_log = logging.getLogger("llmpq.quantize")
MOST_WINDOWS = 128
"""Of calibration text, unless --windows says more."""


class QuantizeProgress:
    """Shows layers done and bytes written."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._bytes = num_layers, 0
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("quantising"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} layers, {task.fields[size]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("layers", total=num_layers, size="0 B")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, index: int, size: int, resumed: bool) -> None:
        """Take a finished layer."""
        self._bytes += size
        if self._bar is not None:
            self._bar.update(self._task, completed=index + 1, size=format_size(self._bytes))
            return
        how = "already there" if resumed else "quantised"
        _log.info("layer %d of %d %s, %s", index + 1, self._num_layers, how, format_size(size))


if TYPE_CHECKING:
    from llmpq.profiler.quantize.whole_model import QuantizeJob

log = logging.getLogger("llmpq.quantize")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("llmpq").setLevel(logging.INFO)
    words = sys.argv[1:] if argv is None else argv
    return run_command(
        "llmpq-quantize",
        lambda: quantize(quantize_parser().read_as(QuantizeRequest, words)),
        interrupted="stopped; run the same command again to continue",
        no_memory="calibrate with fewer --windows or a shorter --window, or on another --device; "
        "into a new directory if layers are there",
        own_process=argv is None,
    )


def quantize(request: QuantizeRequest) -> int:
    """Quantise and write; return the exit code."""
    import torch

    from llmpq.profiler.cli.quantize import QuantizeProgress
    from llmpq.profiler.quantize.whole_model import quantize_model
    from llmpq.runtime.backends.backend import usable_device
    from llmpq.runtime.weights.quantized_checkpoint import open_dequantized

    device = usable_device(request.device)
    if request.output.exists() and not request.output.is_dir():
        raise ValueError(f"'{request.output}' is a file, expected a directory to write")
    request = replace(request, model=local_model(request.model))
    spec = ModelSpec.from_directory(request.model)
    job = make_job(request, spec)
    started = time.perf_counter()
    with torch.inference_mode(), QuantizeProgress(spec.num_layers) as progress:
        quantize_model(
            job,
            open_dequantized(request.model, spec),
            request.output,
            device=device,
            dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
            on_layer=progress.update,
        )
    if not job.settings.symmetric and any(_weight_only(p) for p in job.precisions):
        log.info("its zero points are read by llmpq-dist, not by Transformers: plan --symmetric")
    unread = unread_by_transformers(spec, job.precisions)
    if unread is not None:
        log.info(unread)
    size = sum(path.stat().st_size for path in request.output.glob("*.safetensors"))
    seconds = time.perf_counter() - started
    log.info("wrote %s: %s, %.0f s", request.output, format_size(size), seconds)
    return int(ExitCode.DONE)


def unread_by_transformers(spec: ModelSpec, precisions: Sequence[Precision]) -> str | None:
    """Return what Transformers does not read of a copy, None where it reads all."""
    what = FAMILIES[spec.family].codes_unread
    coded = set(precisions) - {Precision.W16A16}
    if what is None or not coded or Precision.W4A4 in coded:  # that no other reader takes at all
        return None
    if what == "experts" and not spec.experts:
        return None
    return f"Transformers does not read {what} of a quantised {spec.family}; llmpq-dist does"


def make_job(request: QuantizeRequest, spec: ModelSpec) -> QuantizeJob:
    """Resolve plan, precisions and groups, check them, and read the text."""
    from llmpq.profiler.quantize.layer_walk import random_windows
    from llmpq.profiler.quantize.linears_in_turn import refuse_experts
    from llmpq.profiler.quantize.recipes import Settings
    from llmpq.profiler.quantize.whole_model import QuantizeJob, spread

    plan = _plan(request, spec)
    named = plan.precisions if plan else _named(request.scheme)
    _refuse_without_layers(request, named)
    planned = plan.settings() if plan else Quantization(symmetric=True)
    asked = planned.outliers if plan and request.outliers is None else request.outliers
    group_size = _group_size(request.group_size) if request.group_size else planned.group_size
    _require_packed(group_size, named)
    _require_whole_groups(request.integer_scales, group_size)
    precisions = spread(named, spec.num_layers)
    _require_whole_rows(spec, precisions, group_size)
    if request.in_turn:
        refuse_experts(spec)
    tokens, length = _tokens(request, spec.vocab), min(request.window, spec.max_positions)
    # Time and memory grow with the windows, and those of a short text say the same again and again.
    windows = max(1, min(MOST_WINDOWS, math.ceil(2 * len(tokens) / max(1, length))))
    return QuantizeJob(
        spec=spec,
        precisions=precisions,
        settings=Settings(
            method=request.method,
            variant=request.variant or "improved",
            in_turn=request.in_turn,
            integer_scales=request.integer_scales,
            group_size=group_size,
            symmetric=planned.symmetric and not request.asymmetric,
            outliers=asked,
        ),
        kv=_kv(request, plan),
        windows_WT=random_windows(
            tokens,
            count=windows if request.windows is None else request.windows,
            length=length,
            seed=request.seed,
        ),
    )


def _named(scheme: str | None) -> list[Precision]:
    return [Precision.parse(name) for name in (scheme or "").split(",")]


def _plan(request: QuantizeRequest, spec: ModelSpec) -> Plan | None:
    if (request.scheme is None) == (request.plan is None):
        raise ValueError("give either --scheme (say, w4a4) or --plan plan.json")
    if request.plan is None:
        return None
    plan = Plan.load(request.plan)
    plan.require_model(spec)
    return plan


def _refuse_without_layers(request: QuantizeRequest, precisions: Sequence[Precision]) -> None:
    """Refuse options that no layer of these precisions takes."""
    w4a4 = Precision.W4A4 in precisions
    weight_only = any(_weight_only(p) for p in precisions)
    for option, given, heeded, what in (
        ("--variant", request.variant, w4a4, "w4a4 layers"),
        ("--outliers", request.outliers is not None, w4a4, "w4a4 layers"),
        ("--in-turn", request.in_turn, w4a4, "w4a4 layers"),
        ("--integer-scales", request.integer_scales, w4a4, "w4a4 layers"),
        ("--asymmetric", request.asymmetric, weight_only, "w3a16, w4a16 and w8a16 layers"),
        ("--group-size", request.group_size, w4a4 or weight_only, "w4a4 and weight-only layers"),
    ):
        if given and not heeded:
            raise ValueError(f"{option} is for {what}, there are none here; leave it out")


def _require_whole_groups(integer_scales: bool, group_size: int | None) -> None:
    """Refuse integer scales of groups that no kernel makes faster."""
    if integer_scales and group_size != K_PADDING:
        raise ValueError(
            f"--integer-scales: got groups of {group_size or 'a channel'}, expected {K_PADDING}: "
            "no kernel gains by others; set --group-size"
        )


def _require_packed(group_size: int | None, precisions: Sequence[Precision]) -> None:
    """Refuse groups that weight-only layers cannot have, before anything is rounded."""
    if group_size in (None, K_PADDING):
        return
    for precision in precisions:
        if _weight_only(precision):
            raise ValueError(
                f"--group-size: got {group_size}, {precision.value} layers have {K_PADDING} or "
                "channel: the packed kernels know no other"
            )


def _require_whole_rows(
    spec: ModelSpec, precisions: Sequence[Precision], group_size: int | None
) -> None:
    """Refuse rows that are no whole groups, which compressed-tensors does not store."""
    for index, precision in enumerate(precisions):
        if group_size is None or not _weight_only(precision):
            continue
        for linear in spec.of_layer(index).linears():
            if linear.in_features % group_size:
                raise ValueError(
                    f"{linear.kind} of layer {index} has {linear.in_features} inputs, which do not "
                    f"divide into groups of {group_size}, as compressed-tensors needs; quantise "
                    "with --group-size channel"
                )


def _weight_only(precision: Precision) -> bool:
    return precision.weight_bits < precision.activation_bits


def _kv(request: QuantizeRequest, plan: Plan | None) -> KVPrecision:
    if request.kv_cache_dtype:
        asked = KVPrecision.parse(request.kv_cache_dtype)
        if asked.is_apart:
            raise ValueError(
                f"--kv-cache-dtype {request.kv_cache_dtype}: config.json names one number of bits "
                "for keys and values; leave it out, and give it to llmpq-dist, which takes both"
            )
        return asked
    kv = plan.workload.kv if plan else KVPrecision.KV16
    if kv.is_apart:
        log.warning(
            "config.json names no KV bits: it has one number for keys and values, the plan has "
            "%s; llmpq-dist run --kv-cache-dtype %s takes both",
            *(kv.title, kv.value),
        )
    return kv


def _group_size(text: str) -> int | None:
    if text == "channel":
        return None
    if text not in ("32", "64", "128"):
        raise ValueError(f"--group-size '{text}': expected 128, 64, 32 or channel")
    return int(text)


def _tokens(request: QuantizeRequest, vocab: int) -> list[int]:
    from llmpq.runtime.text.tokenizer import Tokenizer

    texts = [text_of("--text", path) for path in request.text]
    tokens = Tokenizer(request.model).encode("\n\n".join(texts), special=False)
    if max(tokens, default=0) >= vocab:
        raise ValueError(
            f"'{request.model}': its tokenizer makes token {max(tokens)} of --text, config.json "
            f"says {vocab} tokens: the two do not belong together; download the model again"
        )
    return tokens


if __name__ == "__main__":
    sys.exit(main())
