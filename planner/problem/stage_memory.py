"""Bytes that a stage has for layers: a device's limit less everything that is not a layer.

Layers are taken to be equal, unless their weights differ much (`unlike_bytes`). Their weights are
those of the largest of the model: where a mixture begins with layers of one MLP (DeepSeek,
GLM-4.5), what those take less is room that the first stage has for layers. Their KV is the mean of
the model's: where some layers have a window (Gemma, gpt-oss) or a recurrent state instead
(Qwen3-Next, Granite 4), a stage keeps back what the KV of any layers that it may have exceeds that
by. A plan that was found states what its own layers take (llmpq/sizes/memory.py).

What a stage needs beside its layers depends on the sorts of weights it multiplies, not on how many
layers have them: dense products have a library's workspace, packed ones their own, a stage with
both has the larger of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmpq.models.tensor_parallel import Member
from llmpq.planner.problem.work_clock import spend
from llmpq.precision import Precision
from llmpq.sizes.memory import (
    embedding_bytes,
    layer_weight_bytes,
    of_member,
    unpacks_prompts,
)
from llmpq.sizes.pool_size import kv_kinds, planned_kv_bytes
from llmpq.sizes.stage_shape import StageShape
from llmpq.sizes.workspace import workspace_bytes

if TYPE_CHECKING:
    from llmpq.devices.cluster import Device
    from llmpq.models.model_spec import ModelSpec
    from llmpq.planner.problem.problem import DeviceClass, Problem

DENSE, PACKED, MIXED = 0, 1, 2
"""Sorts of stages: every layer of 16 bits, every layer of fewer, both."""
NEVER = -(2**60)
"""Bytes left for a stage that cannot be."""
_SORTS = np.array([DENSE, DENSE, PACKED, MIXED])


def sort_of(packed: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sort of stages with `counts[..., b]` layers at each choice."""
    some_packed, some_dense = counts @ packed > 0, counts @ ~packed > 0
    return np.asarray(_SORTS[2 * some_packed + some_dense])


def sort_of_stage(packed: NDArray[np.bool_], choices: Sequence[int]) -> int:
    """Return the sort of a stage whose layers have these choices."""
    some = {bool(packed[b]) for b in choices}
    return MIXED if len(some) == 2 else PACKED if True in some else DENSE


def packed_of(choices: Sequence[Precision]) -> NDArray[np.bool_]:
    """[B] which choices are of packed weights."""
    return np.array([choice.weight_bits < 16 for choice in choices])


def choices_of(choices: Sequence[Precision], sort: int) -> NDArray[np.bool_]:
    """[B] which choices a stage of a sort may have."""
    packed = packed_of(choices)
    return {DENSE: ~packed, PACKED: packed, MIXED: np.ones(len(packed), dtype=bool)}[sort]


