"""From nouns to numbers: what a solver sees of a model, a cluster and a workload.

Knows nothing of solvers. Equal devices of one node form a class; a stage runs on one device of a
class. Symbols: L layers (or groups of layers), C classes, B choices of precision, eta and xi the
prefill and decode micro-batch sizes, P and D the slowest stage's time in either phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmpq.cluster import Cluster, Device
from llmpq.cost_model import Phase
from llmpq.kv_format import kv_cache_bytes
from llmpq.memory import Quantization, embedding_bytes, layer_weight_bytes
from llmpq.model_spec import ModelSpec
from llmpq.planner.costs import CostBook
from llmpq.planner.microbatch import microbatch_pairs
from llmpq.precision import KVPrecision, Precision
from llmpq.sensitivity import Sensitivity
from llmpq.workload import Workload
from llmpq.workspace import workspace_bytes

Floats = NDArray[np.float64]
Objective = Literal["makespan", "paper"]


@dataclass(frozen=True, kw_only=True)
class DeviceClass:
    """Devices that are interchangeable in a plan: same kind, node, limit and pins."""

    devices: tuple[Device, ...]
    pinned: tuple[int, int] | None = None
    """Layers `[start, end)` that must be on this (single) device."""

    @property
    def first(self) -> Device:
        """A representative of the class."""
        return self.devices[0]

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def name(self) -> str:
        """Readable name: the kind, with the node where a kind is on several."""
        return f"{self.first.kind}@{self.first.node}"


@dataclass(frozen=True, kw_only=True)
class SizeNumbers:
    """Times in seconds of one phase at one micro-batch size, as in `PairNumbers`."""

    layer_s: Floats
    """[L, C, B]"""
    ends_s: Floats
    """[C, 2]"""
    hop_s: Floats
    """[C, C]"""
    back_s: Floats
    """[C, C]"""


@dataclass(frozen=True, kw_only=True)
class PairNumbers:
    """Times in seconds and sizes in bytes for one pair of micro-batch sizes."""

    eta: int
    xi: int
    prefill_s: Floats
    """[L, C, B] one layer, one prefill micro-batch."""
    decode_s: Floats
    """[L, C, B] one layer, one decode micro-batch, mean over t = 1..n-1."""
    ends_prefill_s: Floats
    """[C, 2] embedding (as first stage) and head (as last stage)."""
    ends_decode_s: Floats
    hop_prefill_s: Floats
    """[C, C] from a stage of one class to the next stage of another."""
    hop_decode_s: Floats
    back_prefill_s: Floats
    """[C, C] sampled tokens from the last stage's class to the first stage's."""
    back_decode_s: Floats
    layer_bytes: NDArray[np.int64]
    """[L, B] weights and the whole batch's KV."""
    problem: Problem

    @cached_property
    def capacity(self) -> NDArray[np.int64]:
        """[C, 2, 2] bytes left for layers; index 1: whether it is the first stage, 2: the last."""
        return capacity(self.problem, self.eta, self.xi)

    @cached_property
    def uniform(self) -> bool:
        """Whether all layers take equal time and memory, so that only omega tells them apart."""
        tables = (self.prefill_s, self.decode_s, self.layer_bytes)
        return all(bool(np.all(t == t[:1])) for t in tables)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that decides which plan is best, for one KV precision."""

    spec: ModelSpec
    cluster: Cluster
    workload: Workload
    choices: tuple[Precision, ...]
    sensitivity: Sensitivity
    costs: CostBook
    theta: float
    objective: Objective = "makespan"
    quantization: Quantization = Quantization()
    group: int = 1
    max_devices: int | None = None
    pins: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Device name -> layers `[start, end)` it must hold."""
    prefill_microbatch: int | None = None
    decode_microbatch: int | None = None
    offered: tuple[tuple[Precision, ...], ...] = ()
    """What each layer may have of `choices`, for a model that is stored quantised; empty: all."""

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The half-open layer ranges that share a precision; single layers unless `group` > 1."""
        total, size = self.spec.num_layers, self.group
        return tuple((i, min(i + size, total)) for i in range(0, total, size))

    @property
    def num_layers(self) -> int:
        """L: number of layers, or of groups."""
        return len(self.groups)

    @cached_property
    def classes(self) -> tuple[DeviceClass, ...]:
        """Interchangeable devices, in the cluster's order."""
        members: dict[tuple[object, ...], list[Device]] = {}
        for device in self.cluster.devices:
            pinned = device.name if device.name in self.pins else ""
            key = (
                device.profile_kind,
                device.node,
                device.limit_bytes,
                device.spec.context,
                pinned,
                device.name if self.cluster.has_own_links(device) else "",
            )
            members.setdefault(key, []).append(device)
        return tuple(
            DeviceClass(devices=tuple(devices), pinned=self._pinned_groups(devices[0].name))
            for devices in members.values()
        )

    def _pinned_groups(self, device: str) -> tuple[int, int] | None:
        if device not in self.pins:
            return None
        start, end = self.pins[device]
        return start // self.group, -(-end // self.group)

    @property
    def max_stages(self) -> int:
        """Largest number of stages a plan may have."""
        most = min(len(self.cluster.devices), self.num_layers)
        return most if self.max_devices is None else min(most, self.max_devices)

    @cached_property
    def omega(self) -> Floats:
        """[L, B] quality loss of each layer (group) at each choice, the KV cache's included."""
        kv = self.workload.kv
        table = np.array(
            [
                [
                    self.sensitivity.omega(i, p) + self.sensitivity.kv_omega(i, kv)
                    for p in self.choices
                ]
                for i in range(self.spec.num_layers)
            ]
        )
        return np.array([table[start:end].sum(axis=0) for start, end in self.groups])

    @cached_property
    def open(self) -> NDArray[np.bool_]:
        """[L, B] whether a layer (every layer of a group) may have a choice."""
        layers = self.offered or (self.choices,) * self.spec.num_layers
        table = np.array([[p in own for p in self.choices] for own in layers])
        return np.array([table[start:end].all(axis=0) for start, end in self.groups])

    @property
    def open_omega(self) -> Floats:
        """[L, B] omega, infinite where a layer may not have the choice."""
        return np.where(self.open, self.omega, np.inf)

    @cached_property
    def priced_omega(self) -> Floats:
        """[L, B] theta times omega, infinite where a layer may not have the choice."""
        return np.where(self.open, self.theta * self.omega, np.inf)

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The micro-batch sizes to try, (prefill, decode)."""
        return microbatch_pairs(
            self.workload.batch, prefill=self.prefill_microbatch, decode=self.decode_microbatch
        )

    def counts(self, eta: int, xi: int) -> tuple[int, int]:
        """Return the numbers of prefill and decode micro-batches."""
        return -(-self.workload.batch // eta), -(-self.workload.batch // xi)

    @property
    def kv(self) -> KVPrecision:
        """Precision of the KV cache."""
        return self.workload.kv

    def allowed(self, cls: int, start: int, end: int) -> bool:
        """Whether the pins let a stage of a class hold groups `[start, end)`."""
        for index, other in enumerate(self.classes):
            if other.pinned is None:
                continue
            low, high = other.pinned
            if index == cls and not (start <= low and high <= end):
                return False
            if index != cls and start < high and low < end:
                return False
        return True

    def with_changes(self, **changes: object) -> Problem:
        """Return the problem with some fields replaced (what-if, pareto, budget).

        Another theta leaves every time and size as it is: they are not computed again.
        """
        changed = replace(self, **changes)  # type: ignore[arg-type]
        if set(changes) == {"theta"}:
            kept = ("pairs", "open", "omega", "_numbers", "_sizes", "all_layer_bytes")
            changed.__dict__.update({k: self.__dict__[k] for k in kept if k in self.__dict__})
        return changed

    @cached_property
    def _sizes(self) -> dict[tuple[Phase, int], SizeNumbers]:
        return {}

    def size_numbers(self, phase: Phase, size: int) -> SizeNumbers:
        """Return the times of one phase at a micro-batch size: many pairs share them."""
        if (phase, size) not in self._sizes:
            self._sizes[phase, size] = _size_numbers(self, phase, size)
        return self._sizes[phase, size]

    @cached_property
    def all_layer_bytes(self) -> NDArray[np.int64]:
        """[L, B] weights and the whole batch's KV."""
        sizes = np.array([end - start for start, end in self.groups], dtype=np.int64)
        return sizes[:, None] * layer_bytes(self)[None, :]

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], PairNumbers]:
        return {}

    def numbers(self, eta: int, xi: int) -> PairNumbers:
        """Return the numbers for a pair of micro-batch sizes."""
        if (eta, xi) not in self._numbers:
            self._numbers[eta, xi] = _pair_numbers(self, eta, xi)
        return self._numbers[eta, xi]


