"""Perplexity of a model on a text, whole or as a plan quantises it: `llmpq-dist eval`.

The text is one stream of tokens without special tokens; every token of a window but its first is
predicted from those before it in the window. Perplexity is exp(mean negative log-likelihood), in
float32. Protocols:

    all      windows that do not overlap, the last one as short as it is
    gptq     the same without that last one, as GPTQ and most papers after it
    stride   windows overlap: each starts `stride` tokens after the one before it and counts only
             the tokens that are new, all of which have window - stride tokens of context

Agreement is the share of positions at which two models hold the same token to be most likely.

Legend: B windows at once, Q tokens of a window, V vocabulary.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.command_line import refuse_without_effect
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.cache.plain_kv import KVCache
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.cli.tool_flags import EvalOptions
from llmpq.runtime.engine.plain_loop import LocalPipeline
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.runtime.step import Step
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.weights.quantized_checkpoint import (
    QuantizedCheckpoint,
    open_checkpoint,
    stored_kv,
)

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
    stride: int
    """Tokens from the start of a window to that of the next one."""

    def protocol(self) -> str:
        """Return how it was measured, in one line."""
        overlap = self.window - self.stride
        apart = f"windows that overlap by {overlap}" if overlap else "non-overlapping windows"
        return (
            f"{self.num_tokens} tokens predicted in {self.num_windows} {apart} of "
            f"at most {self.window} tokens, no special tokens"
        )


@dataclass(frozen=True)
class Window:
    """Consecutive tokens, of which the last `counted` are judged."""

    tokens: Sequence[int]
    counted: int


def windows(
    tokens: Sequence[int], length: int, *, stride: int | None = None, whole: bool = False
) -> list[Window]:
    """Cut a token stream; `whole` leaves out windows that are not full."""
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, got {length}")
    step = length if stride is None else stride
    if not 0 < step <= length:
        raise ValueError(f"the stride must be between 1 and the window's {length}, got {step}")
    cut: list[Window] = []
    for start in range(0, len(tokens), step):
        piece = tokens[start : start + length]
        new = min(len(piece) - 1, len(piece) - (length - step)) if cut else len(piece) - 1
        if new > 0 and not (whole and len(piece) < length):
            cut.append(Window(piece, new))
    if not cut:
        needed = length if whole else 2
        raise ValueError(f"perplexity needs a text of at least {needed} tokens, got {len(tokens)}")
    return cut


def perplexity(
    pipeline: LocalPipeline,
    tokens: Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    whole: bool = False,
    on_window: Callable[[int, float], None] | None = None,
) -> Perplexity:
    """Return the perplexity of a token stream; `on_window` hears of windows done and the value."""
    length = min(MAX_WINDOW, pipeline.spec.max_positions) if window is None else window
    pieces = windows(tokens, length, stride=stride, whole=whole)
    caches = pipeline.caches(1, length)
    total, count = 0.0, 0
    for index, piece in enumerate(pieces):
        logits_QV = _window_logits(pipeline, piece, caches)
        targets = torch.tensor(piece.tokens[-piece.counted :], device=pipeline.device)
        total += _loss_sum(logits_QV, targets)
        count += piece.counted
        if on_window is not None:
            on_window(index + 1, math.exp(total / count))
    return Perplexity(
        value=math.exp(total / count),
        num_tokens=count,
        num_windows=len(pieces),
        window=length,
        stride=stride or length,
    )


def agreement(
    pipeline: LocalPipeline, other: LocalPipeline, tokens: Sequence[int], *, window: int
) -> float:
    """Return the share of positions at which both models' most likely next token is the same."""
    pieces = windows(tokens, window)
    pairs = [(model, model.caches(1, window)) for model in (pipeline, other)]
    same = 0
    for piece in pieces:
        ours, theirs = (
            _window_logits(model, piece, caches).argmax(-1).cpu() for model, caches in pairs
        )
        same += int((ours == theirs).sum())
    return same / sum(piece.counted for piece in pieces)


def _window_logits(pipeline: LocalPipeline, piece: Window, caches: Sequence[KVCache]) -> Tensor:
    """Return the logits [counted, V] that predict a window's judged tokens."""
    tokens_BQ = torch.tensor([list(piece.tokens)], device=pipeline.device)
    step = Step.of([0], [0], [len(piece.tokens)], device=pipeline.device)
    logits_BQV = pipeline.logits(tokens_BQ, step, caches, all_positions=True)
    return logits_BQV[0, -1 - piece.counted : -1]


def _loss_sum(logits_QV: Tensor, targets_Q: Tensor) -> float:
    """Return the summed negative log-likelihood, a few hundred positions at a time."""
    losses = [
        functional.cross_entropy(part.float(), target, reduction="sum")
        for part, target in zip(logits_QV.split(256), targets_Q.split(256), strict=True)
    ]
    return float(torch.stack(losses).sum())


