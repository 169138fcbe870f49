"""Memory of a plan's stages in llama.cpp, whose types have other bytes than ours.

Weights by the bits of their GGUF type, scales in their blocks included; KV by the type of the
cache; the output matrix on the last GPU. The embedding is in host memory. Work buffers are counted
as the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan, StagePlan
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.pool_size import planned_kv_bytes
from llmpq.units import format_size

BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q5_0": 5.5,
    "q4_k": 4.5,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
    "q3_k": 3.4375,
    "mxfp4": 4.25,
}
"""Bits of a weight (ggml-common.h): a block's codes and scales over the weights it holds."""
WIDE_BLOCK = 256
"""Weights of a block of q4_k and q3_k: rows must be whole blocks."""
INSTEAD = {"q4_k": "q5_0", "q3_k": "iq4_nl"}
"""What llama-quantize takes for a matrix whose rows are no whole blocks."""
FLOAT32_BYTES = 4
"""Bytes of a value of norms and biases."""


@dataclass(frozen=True, kw_only=True)
class GgufTypes:
    """The GGUF types, by their names in lower case, of what a plan runs in llama.cpp."""

    types: Mapping[Precision, str]
    """Of a layer's matrices, by the precision that the plan gives the layer."""
    experts: Mapping[Precision, str]
    """Of the matrices of experts."""
    cache: tuple[str, str]
    """Of keys, and of values."""
    output: str
    """Of the output matrix (the head)."""


@dataclass(frozen=True, kw_only=True)
class GpuShare:
    """A GPU's stage, and the layers whose KV it has: its own, and a CPU's behind them."""

    stage: StagePlan
    kv_layers: range
    has_output: bool
    """Whether the output matrix is on it."""


def gguf_bytes(plan: Plan, spec: ModelSpec, share: GpuShare, form: GgufTypes) -> int | None:
    """Return what a GPU holds in llama.cpp's forms; None where the plan does not say its memory."""
    memory = share.stage.memory
    if memory is None:
        return None
    weights = sum(
        _layer_bytes(spec.of_layer(layer), form.types[precision], form.experts[precision])
        for layer, precision in zip(range(*share.stage.layers), share.stage.precisions, strict=True)
    )
    output = spec.vocab * spec.hidden * BITS[form.output] / 8 if share.has_output else 0.0
    job = plan.workload.model_copy(update={"kv": KVPrecision.KV16, "dtype": "float16"})
    kv = planned_kv_bytes(
        spec,
        job,
        share.kv_layers,
        chunk=plan.prefill_chunk,
        prefill_microbatch=plan.prefill_microbatch,
    )
    kv_bytes = kv * sum(BITS[cache] for cache in form.cache) / 2 / 16
    return int(weights + output + kv_bytes) + memory.workspace_bytes + memory.context_bytes


def memory_lines(
    plan: Plan, spec: ModelSpec, shares: Sequence[GpuShare], form: GgufTypes
) -> tuple[str | None, str | None]:
    """Return a comment with every GPU's memory, and which are short; None where not known."""
    said, short = [], []
    for share in shares:
        needed, memory = gguf_bytes(plan, spec, share, form), share.stage.memory
        if needed is None or memory is None:
            return None, None
        name = share.stage.device
        said.append(f"{name} {format_size(needed)} of {format_size(memory.limit_bytes)}")
        if needed > memory.limit_bytes:
            short.append(f"{name} is short by {format_size(needed - memory.limit_bytes)}")
    if not said:
        return None, None
    lack = (
        f"{', '.join(short)} in llama.cpp's forms; plan with --weight-group-size 32, whose scales "
        "are counted as its blocks have them, with fewer --bits or a smaller --kv"
    )
    return f"# memory in llama.cpp's forms: {', '.join(said)}", lack if short else None


def _layer_bytes(layer: ModelSpec, type_: str, experts: str) -> float:
    """Return the bytes of a layer: matrices in a type, norms and biases in float32."""
    matrices = layer.linears()
    packed = sum(
        m.num_weights * BITS[_type_of(m.in_features, experts if m.of_expert else type_)] / 8
        for m in matrices
    )
    others = layer.layer_params - sum(m.num_weights for m in matrices)
    return packed + others * FLOAT32_BYTES


def _type_of(row: int, type_: str) -> str:
    """Return the type of a matrix whose rows have so many weights."""
    return INSTEAD.get(type_, type_) if row % WIDE_BLOCK else type_
