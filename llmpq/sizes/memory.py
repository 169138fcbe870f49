"""Bytes a stage holds: the planner predicts with these functions and the runtime allocates by them.

    stage = layer weights (packed, with scales and zeros)
          + embedding on the first stage, final norm and head on the last
          + KV of the whole batch + the largest temporary of either phase + the framework's context

Paper sec. 4.1 (memory cost model), corrected for GQA, gated FFN, quantisation metadata and for
where embedding and head really live.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from llmpq.devices.device_spec import DeviceSpec
from llmpq.models.model_spec import LinearShape, ModelSpec
from llmpq.models.tensor_parallel import Member
from llmpq.precision import K_PADDING, Precision, WeightScheme, default_scheme
from llmpq.sizes.pool_size import planned_kv_bytes
from llmpq.sizes.stage_shape import StageShape
from llmpq.sizes.workspace import workspace_bytes
from llmpq.workload import Workload

INDEX_BYTES = 4
"""One entry of a channel order, int32."""


CpuActivations = Literal["exact", "int8"]
CodesName = Literal["mxfp4", "nvfp4", "nf4", "fp4", "iq4", "e4m3"]
"""Forms of codes that a checkpoint may have and that are no integers."""


@dataclass(frozen=True, kw_only=True)
class StoredBytes:
    """What a checkpoint's own codes take in layers `[start, end)` of a precision."""

    layers: tuple[int, int]
    precision: Precision
    linears: tuple[tuple[str, int], ...]
    """`LinearShape.kind` and bytes of every linear whose bytes are not those of the scheme."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How quantised layers are stored: one setting for a whole plan."""

    group_size: int | None = 128
    symmetric: bool = False
    outliers: int = 0
    """Input channels of w4a4 layers that keep 8 bits (a calibrated checkpoint says how many)."""
    head_bits: Literal[8, 16] | None = 16
    """Of the output matrix: 16, or 8 in groups as the layers' weights; None: 8 on CPUs."""

    cpu_activations: CpuActivations = "exact"
    """How activations are rounded on CPUs before 3-, 4- and 8-bit weights: to 16 bits a group
    (`exact`), or to 8 (`int8`)."""
    codes: CodesName | None = None
    """What most of a checkpoint's own codes are that layers keep; None for integers."""
    stored: tuple[StoredBytes, ...] = ()
    """What linears take whose codes are the checkpoint's own, where the grid says other bytes."""

    def head(self, *, on_cpu: bool) -> Precision:
        """Return the precision of the output matrix on a device."""
        bits = self.head_bits or (8 if on_cpu else 16)
        return Precision.W8A16 if bits == 8 else Precision.W16A16

    def heads(self, *, on_cpu: bool) -> tuple[Precision, ...]:
        """Return the precisions that the output matrix may come to have on a device."""
        own = self.head(on_cpu=on_cpu)
        chosen = self.head_bits is not None or own is Precision.W16A16
        return (own,) if chosen else (own, Precision.W16A16)

    def of_layer(self, index: int) -> Quantization:
        """Return what holds for one layer: of `stored`, what is said of it."""
        if not self.stored:
            return self
        own = (one for one in self.stored if one.layers[0] <= index < one.layers[1])
        return replace(self, stored=tuple(own))

    def linear_bytes(self, linear: LinearShape, precision: Precision, dtype_bytes: int) -> int:
        """Return the bytes of one matrix of a layer; of many layers, as the most have it."""
        found = [one for one in self.stored if one.precision is precision]
        if found:
            most = max(found, key=lambda one: one.layers[1] - one.layers[0])
            stored = dict(most.linears).get(linear.kind)
            if stored is not None:
                return stored
        scheme = self.scheme(precision)
        if scheme is None:
            return linear.num_weights * dtype_bytes
        return scheme.nbytes(linear.out_features, linear.in_features, dtype_bytes)

    def scheme(self, precision: Precision) -> WeightScheme | None:
        """Return the scheme of a precision, None for unquantised weights."""
        return default_scheme(
            precision,
            group_size=self.group_size,
            symmetric=self.symmetric,
            outliers=self.outliers,
        )


