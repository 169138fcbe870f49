"""Perplexity of a model on a text, whole or as a plan quantises it: `llmpq-dist eval`.

The text is one stream of tokens without special tokens; every token of a window but its first is
predicted from those before it in the window. Perplexity is exp(mean negative log-likelihood), in
float32. Protocols:

    all      windows that do not overlap, the last one as short as it is
    gptq     the same without that last one, as GPTQ and most papers after it
    stride   windows overlap: each starts `stride` tokens after the one before it and counts only
             the tokens that are new, all of which have window - stride tokens of context

Agreement is the share of positions at which two models hold the same token to be most likely.

A model is measured as it serves: `LLM` scores every window as a prompt.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from llmpq.checkpoints.hub import local_model
from llmpq.commands.command_line import refuse_without_effect
from llmpq.commands.input_text import text_of
from llmpq.devices.this_machine import read_host, useful_threads
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan, QuantizationForm
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.backends.backend import usable_device
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.cli.tool_flags import EvalOptions
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.launch.plans.manual_plan import manual_plan, on_gpu
from llmpq.runtime.options.engine_options import AUTO
from llmpq.runtime.requests.sampling_params import SamplingParams
from llmpq.runtime.weights.quantized_checkpoint import (
    QuantizedCheckpoint,
    open_checkpoint,
    stored_kv,
)
from llmpq.sizes.memory import CpuActivations, Quantization
from llmpq.workload import DTYPE_BYTES, Dtype, Workload

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
    step = _step(length, stride)
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


def _step(length: int, stride: int | None) -> int:
    """Return how far apart windows start; `ValueError` for windows that cannot be."""
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, got {length}")
    step = length if stride is None else stride
    if not 0 < step <= length:
        raise ValueError(f"the stride must be between 1 and the window's {length}, got {step}")
    return step


Scores = Callable[[Sequence[int]], tuple[Sequence[float], Sequence[int]]]
"""Of a window's tokens: the log-likelihood of every one but the first given those before it, and
the token that is most likely in its place."""


def scores_of(llm: LLM) -> Scores:
    """Return how a model that is loaded judges windows."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)

    def scores(tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        (answer,) = llm.generate([list(tokens)], params)
        scored = [row for row in answer.or_raise().prompt_logprobs or () if row is not None]
        own = [row[token].logprob for row, token in zip(scored, tokens[1:], strict=True)]
        return own, [list(row)[-1] for row in scored]

    return scores


def perplexity(
    scores: Scores,
    tokens: Sequence[int],
    *,
    window: int,
    stride: int | None = None,
    whole: bool = False,
    on_window: Callable[[int, float], None] | None = None,
) -> Perplexity:
    """Return the perplexity of a token stream; `on_window` gets the windows done and the value."""
    pieces = windows(tokens, window, stride=stride, whole=whole)
    total, count = 0.0, 0
    for index, piece in enumerate(pieces):
        own, _ = scores(piece.tokens)
        total -= math.fsum(own[-piece.counted :])
        count += piece.counted
        if on_window is not None:
            on_window(index + 1, math.exp(total / count))
    return Perplexity(
        value=math.exp(total / count),
        num_tokens=count,
        num_windows=len(pieces),
        window=window,
        stride=stride or window,
    )


def agreement(scores: Scores, other: Scores, tokens: Sequence[int], *, window: int) -> float:
    """Return the share of positions at which both models' most likely next token is the same."""
    same = count = 0
    for piece in windows(tokens, window):
        pairs = zip(scores(piece.tokens)[1], other(piece.tokens)[1], strict=True)
        same += sum(ours == theirs for ours, theirs in pairs)
        count += piece.counted
    return same / count


def main(options: EvalOptions) -> int:
    """Print the perplexity of `--text` and the protocol; return the exit code."""
    text = text_of("--text", options.text)
    options = replace(
        options,
        model=str(local_model(options.model)),
        reference=None if options.reference is None else str(local_model(options.reference)),
    )
    spec = ModelSpec.from_directory(options.model)
    window = longest_window(spec) if options.window is None else options.window
    _step(window, options.stride)  # before anything is loaded
    if window > spec.max_positions:
        raise ValueError(
            f"--window {window} is beyond the {spec.max_positions} positions of {spec.name}; give "
            "a shorter one"
        )
    job = MeasuredJob(max_len=window, dtype=options.dtype, device=usable_device(options.device))
    plan, described = measured_plan(
        options.model,
        spec,
        job,
        precision=options.precision,
        plan=options.plan,
        symmetric=options.symmetric,
        head_bits=options.head_bits,
        cpu_activations=options.cpu_activations,
        kv=None if options.engine.kv_cache_dtype == AUTO else options.engine.kv_cache_dtype,
    )
    with open_model(options.model, plan) as llm:
        tokens = llm.tokenizer.encode(text, special=False)
        result = perplexity(
            scores_of(llm),
            tokens,
            window=window,
            stride=options.stride,
            whole=options.protocol == "gptq",
            on_window=None if options.json else _show_progress,
        )
        shares: dict[str, float] = {}
        if options.agreement or options.reference:
            with _reference(options, job, plan.workload.dtype) as other:
                both = scores_of(llm), scores_of(other)
                shares["agreement"] = agreement(*both, tokens, window=window)
    dtype = plan.workload.dtype
    if options.json:
        named = {"model": spec.name, "precision": described, "dtype": dtype}
        sys.stdout.write(json.dumps(named | asdict(result) | shares) + "\n")
        return 0
    sys.stdout.write(
        f"perplexity {result.value:.4f}  ({spec.name}, {described}, {dtype})\n{result.protocol()}\n"
    )
    for share in shares.values():
        sys.stdout.write(f"greedy agreement with 16 bits: {share:.2%} of positions\n")
    return 0


def longest_window(spec: ModelSpec) -> int:
    """Return the default window of a model."""
    return min(MAX_WINDOW, spec.max_positions)


@dataclass(frozen=True, kw_only=True)
class MeasuredJob:
    """What a model is loaded for when it is measured, beside its precisions."""

    max_len: int
    """Tokens of the longest window, or of a prompt and its answer."""
    batch: int = 1
    """Requests at once."""
    dtype: Dtype | None = None
    """None: the plan's, or float32."""
    device: torch.device = torch.device("cpu")


def measured_plan(
    model: str,
    spec: ModelSpec,
    job: MeasuredJob,
    *,
    precision: str | None = None,
    plan: str | None = None,
    symmetric: bool = False,
    head_bits: Literal[8, 16] | None = None,
    cpu_activations: CpuActivations | None = None,
    kv: str | None = None,
) -> tuple[Plan, str]:
    """Return the plan of a whole model on one device, and its precisions in words.

    A quantised directory runs as it is stored unless a precision or plan says otherwise; so does
    its KV cache.
    """
    precisions, form, planned_dtype, planned_kv = _precisions(precision, plan, symmetric, spec)
    bits = KVPrecision.parse(kv) if kv is not None else planned_kv or stored_kv(model)
    asked = {"head_bits": head_bits, "cpu_activations": cpu_activations}
    form = form.model_copy(update={key: value for key, value in asked.items() if value})
    as_stored = precision is None and plan is None and _is_quantised(model, spec)
    described = "quantised as stored" if as_stored else describe(precisions)
    weight_bytes = spec.num_params * DTYPE_BYTES["float32"]
    made = manual_plan(
        spec,
        Workload(
            batch=job.batch,
            prompt_len=job.max_len,
            gen_len=1,
            kv=bits,
            dtype=job.dtype or planned_dtype,
        ),
        precision=precisions,
        quantization=form,
        decode_microbatch=job.batch,
        threads=useful_threads(read_host().threads, weight_bytes),
    )
    if job.device.type == "cuda":
        made = on_gpu(made, job.device.index or 0)
    return made, described if bits is KVPrecision.KV16 else f"{described}, {bits.value}"


def open_model(model: str, plan: Plan) -> LLM:
    """Load a model for prompts that share nothing, each computed at once."""
    return LLM(
        model,
        plan=plan,
        backend="threads",
        max_num_batched_tokens=plan.workload.prompt_len,
        enable_prefix_caching=False,
    )


def _reference(options: EvalOptions, job: MeasuredJob, dtype: Dtype) -> LLM:
    """Return the 16-bit model that agreement is measured with."""
    directory = options.reference or options.model
    spec = ModelSpec.from_directory(directory)
    if _is_quantised(directory, spec):
        raise ValueError(
            f"'{directory}' is quantised; give the directory it was made from with --reference"
        )
    plan, _ = measured_plan(directory, spec, replace(job, dtype=dtype))
    return open_model(directory, plan)


def _is_quantised(model: str, spec: ModelSpec) -> bool:
    return isinstance(open_checkpoint(model, spec), QuantizedCheckpoint)


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
) -> tuple[tuple[Precision, ...], QuantizationForm, Dtype, KVPrecision | None]:
    """Return every layer's precision, how it is stored, dtype and KV, from plan or option."""
    if plan_file is not None:
        if named is not None or symmetric:
            raise ValueError("a plan says the precisions: name them, or the plan")
        plan = load_plan(plan_file)
        plan.require_model(spec)
        work = plan.workload
        form = plan.quantization.model_copy(update={"head_bits": plan.settings().head_bits})
        return plan.precisions, form, work.dtype, work.kv
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
    return tuple(chosen), QuantizationForm(symmetric=symmetric, head_bits=16), "float32", None


def _has_zeros(precision: Precision) -> bool:
    """Whether weights are stored in another way without zero points."""
    return Quantization(symmetric=True).scheme(precision) != Quantization().scheme(precision)


def _show_progress(windows: int, value: float) -> None:
    """Overwrite one line of a terminal; `\\x1b[K` clears what the line before left."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{windows} windows, perplexity so far {value:.4f}\x1b[K\r")