def layer_bytes(p: Problem) -> NDArray[np.int64]:
    """[B] weights of the largest layer of the model, and the mean of the layers' KV."""
    kv = p.kv_bytes_of_layers
    return np.asarray(p.weights + int(kv.sum()) // len(kv))


def largest_weights(p: Problem) -> NDArray[np.int64]:
    """[B] weights of the largest layer of the model."""
    return np.asarray(_weights_of_layers(p, range(p.spec.num_layers)).max(axis=0))


def weights_of_groups(p: Problem) -> NDArray[np.int64]:
    """[L, B] weights of the layers, or groups of layers, each by itself."""
    each = _weights_of_layers(p, range(p.spec.num_layers))
    return np.array([each[start:end].sum(axis=0) for start, end in p.groups])


def _weights_of_layers(p: Problem, layers: Iterable[int]) -> NDArray[np.int64]:
    """[layers, B] weights of some layers of the model."""
    kinds = [(p.spec.of_layer(i), p.quantization.of_layer(i)) for i in layers]
    known = {
        (spec, grid): [layer_weight_bytes(spec, b, grid, p.workload.dtype_bytes) for b in p.choices]
        for spec, grid in dict.fromkeys(kinds)
    }
    return np.array([known[kind] for kind in kinds], dtype=np.int64)


UNLIKE = 1.1
"""How many times the weights of all layers as many of the largest may be, for layers that count as
equal: beyond it every layer counts for what it takes itself."""


def unlike_bytes(p: Problem) -> NDArray[np.int64] | None:
    """[layers, B] weights and KV of every layer, where weights differ much; None where they do not.

    Nemotron-H's layers of experts have ten times the weights of those of attention between them.
    Dense layers in front of a mixture are counted otherwise (`_smaller_layers`).
    """
    spec = p.spec
    if not (spec.without_mlp or spec.ffns or spec.mixers or spec.dense_layers):
        return None
    if spec.dense_layers == tuple(range(len(spec.dense_layers))) and not spec.without_mlp:
        return None
    weights = _weights_of_layers(p, range(spec.num_layers))
    if (weights.max(axis=0) * len(weights) <= UNLIKE * weights.sum(axis=0)).all():
        return None
    return np.asarray(weights + p.kv_bytes_of_layers[:, None])


def kv_bytes_of_layers(p: Problem) -> NDArray[np.int64]:
    """[layers] KV of every layer of the model, for the whole batch."""

    def of(layer: int) -> int:
        return planned_kv_bytes(
            p.spec,
            p.workload,
            (layer,),
            chunk=p.chunk,
            prefill_microbatch=p.prefill_microbatch or 1,
        )

    layers = p.spec.num_layers
    if not p.spec.windows and not p.spec.differs_in_attention:
        return np.full(layers, of(0), dtype=np.int64)
    alike = kv_kinds(p.spec)
    sizes = {layer: of(layer) for layer in set(alike)}
    return np.array([sizes[layer] for layer in alike], dtype=np.int64)


def _above_mean(p: Problem, *, first: bool, last: bool) -> int:
    """Return by how much the KV of a stage's layers may exceed as many of the mean."""
    kv = p.kv_bytes_of_layers
    if first and last:
        return int(kv.sum()) - len(kv) * (int(kv.sum()) // len(kv))
    # What layers [0, a) have above the mean; a stage has the difference of two.
    above = np.concatenate([[0], np.cumsum(kv - int(kv.sum()) // len(kv))])
    if len(kv) == 1:
        return int(above[1])
    if first:
        return int(above[1:-1].max())
    if last:
        return int(above[-1] - above[1:-1].min())
    lowest = np.minimum.accumulate(above[1:-1])
    return int((above[1:-1] - lowest)[1:].max(initial=0))


def _smaller_layers(p: Problem, room: int, sort: int) -> int:
    """Return by how much a first stage's layers take less than as many of the largest kind.

    Its first layers are dense: as many as the model begins with, or as fit by themselves if those
    are fewer. A stage of fewer than that fits, too, whatever it counts for.
    """
    dense = [layer for place, layer in enumerate(p.spec.dense_layers) if place == layer]
    if not dense or room <= 0 or p.unlike_bytes is not None:
        return 0
    allowed = choices_of(p.choices, sort)
    own = _weights_of_layers(p, dense).max(axis=0)
    whole = layer_bytes(p)
    by_themselves = whole - p.weights + own
    count = min(len(dense), room // int(by_themselves[allowed].max()))
    return count * int((p.weights - own)[allowed].min())


def capacity(p: Problem, eta: int, xi: int) -> NDArray[np.int64]:
    """[C, 2, 2, 3] bytes left for layers: whether it is the first stage, the last, and its sort.

    NEVER where the choices allow no stage of that sort.
    """
    table = np.full((len(p.classes), 2, 2, 3), NEVER, dtype=np.int64)
    kinds = {_memory_kind(p, cls) for cls in p.classes}
    spend(270 * len(kinds))
    for first, last in product((False, True), repeat=2):
        known = p.unlike_bytes is not None  # with every layer's own KV
        kv_above = 0 if known else _above_mean(p, first=first, last=last)
        for sort, precisions in _sorts(p.choices).items():
            shapes = {
                (on_gpu, unpacks): StageShape(
                    precisions=precisions,
                    first=first,
                    last=last,
                    prefill_microbatch=eta,
                    decode_microbatch=xi,
                    prefill_chunk=p.chunk,
                    on_gpu=on_gpu,
                    unpacks=unpacks,
                )
                for on_gpu, unpacks in kinds
            }
            beside = {kind: _bytes_beside(p, p.spec, shape) for kind, shape in shapes.items()}
            for index, cls in enumerate(p.classes):
                device, kind = cls.first, _memory_kind(p, cls)
                if device.joined:
                    room = _room_of_members(p, device, shapes[kind])
                else:
                    room = device.limit_bytes - device.spec.context - beside[kind]
                room -= kv_above
                room += _smaller_layers(p, room, sort) if first else 0
                table[index, int(first), int(last), sort] = room
    return table


def _bytes_beside(p: Problem, spec: ModelSpec, stage: StageShape) -> int:
    """Return what a device of a stage holds beside its layers of `spec` and its context."""
    ends = embedding_bytes(
        p.spec,
        first=stage.first,
        last=stage.last,
        dtype_bytes=p.workload.dtype_bytes,
        quantization=p.quantization,
        on_gpu=stage.on_gpu,
    )
    return ends + workspace_bytes(spec, p.workload, stage)


def _room_of_members(p: Problem, group: Device, stage: StageShape) -> int:
    """Return the bytes of layers for which every device of a group has room for its part."""
    rooms: dict[tuple[object, ...], float] = {}
    for index, device in enumerate(group.joined):
        member, part = _member(p, group.shares, index)
        own = replace(
            stage,
            last=stage.last and index == 0,
            on_gpu=not device.spec.is_cpu,
            unpacks=unpacks_prompts(device.spec, p.choices, p.quantization),
        )
        room = device.limit_bytes - device.spec.context
        alike = room, part, member.own, own.last, own.on_gpu, own.unpacks
        if alike not in rooms:
            rooms[alike] = (room - _bytes_beside(p, member.own, own)) / part
    return math.floor(min(rooms.values()))


def _member(p: Problem, shares: tuple[int, ...], index: int) -> tuple[Member, float]:
    """Return a member, and the largest share that it has of a layer's weights, or of its KV."""
    if (shares, index) not in p.parts_of_members:
        member = Member(spec=p.spec, shares=shares, index=index)
        p.parts_of_members[shares, index] = member, _largest_part(p, member)
    return p.parts_of_members[shares, index]


def _largest_part(p: Problem, member: Member) -> float:
    width = p.workload.dtype_bytes
    own = of_member(p.quantization, member, width)
    kinds: dict[object, int] = {}
    for layer in range(p.spec.num_layers):
        kinds.setdefault((p.spec.of_layer(layer), p.quantization.of_layer(layer)), layer)
    shares = [0.0]
    for layer in kinds.values():
        grids = own.of_layer(layer), p.quantization.of_layer(layer)
        shares += [
            layer_weight_bytes(member.own.of_layer(layer), b, grids[0], width)
            / layer_weight_bytes(p.spec.of_layer(layer), b, grids[1], width)
            for b in p.choices
        ]
    given = {"chunk": p.chunk, "prefill_microbatch": p.prefill_microbatch or 1}
    for layer in set(kv_kinds(p.spec)):
        mine, whole = (
            planned_kv_bytes(spec, p.workload, (layer,), **given) for spec in (member.own, p.spec)
        )
        shares += [mine / whole] if whole else []
    return max(shares)


def _sorts(choices: Sequence[Precision]) -> dict[int, tuple[Precision, ...]]:
    """Return one example of the precisions of each sort that the choices allow."""
    dense = tuple(choice for choice in choices if choice.weight_bits == 16)[:1]
    packed = tuple({c.weight_bits: c for c in choices if c.weight_bits < 16}.values())
    found = {DENSE: dense, PACKED: packed, MIXED: dense + packed if dense and packed else ()}
    return {sort: precisions for sort, precisions in found.items() if precisions}


def _memory_kind(p: Problem, cls: DeviceClass) -> tuple[bool, bool]:
    """Return whether a class's stages run on a GPU, and whether one may unpack whole weights."""
    spec = cls.first.spec
    return not spec.is_cpu, unpacks_prompts(spec, p.choices, p.quantization)