def of_member(quantization: Quantization, member: Member, dtype_bytes: int) -> Quantization:
    """Return how one device of a stage stores its part: of the checkpoint's own codes, its part of
    their bytes; of w4a4 layers, what its inputs' outliers make of them."""
    own: list[StoredBytes] = []
    for one in quantization.stored:
        layer = one.layers[0]
        weights = {s.kind: s.num_weights for s in member.spec.of_layer(layer).linears()}
        mine = {s.kind: s.num_weights for s in member.own.of_layer(layer).linears()}
        parts = ((kind, size * mine[kind] / weights[kind]) for kind, size in one.linears)
        linears = tuple((kind, math.ceil(size)) for kind, size in parts)
        own.append(replace(one, linears=linears))
    own += _beside_outliers(quantization, member, dtype_bytes)
    return replace(quantization, stored=tuple(own))


def _beside_outliers(
    quantization: Quantization, member: Member, dtype_bytes: int
) -> Iterator[StoredBytes]:
    """Yield what a device holds of w4a4 matrices that it has some inputs of.

    Outliers are the last inputs, so one device has them. The inputs of a calibrated `o` are in an
    order of their own over all heads: every device holds all of its codes (atom_weight.py).
    """
    scheme = quantization.scheme(Precision.W4A4)
    if scheme is None or not scheme.outliers:
        return
    spec, first = member.spec, 0
    for layer in range(spec.num_layers):
        if layer + 1 < spec.num_layers and spec.of_layer(layer + 1) == spec.of_layer(first):
            continue
        schemes, sizes = member.input_schemes(first, scheme), dict[str, int]()
        pairs = zip(
            spec.of_layer(first).linears(), member.own.of_layer(first).linears(), strict=True
        )
        for whole, mine in pairs:
            if whole.name not in schemes:
                continue
            if whole.name == "o":
                size = scheme.nbytes(whole.out_features, whole.in_features, dtype_bytes)
                size += INDEX_BYTES * (whole.in_features - mine.in_features)
            else:
                size = schemes[whole.name].nbytes(mine.out_features, mine.in_features, dtype_bytes)
            sizes[whole.kind] = size
        yield StoredBytes(
            layers=(first, layer + 1), precision=Precision.W4A4, linears=tuple(sizes.items())
        )
        first = layer + 1


def default_head_bits(precisions: Iterable[Precision], *, on_cpu: bool) -> Literal[8, 16]:
    """Return the output matrix's default bits: 8 on a CPU if any layer is rounded."""
    return 8 if on_cpu and any(p.weight_bits <= 8 for p in precisions) else 16


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The parts of one stage's memory, in bytes."""

    weights_bytes: int
    embedding_bytes: int
    """Embedding, final norm and head, as far as this stage has them."""
    kv_bytes: int
    workspace_bytes: int
    context_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return (
            self.weights_bytes
            + self.embedding_bytes
            + self.kv_bytes
            + self.workspace_bytes
            + self.context_bytes
        )


@lru_cache(maxsize=512)
def expert_weight_bytes(
    spec: ModelSpec, precision: Precision, quantization: Quantization, dtype_bytes: int
) -> int:
    """Return the bytes of one expert's matrices; zero for a model without experts."""
    own = [s for s in spec.linears() if s.name.startswith("experts.0.")]
    return sum(quantization.linear_bytes(s, precision, dtype_bytes) for s in own)


@lru_cache(maxsize=512)
def layer_weight_bytes(
    spec: ModelSpec, precision: Precision, quantization: Quantization, dtype_bytes: int
) -> int:
    """Return the bytes of one decoder layer's weights, norms and biases included."""
    scheme = quantization.scheme(precision)
    if scheme is None:
        return spec.layer_params * dtype_bytes + _wide_bytes(spec, dtype_bytes)
    packed = sum(quantization.linear_bytes(s, precision, dtype_bytes) for s in spec.linears())
    if scheme.outliers:
        # The order of the input channels; `down` needs none, the rows before it are reordered.
        ordered = [s for s in spec.linears() if not s.name.endswith("down")]
        packed += sum(INDEX_BYTES * s.in_features for s in ordered)
    unquantised = spec.layer_params - sum(s.num_weights for s in spec.linears())
    return packed + unquantised * dtype_bytes + _wide_bytes(spec, dtype_bytes)


