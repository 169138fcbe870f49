"""From nouns to numbers: what a solver sees of a model, a cluster and a workload.

Knows nothing of solvers. Devices that can take each other's place form a class; a stage runs on one
device of a class. Symbols: L layers (or groups of layers), C classes, B choices of precision, eta
and xi the prefill and decode micro-batch sizes, P and D the slowest stage's time in either phase.

Two devices are alike if their kind, free memory, limits, pins and links to all others agree. Two
nodes are twins if exchanging all their devices changes no link. The names of nodes decide nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmpq.costs.cost_model import Phase
from llmpq.devices.cluster import Cluster, Device
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member
from llmpq.planner.costs.cost_book import CostBook
from llmpq.planner.costs.links import ClassLinks, Floats, LinkTables, link_tables
from llmpq.planner.problem.cost_factors import CostFactors
from llmpq.planner.problem.numbers import (
    PairNumbers,
    SizeNumbers,
    distinct_sizes,
    microbatch_pairs,
    pair_numbers,
    size_numbers,
)
from llmpq.planner.problem.stage_memory import (
    capacity,
    kv_bytes_of_layers,
    largest_weights,
    layer_bytes,
    packed_of,
    unlike_bytes,
)
from llmpq.precision import KVPrecision, Precision
from llmpq.sensitivity import Sensitivity
from llmpq.sizes.memory import Quantization
from llmpq.sizes.pool_size import planned_pool, window_step_tokens
from llmpq.workload import CHUNK_TOKENS, Workload, chunk_tokens, num_chunks

Objective = Literal["makespan", "paper"]
MANY_DEVICES = 256
"""Devices up to which every link is looked at; of more, equal ones of a node are alike."""


@dataclass(frozen=True, kw_only=True)
class DeviceClass:
    """Devices that are interchangeable in a plan (`alike_devices`)."""

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


_OF_DEVICES = frozenset({"spec", "cluster", "costs", "group", "pins", "nearest_links"})
_MADE_OF: dict[str, frozenset[str]] = {
    **dict.fromkeys(("_keys", "links", "members", "classes", "measured_links"), _OF_DEVICES),
    **dict.fromkeys(("groups", "cuts"), frozenset({"spec", "group"})),
    "open": frozenset({"spec", "offered", "choices", "group"}),
    "weights": frozenset({"spec", "quantization", "choices", "workload"}),
}
"""Cached property -> fields that it is made of; of the workload, the dtype alone."""
_OF_FACTORS = ("class_links", "node_twins", "_sizes", "_numbers", "of_any_theta")
"""Cached properties that are others where times have factors."""


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
    chunk: int = CHUNK_TOKENS
    """Tokens of a prompt that a step computes at most (chunked prefill)."""
    offered: tuple[tuple[Precision, ...], ...] = ()
    """What each layer may have of `choices`, for a model that is stored quantised; empty: all."""
    nearest_links: bool = False
    """Put devices of equal kind and memory into one class, as if all had the best of their links:
    no plan of the true problem is slower for that, so its bounds are valid there."""
    factors: CostFactors | None = None
    """What its times are multiplied by, where they are taken to be wrong; None: as measured."""

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
    def _keys(self) -> list[Hashable]:
        factor = self.costs.factor
        return [(device_key(d, self.pins), factor(d)) for d in self.cluster.devices]

    @cached_property
    def links(self) -> LinkTables:
        """Coefficients of the links between all devices, in the cluster's order."""
        return link_tables(self.cluster, self.cluster.devices, self.costs)

    @cached_property
    def members(self) -> list[list[int]]:
        """Device numbers of each class, in the cluster's order."""
        devices = self.cluster.devices
        if self.nearest_links:
            return alike_devices(devices, self._keys, None)
        if len(devices) > MANY_DEVICES:
            return alike_devices(devices, self._keys_and_nodes, None)
        return alike_devices(devices, self._keys, self.links)

    @property
    def _keys_and_nodes(self) -> list[Hashable]:
        devices = self.cluster.devices
        own = [d.name if self.cluster.has_own_links(d) else "" for d in devices]
        nodes = [d.node for d in devices]
        return list(zip(self._keys, nodes, own, strict=True))

    @cached_property
    def classes(self) -> tuple[DeviceClass, ...]:
        """Interchangeable devices, in the cluster's order."""
        devices = self.cluster.devices
        return tuple(
            DeviceClass(
                devices=tuple(devices[i] for i in members),
                pinned=self._pinned_groups(devices[members[0]].name),
            )
            for members in self.members
        )

    @cached_property
    def class_links(self) -> ClassLinks:
        """The links between classes."""
        measured = self.measured_links
        return measured if self.factors is None else self.factors.of_links(measured)

    @cached_property
    def measured_links(self) -> ClassLinks:
        """The links between classes, without factors."""
        devices = self.cluster.devices
        if len(devices) <= MANY_DEVICES:
            return self.links.between(self.members)
        # Two devices of a node and kind stand for all of them.
        groups = alike_devices(devices, self._keys_and_nodes, None)
        kept = {i for group in groups for i in group[:2]}
        number = {i: k for k, i in enumerate(sorted(kept))}
        links = link_tables(self.cluster, [devices[i] for i in number], self.costs)
        members = [[number[i] for i in own if i in kept] for own in self.members]
        return links.between(members)

    @cached_property
    def node_twins(self) -> list[list[tuple[int, ...]]]:
        """Groups of nodes that can be exchanged whole, each node as its classes."""
        if self.nearest_links or self.factors or len(self.cluster.devices) > MANY_DEVICES:
            return []
        return twin_nodes(self.cluster.devices, self._keys, self.members, self.links)

    def _pinned_groups(self, device: str) -> tuple[int, int] | None:
        if device not in self.pins:
            return None
        start, end = self.pins[device]
        return start // self.group, -(-end // self.group)

    @cached_property
    def cuts(self) -> NDArray[np.bool_]:
        """[L+1] in front of which layers (groups) a stage may begin; whether one may end there.

        A layer that reads another's KV cache is on that one's stage.
        """
        starts = [start for start, _ in self.groups]
        return np.array([*(self.spec.may_cut(start) for start in starts), True])

    @property
    def is_restricted(self) -> bool:
        """Whether pins or shared caches keep some stages from holding some layers."""
        return bool(self.pins) or not self.cuts.all()

    def nearest_cuts(self, bounds: Sequence[int]) -> list[int]:
        """Return ascending bounds of stages, each moved to the nearest place for one."""
        places = np.flatnonzero(self.cuts).tolist()
        found = [bounds[0]]
        for position, bound in enumerate(bounds[1:-1], start=2):
            left = len(bounds) - position  # places that later bounds need
            own = places[places.index(found[-1]) + 1 : len(places) - left]
            found.append(min(own, key=lambda place: (abs(place - bound), place)))
        return [*found, bounds[-1]]

    @property
    def max_stages(self) -> int:
        """Largest number of stages a plan may have."""
        most = min(len(self.cluster.devices), int(self.cuts[:-1].sum()))
        return most if self.max_devices is None else min(most, self.max_devices)

    @cached_property
    def packed(self) -> NDArray[np.bool_]:
        """[B] which choices are of packed weights."""
        return packed_of(self.choices)

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
    def prefill_sizes(self) -> tuple[int, ...]:
        """The prefill micro-batch sizes to try, ascending."""
        fixed = self.prefill_microbatch
        if fixed:
            return (fixed,)
        # Pools of windows have room for steps of so many tokens.
        work = self.workload
        size = planned_pool(self.spec, work, self.chunk, prefill_microbatch=1)
        most = work.batch
        if size.window:
            room = window_step_tokens(work, self.chunk, prefill_microbatch=1)
            most = room // chunk_tokens(work.prompt_len, self.chunk)
        return tuple(size for size in distinct_sizes(work.batch) if size <= most)

    @cached_property
    def decode_sizes(self) -> tuple[int, ...]:
        """The decode micro-batch sizes to try, ascending."""
        fixed = self.decode_microbatch
        return (fixed,) if fixed else distinct_sizes(self.workload.batch)

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The micro-batch sizes to try, (prefill, decode).

        The paper's objective keeps the paper's pruning, prefill <= decode, where neither is fixed.
        """
        fixed = self.prefill_microbatch or self.decode_microbatch
        ordered = self.objective == "paper" and not fixed
        return microbatch_pairs(self.prefill_sizes, self.decode_sizes, ordered=ordered)

    @property
    def chunks_of_prompt(self) -> int:
        """Number of steps that a prompt takes."""
        return num_chunks(self.workload.prompt_len, self.chunk)

    def counts(self, eta: int, xi: int) -> tuple[int, int]:
        """Return the numbers of steps of prefill (chunks of micro-batches) and of a token."""
        batch = self.workload.batch
        return -(-batch // eta) * self.chunks_of_prompt, -(-batch // xi)

    @property
    def kv(self) -> KVPrecision:
        """Precision of the KV cache."""
        return self.workload.kv

    def allowed(self, cls: int, start: int, end: int) -> bool:
        """Whether pins and shared caches let a stage of a class hold groups `[start, end)`."""
        if not (self.cuts[start] and self.cuts[end]):
            return False
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

        What the changes leave as it is is not computed again: all times and sizes of another
        theta, weights and devices of another length.
        """
        changed = replace(self, **changes)  # type: ignore[arg-type]
        fields = {f.name for f in dataclasses.fields(self)}
        if set(changes) == {"theta"}:
            own = {*fields, "priced_omega"}
            kept = {k for k in self.__dict__ if k not in own}
        elif set(changes) == {"factors"}:
            kept = {k for k in self.__dict__ if k not in {*fields, *_OF_FACTORS}}
        else:
            same_dtype = changed.workload.dtype == self.workload.dtype
            only_rows = changed.workload == self.workload.model_copy(
                update={"batch": changed.workload.batch}
            )
            other = set(changes) - ({"workload"} if same_dtype else set())
            kept = {k for k, of in _MADE_OF.items() if not of & other}
            if only_rows and set(changes) <= {"workload", "theta"}:
                kept.add("size_costs")
        changed.__dict__.update({k: self.__dict__[k] for k in kept & set(self.__dict__)})
        return changed

    def part(self, names: Collection[str]) -> Problem:
        """Return the problem on some of its devices only, which keep their names."""
        return self.with_changes(cluster=self.cluster.part(names))

    def with_job(self, **changes: Any) -> Problem:
        """Return the problem after changes of its own fields and its workload's.

        A smaller batch makes fixed micro-batches smaller.
        """
        fields = {"kv", "batch", "prompt_len", "gen_len"}
        work = {key: changes.pop(key) for key in fields & set(changes)}
        if work:
            changes["workload"] = self.workload.model_copy(update=work)
        batch = work.get("batch")
        for name in ("prefill_microbatch", "decode_microbatch"):
            fixed = changes.get(name, getattr(self, name))
            if batch is not None and fixed is not None:
                changes[name] = min(fixed, batch)
        return self.with_changes(**changes) if changes else self

    def prepared(self) -> Problem:
        """Return it with all computed that problems of other lengths take over."""
        for name in _MADE_OF:
            getattr(self, name)
        return self

    def with_context(self, tokens: int) -> Problem:
        """Return the problem with contexts of so many tokens; prompts get longer, or shorter."""
        answer = max(1, min(self.workload.gen_len, tokens - 1))
        return self.with_job(prompt_len=max(1, tokens - answer), gen_len=answer)

    def sharing_tables(self) -> Problem:
        """Return it such that what is computed at another theta is not computed again at this."""
        for name in ("_sizes", "_numbers", "_capacities", "of_any_theta"):
            getattr(self, name)
        return self

    @cached_property
    def parts_of_members(self) -> dict[tuple[tuple[int, ...], int], tuple[Member, float]]:
        """By shares and number, a device of a group, and what it has of a layer's bytes at most."""
        return {}

    @cached_property
    def _sizes(self) -> dict[tuple[Phase, int], SizeNumbers]:
        return {}

    @cached_property
    def of_any_theta(self) -> dict[type, Any]:
        """What searches keep for the problem at other thetas, by its class."""
        return {}

    @cached_property
    def size_costs(self) -> dict[tuple[Phase, int], tuple[Floats, Floats]]:
        """Times of layers and ends by size of a micro-batch: those of every batch."""
        return {}

    def size_numbers(self, phase: Phase, size: int) -> SizeNumbers:
        """Return the times of one phase at a micro-batch size: many pairs share them."""
        if (phase, size) not in self._sizes:
            self._sizes[phase, size] = size_numbers(self, phase, size)
        return self._sizes[phase, size]

    @cached_property
    def kv_bytes_of_layers(self) -> NDArray[np.int64]:
        """[layers] KV of every layer of the model, for the whole batch."""
        return kv_bytes_of_layers(self)

    @cached_property
    def weights(self) -> NDArray[np.int64]:
        """[B] bytes of the largest layer's weights at each choice."""
        return largest_weights(self)

    @cached_property
    def unlike_bytes(self) -> NDArray[np.int64] | None:
        """[layers, B] of every layer by itself; None where layers count as equal."""
        return unlike_bytes(self)

    @cached_property
    def all_layer_bytes(self) -> NDArray[np.int64]:
        """[L, B] weights and the whole batch's KV."""
        own = self.unlike_bytes
        if own is not None:
            return np.array([own[start:end].sum(axis=0) for start, end in self.groups])
        sizes = np.array([end - start for start, end in self.groups], dtype=np.int64)
        return sizes[:, None] * layer_bytes(self)[None, :]

    @cached_property
    def _capacities(self) -> dict[tuple[int, int], NDArray[np.int64]]:
        return {}

    def capacity(self, eta: int, xi: int) -> NDArray[np.int64]:
        """[C, 2, 2, 3] bytes left for layers (planner/problem/stage_memory.py)."""
        if (eta, xi) not in self._capacities:
            self._capacities[eta, xi] = capacity(self, eta, xi)
        return self._capacities[eta, xi]

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], PairNumbers]:
        return {}

    def numbers(self, eta: int, xi: int) -> PairNumbers:
        """Return the numbers for a pair of micro-batch sizes."""
        if (eta, xi) not in self._numbers:
            self._numbers[eta, xi] = pair_numbers(self, eta, xi)
        return self._numbers[eta, xi]