def _pair_numbers(p: Problem, eta: int, xi: int) -> PairNumbers:
    prefill, decode = p.size_numbers(Phase.PREFILL, eta), p.size_numbers(Phase.DECODE, xi)
    return PairNumbers(
        eta=eta,
        xi=xi,
        prefill_s=prefill.layer_s,
        decode_s=decode.layer_s,
        ends_prefill_s=prefill.ends_s,
        ends_decode_s=decode.ends_s,
        hop_prefill_s=prefill.hop_s,
        hop_decode_s=decode.hop_s,
        back_prefill_s=prefill.back_s,
        back_decode_s=decode.back_s,
        layer_bytes=p.all_layer_bytes,
        problem=p,
    )


def _size_numbers(p: Problem, phase: Phase, size: int) -> SizeNumbers:
    work, costs = p.workload, p.costs
    firsts = [c.first for c in p.classes]
    prefill = phase is Phase.PREFILL
    layer_s = costs.layer_prefill_s if prefill else costs.layer_decode_s
    ends_s = costs.ends_prefill_s if prefill else costs.ends_decode_s
    layers = np.array([end - start for start, end in p.groups], dtype=np.int64)
    once = np.array([[layer_s(d, b, work, size) for b in p.choices] for d in firsts])
    tokens = size * work.prompt_len if prefill else size
    return SizeNumbers(
        layer_s=layers[:, None, None] * once,
        ends_s=np.array([ends_s(d, work, size) for d in firsts]),
        hop_s=_hops(p, tokens * (p.spec.hidden * work.dtype_bytes)),
        back_s=_hops(p, size * 8),
    )