def main(options: EvalOptions) -> int:
    """Print the perplexity of `--text` and the protocol; return the exit code."""
    pipeline, described = load(
        options.model,
        precision=options.precision,
        plan=options.plan,
        symmetric=options.symmetric,
        kv=options.kv_cache_dtype,
        dtype=options.dtype,
        device=options.device,
    )
    tokens = Tokenizer(options.model).encode(_text(options.text), special=False)
    result = perplexity(
        pipeline,
        tokens,
        window=options.window,
        stride=options.stride,
        whole=options.protocol == "gptq",
        on_window=None if options.json else _show_progress,
    )
    shares: dict[str, float] = {}
    if options.agreement or options.reference:
        other = _reference(options, pipeline)
        shares["agreement"] = agreement(pipeline, other, tokens, window=result.window)
    dtype = str(pipeline.dtype).removeprefix("torch.")
    if options.json:
        named = {"model": pipeline.spec.name, "precision": described, "dtype": dtype}
        sys.stdout.write(json.dumps(named | asdict(result) | shares) + "\n")
        return 0
    sys.stdout.write(
        f"perplexity {result.value:.4f}  ({pipeline.spec.name}, {described}, {dtype})\n"
        f"{result.protocol()}\n"
    )
    for share in shares.values():
        sys.stdout.write(f"greedy agreement with 16 bits: {share:.2%} of positions\n")
    return 0


def load(
    model: str,
    *,
    precision: str | None = None,
    plan: str | None = None,
    symmetric: bool = False,
    kv: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
) -> tuple[LocalPipeline, str]:
    """Return a model whole in this process, and its precisions in words.

    A quantised directory runs as it is stored unless a precision or plan says otherwise; so does
    its KV cache, which prompts then read packed, query by query.
    """
    spec = ModelSpec.from_directory(model)
    precisions, quantization, planned_dtype, planned_kv = _precisions(
        precision, plan, symmetric, spec
    )
    source = open_checkpoint(model, spec)
    pipeline = LocalPipeline.build(
        spec,
        source,
        precisions=precisions,
        scheme=quantization.scheme,
        dtype=DTYPES[dtype or planned_dtype],
        device=usable_device(device),
    )
    bits = KVPrecision.parse(kv) if kv is not None else planned_kv or stored_kv(model)
    as_stored = isinstance(source, QuantizedCheckpoint) and precision is None and plan is None
    described = "quantised as stored" if as_stored else describe(precisions)
    if bits is KVPrecision.KV16:
        return pipeline, described
    fields = (pipeline.spec, pipeline.stages, pipeline.dtype, pipeline.device)
    return LowBitPipeline(*fields, bits), f"{described}, {bits.value}"


@dataclass(frozen=True)
class LowBitPipeline(LocalPipeline):
    """A pipeline whose prompts, too, attend to packed keys and values.

    `key_group` tokens share a channel's key scale; None: one scale per token.
    """

    kv: KVPrecision
    key_group: int | None = 128

    def caches(self, slots: int, max_len: int) -> list[KVCache]:
        """Return one empty cache per stage."""
        return [
            LowBitKV(
                self.spec,
                self.kv,
                num_layers=len(stage.layers),
                slots=slots,
                max_len=max_len,
                dtype=self.dtype,
                device=self.device,
                key_group=self.key_group,
                exact_prompt=False,
            )
            for stage in self.stages
        ]


def _reference(options: EvalOptions, pipeline: LocalPipeline) -> LocalPipeline:
    """Return the 16-bit model that agreement is measured with."""
    directory = options.reference or options.model
    source = open_checkpoint(directory, pipeline.spec)
    if isinstance(source, QuantizedCheckpoint):
        raise ValueError(
            f"'{directory}' is quantised; give the directory it was made from with --reference"
        )
    return LocalPipeline.build(pipeline.spec, source, dtype=pipeline.dtype, device=pipeline.device)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text '{path}' cannot be read as UTF-8 text: {error}") from None


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
    named: str | None, plan_file: str | None, symmetric: bool, spec: ModelSpec
) -> tuple[tuple[Precision, ...], Quantization, str, KVPrecision | None]:
    """Return every layer's precision, how it is stored, dtype and KV, from plan or option."""
    if plan_file is not None:
        if named is not None or symmetric:
            raise ValueError("a plan says the precisions: name them, or the plan")
        plan = load_plan(plan_file)
        plan.require_model(spec)
        work = plan.workload
        return plan.precisions, plan.quantization.settings(), work.dtype, work.kv
    chosen = [Precision.parse(name) for name in ("w16a16" if named is None else named).split(",")]
    if len(chosen) == 1:
        chosen *= spec.num_layers
    if len(chosen) != spec.num_layers:
        raise ValueError(
            f"--precision names {len(chosen)} layers, {spec.name} has {spec.num_layers}; give one "
            "precision for all, or one per layer"
        )
    if symmetric and not any(_has_zeros(precision) for precision in chosen):
        refuse_without_effect(
            {"--symmetric": True}, "on weights without zeros", "add --precision w4a16"
        )
    return tuple(chosen), Quantization(symmetric=symmetric), "float32", None


def _has_zeros(precision: Precision) -> bool:
    """Whether weights are stored in another way without zero points."""
    return Quantization(symmetric=True).scheme(precision) != Quantization().scheme(precision)


def _show_progress(windows: int, value: float) -> None:
    """Overwrite one line of a terminal; `\\x1b[K` clears what the line before left."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{windows} windows, perplexity so far {value:.4f}\x1b[K\r")