def device_key(device: Device, pins: Mapping[str, tuple[int, int]]) -> Hashable:
    """Return what makes a device's speed, memory and duties."""
    pinned = device.name if device.name in pins else ""
    return device.profile_kind, device.limit_bytes, device.spec.context, pinned


def alike_devices(
    devices: Sequence[Device], keys: Sequence[Hashable], links: LinkTables | None
) -> list[list[int]]:
    """Return the classes of devices that are alike; without `links` by their keys only."""
    classes: list[list[int]] = []
    for i in range(len(devices)):
        for members in classes:
            same = keys[members[0]] == keys[i]
            if same and (links is None or links.same_from(members[0], i)):
                members.append(i)
                break
        else:
            classes.append([i])
    return classes


def twin_nodes(
    devices: Sequence[Device],
    keys: Sequence[Hashable],
    classes: Sequence[Sequence[int]],
    links: LinkTables,
) -> list[list[tuple[int, ...]]]:
    """Return groups of interchangeable nodes, each node as the numbers of its classes.

    Only nodes whose classes lie wholly within them: elsewhere their devices are alike already.
    """
    own: dict[str, list[int]] = {}
    for c, members in enumerate(classes):
        nodes = {devices[i].node for i in members}
        if len(nodes) == 1:
            own.setdefault(nodes.pop(), []).append(c)
    of_node: dict[str, list[int]] = {}
    for i, device in enumerate(devices):
        of_node.setdefault(device.node, []).append(i)
    whole = {
        node: tuple(cs)
        for node, cs in own.items()
        if sum(len(classes[c]) for c in cs) == len(of_node[node])
    }
    groups: list[list[str]] = []
    for node in whole:
        for group in groups:
            if _twins(whole[group[0]], whole[node], classes, keys, links):
                group.append(node)
                break
        else:
            groups.append([node])
    return [[whole[node] for node in group] for group in groups if len(group) > 1]


def _twins(
    one: Sequence[int],
    other: Sequence[int],
    classes: Sequence[Sequence[int]],
    keys: Sequence[Hashable],
    links: LinkTables,
) -> bool:
    """Whether exchanging the devices of two nodes, class by class, changes nothing."""
    if len(one) != len(other):
        return False
    order = np.arange(len(keys))
    for c, d in zip(one, other, strict=True):
        if len(classes[c]) != len(classes[d]) or keys[classes[c][0]] != keys[classes[d][0]]:
            return False
        order[list(classes[c])], order[list(classes[d])] = list(classes[d]), list(classes[c])
    return links.unchanged_by(order)