def _wide_bytes(spec: ModelSpec, dtype_bytes: int) -> int:
    """Return what a router's correction takes beyond the dtype's: it is kept in float32."""
    return (4 - dtype_bytes) * spec.experts if spec.router.correction else 0


def mtp_weight_bytes(
    spec: ModelSpec,
    precision: Precision,
    quantization: Quantization,
    *,
    dtype_bytes: int,
    has_embedding: bool,
) -> int:
    """Return the bytes of the head that predicts a further token (MTP): its layer, what joins.

    `has_embedding`: whether its stage has the embedding, which it holds itself otherwise.
    """
    layer = layer_weight_bytes(spec.of_mtp(), precision, quantization, dtype_bytes)
    join = quantization.linear_bytes(spec.mtp_join, precision, dtype_bytes)
    embedding = 0 if has_embedding else spec.embedding_params * dtype_bytes
    return layer + join + 3 * spec.norm_params * dtype_bytes + embedding


def embedding_bytes(
    spec: ModelSpec,
    *,
    first: bool,
    last: bool,
    dtype_bytes: int,
    quantization: Quantization = Quantization(),
    on_gpu: bool = False,
) -> int:
    """Return the bytes of embedding and head; a tied matrix is held once where both are.

    An output matrix in 8 bits is a copy of its own, also of a tied one.
    """
    params = (spec.embedding_params if first else 0) + (spec.head_params if last else 0)
    scheme = quantization.scheme(quantization.head(on_cpu=not on_gpu))
    matrix = spec.vocab * spec.hidden
    if not last or scheme is None:
        shared = matrix if first and last and spec.tied_embeddings else 0
        return (params - shared) * dtype_bytes
    return (params - matrix) * dtype_bytes + scheme.nbytes(spec.vocab, spec.hidden, dtype_bytes)


def unpacks_prompts(
    spec: DeviceSpec | None, precisions: Iterable[Precision], quantization: Quantization
) -> bool:
    """Return whether long prompts meet a packed weight as one dense matrix; unknown kinds do.

    Of NVFP4 and of 3 bits in small groups every GPU does: no kernel of Hopper's reads those for a
    prompt.
    """
    group = quantization.group_size
    small = group is not None and group < K_PADDING
    thirds = small and any(precision.weight_bits == 3 for precision in precisions)
    return spec is None or spec.unpacks_weights or thirds or quantization.codes == "nvfp4"


def stage_memory(
    spec: ModelSpec,
    workload: Workload,
    stage: StageShape,
    *,
    quantization: Quantization,
    context_bytes: int = 0,
    first_layer: int = 0,
) -> StageMemory:
    """Return the memory of a stage.

    `first_layer`: the number of its first layer, which decides what kind of MLP and which window
    its layers have.
    """
    layers = range(first_layer, first_layer + len(stage.precisions))
    dtype_bytes = workload.dtype_bytes
    weights = sum(
        layer_weight_bytes(spec.of_layer(index), p, quantization.of_layer(index), dtype_bytes)
        for index, p in zip(layers, stage.precisions, strict=True)
    )
    return StageMemory(
        weights_bytes=weights,
        embedding_bytes=embedding_bytes(
            spec,
            first=stage.first,
            last=stage.last,
            dtype_bytes=dtype_bytes,
            quantization=quantization,
            on_gpu=stage.on_gpu,
        ),
        kv_bytes=planned_kv_bytes(
            spec,
            workload,
            layers,
            chunk=stage.prefill_chunk,
            prefill_microbatch=stage.prefill_microbatch,
        ),
        workspace_bytes=workspace_bytes(spec, workload, stage),
        context_bytes=context_bytes,
    )