def _hops(p: Problem, message_bytes: float) -> Floats:
    """[C, C] time of one message; a stage sends nothing to itself."""
    firsts = [c.first for c in p.classes]
    return np.array(
        [[p.costs.hop_s(p.cluster, a, b, message_bytes) for b in firsts] for a in firsts]
    )


def layer_bytes(p: Problem) -> NDArray[np.int64]:
    """[B] weights and KV of one layer."""
    work = p.workload
    kv = kv_cache_bytes(
        work.kv,
        slots=work.batch,
        max_len=work.max_len,
        kv_heads=p.spec.kv_heads,
        head_dim=p.spec.head_dim,
        dtype_bytes=work.dtype_bytes,
    )
    weights = [layer_weight_bytes(p.spec, b, p.quantization, work.dtype_bytes) for b in p.choices]
    return np.array([w + kv for w in weights], dtype=np.int64)


def capacity(p: Problem, eta: int, xi: int) -> NDArray[np.int64]:
    """[C, 2, 2] limit minus context, embedding or head, and the workspace of all choices together.

    A stage of several precisions may need more than with any one of them alone: a dense product
    has a library's workspace, a packed one its own.
    """
    table = np.zeros((len(p.classes), 2, 2), dtype=np.int64)
    kinds = {_memory_kind(cls) for cls in p.classes}
    for first, last in product((False, True), repeat=2):
        ends = embedding_bytes(p.spec, first=first, last=last, dtype_bytes=p.workload.dtype_bytes)
        workspace = {
            (on_gpu, unpacks): workspace_bytes(
                p.spec,
                p.workload,
                precisions=p.choices,
                first=first,
                last=last,
                prefill_microbatch=eta,
                decode_microbatch=xi,
                on_gpu=on_gpu,
                unpacks=unpacks,
            )
            for on_gpu, unpacks in kinds
        }
        for index, cls in enumerate(p.classes):
            fixed = cls.first.spec.context + ends + workspace[_memory_kind(cls)]
            table[index, int(first), int(last)] = cls.first.limit_bytes - fixed
    return table


def _memory_kind(cls: DeviceClass) -> tuple[bool, bool]:
    """Return whether a class's stages run on a GPU, and whether it unpacks whole weights."""
    spec = cls.first.spec
    return not spec.is_cpu, spec.unpacks_weights
