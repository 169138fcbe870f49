"""The result of an exporter, and facts about a plan that several of them state."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from llmpq.families import FAMILIES
from llmpq.models.model_spec import builtin_ids
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.shipped_table import shipped_table
from llmpq.sizes.memory import Quantization


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The text for the engine, and what it cannot say."""

    text: str
    not_expressed: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """What may keep the engine from running it."""
    files: tuple[str, ...] = ()
    """Lines of the text that make the files which it serves."""


@lru_cache(maxsize=1)
def engine_flags() -> dict[str, Any]:
    """Return the engines' flags, with the version they are of and where they were read."""
    return shipped_table("llmpq.planner.export", "engine_flags.yaml")


def model_id(plan: Plan) -> str:
    """Return the plan's model directory, else its id as Hugging Face spells it."""
    ids = builtin_ids().get(plan.model.name)
    return plan.model.path or (ids[0] if ids else plan.model.name)


def quoted(text: str) -> str:
    """Return a word of a shell command."""
    return shlex.quote(text)


def layer_counts(plan: Plan) -> list[int]:
    """Return the number of layers of each stage."""
    return [stage.num_layers for stage in plan.stages]


def by_precision(plan: Plan) -> dict[Precision, list[int]]:
    """Return the layers at each precision, most bits first."""
    table: dict[Precision, list[int]] = {}
    for layer, precision in enumerate(plan.precisions):
        table.setdefault(precision, []).append(layer)
    return dict(sorted(table.items(), key=lambda item: -item[0].weight_bits))


def quantised(plan: Plan, engine: str) -> dict[Precision, list[int]]:
    """Return the layers at each quantised precision; `ValueError` if there are none."""
    table = by_precision(plan)
    table.pop(Precision.W16A16, None)
    if not table:
        raise ValueError(
            f"the plan quantises no layer, so there is no checkpoint for {engine} to write; export "
            "the stages with --to vllm, sglang, llamacpp or accelerate"
        )
    return table


def ranges(layers: list[int]) -> str:
    """Return `0-3,7` for [0, 1, 2, 3, 7]."""
    runs = groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    spans = [[layer for _, layer in run] for _, run in runs]
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


def stages_line(plan: Plan) -> str:
    """Say which device holds which layers, which a checkpoint does not."""
    parts = [f"{s.device} {s.layers[0]}-{s.layers[1] - 1}" for s in plan.stages]
    return f"stages: {', '.join(parts)} (write them with --to vllm or --to sglang)"


def precision_line(plan: Plan) -> str | None:
    """Say which layers have which precision, None when all are unquantised."""
    table = by_precision(plan)
    if set(table) == {Precision.W16A16}:
        return None
    return "; ".join(f"{p.value}: layers {ranges(layers)}" for p, layers in table.items())


def checkpoint_line(plan: Plan) -> str | None:
    """Say that the layers' precisions are the checkpoint's, None when all are unquantised."""
    precision = precision_line(plan)
    return precision and (
        f"precision per layer ({precision}): it is a property of the checkpoint; write one with "
        "llmpq-quantize --plan, or by --to compressed-tensors or --to gptqmodel"
    )


def zeros_line(plan: Plan) -> str | None:
    """Say which layers the plan counts zeros for: configs of checkpoints ask for none.

    Symmetric grids are what every reader takes: Transformers 5 refuses compressed-tensors' packed
    zeros unless it dequantises, and vLLM serves GPTQ checkpoints without zeros only.
    """
    settings = plan.settings()
    schemes = [settings.scheme(precision) for precision in plan.precisions]
    layers = [i for i, scheme in enumerate(schemes) if scheme and not scheme.symmetric]
    if not layers:
        return None
    return (
        f"zeros of layers {ranges(layers)}: symmetric grids are written, which all readers take; "
        "llmpq-quantize writes zeros, --symmetric plans without"
    )


def quantise_comment(plan: Plan) -> list[str]:
    """Return the comment that says which model to serve, none when all layers are at 16 bits.

    What llmpq-quantize writes of 4-bit activations or of a low-bit cache is for llmpq-dist only.
    """
    table = by_precision(plan)
    if set(table) == {Precision.W16A16}:
        return []
    own = plan.workload.kv is KVPrecision.KV16 and Precision.W4A4 not in table
    how = "llmpq-quantize MODEL OUT --plan PLAN" if own else "export --to compressed-tensors"
    return [
        f"# {model_id(plan)} stands for its checkpoint at the plan's bits: write that first "
        f"({how}) and serve it"
    ]


def outliers_line(plan: Plan) -> str | None:
    """Say that channels kept at 8 bits have no place in a checkpoint's words."""
    settings: Quantization = plan.settings()
    layers = by_precision(plan).get(Precision.W4A4)
    if not layers or not settings.outliers:
        return None
    return f"the {settings.outliers} input channels that layers {ranges(layers)} keep at 8 bits"


def context_length(plan: Plan) -> int:
    """Return the tokens of the longest request, prompt and answer."""
    mean = plan.workload.max_len + 1  # of live traffic; of a batch job no request is longer
    return max(mean, plan.traffic.longest or 0) if plan.traffic else mean


def step_tokens(plan: Plan) -> int | None:
    """Return the tokens of a step of live traffic; None of a batch job: the engine's own."""
    return max(plan.traffic.step_tokens, plan.workload.batch) if plan.traffic else None


def drafts_line(plan: Plan) -> str | None:
    """Say which drafts the plan has, which are the engine's own to set."""
    own = plan.speculation
    if own is None:
        return None
    return f"drafts ({own.mode}, {own.gamma} tokens each): set the engine's own, if it has"


def microbatch_line(plan: Plan) -> str:
    """Say the micro-batches, which other engines' schedulers choose themselves."""
    return (
        f"micro-batches (prefill {plan.prefill_microbatch}, decode {plan.decode_microbatch}): the "
        "engine's scheduler decides"
    )


def kv_line(plan: Plan) -> str | None:
    """Say the KV precision, None when it is the engine's default."""
    kv = plan.workload.kv
    return None if kv is KVPrecision.KV16 else f"KV cache of {kv.title}"


def emulated_line(plan: Plan) -> str | None:
    """Say that a share of a GPU is no other engine's, None when every stage has a whole device."""
    shares = [f"{s.device} {s.sms} SMs" for s in plan.stages if s.sms is not None]
    return f"shares of a GPU ({', '.join(shares)}): engines use all of it" if shares else None


def said(*lines: str | None) -> tuple[str, ...]:
    """Return the lines that have something to say."""
    return tuple(line for line in lines if line)


def layers_pattern(family: str, layers: list[int], num_layers: int) -> str:
    """Return a regular expression of everything inside these layers of a model."""
    root = FAMILIES[family].layers_at.replace(".", "\\.")
    return f"{root}\\.{numbers_pattern(layers, num_layers)}\\..*"


def numbers_pattern(layers: list[int], num_layers: int) -> str:
    """Return a regular expression of these layers' numbers."""
    every = len(layers) == num_layers
    return "[0-9]+" if every else f"({'|'.join(str(i) for i in layers)})"
