"""Another plan once devices are gone, come, or are slow: the same job on those that there are.

What is left are the devices of the cluster, also those that the plan had left out; without a
cluster file those of the plan's other stages. Layers keep the bits that they have where they fit.
Where they do not, weights and then the KV cache lose bits, down to `EngineOptions.min_quality`, and
then fewer requests run at once.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.checkpoints.gguf_file import is_gguf, is_model
from llmpq.checkpoints.quantization_config import quantization_of
from llmpq.checkpoints.stored_codes import stored_codes
from llmpq.devices.cluster import Cluster, Device
from llmpq.errors import DoesNotFitError, unknown_name
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.able_devices import NoDeviceRunsError
from llmpq.plans.capabilities import packed_kv_sentence
from llmpq.plans.plan import Plan, StagePlan
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.launch.engine_starter import Replanned
from llmpq.runtime.launch.plans.auto_plan import plan_job
from llmpq.runtime.launch.plans.complete_plan import complete_plan
from llmpq.runtime.launch.plans.manual_plan import requests_of
from llmpq.runtime.launch.plans.pool_plan import request_limits
from llmpq.runtime.options.engine_options import AUTO, PLANNED, EngineOptions
from llmpq.workload import Workload

if TYPE_CHECKING:
    from llmpq.planner.make import MadePlan
    from llmpq.planner.problem.known_plan import KnownPlan

TIME_LIMIT_S, BUSY_LIMIT_S = 0.6, 2.0
"""How long the planner may search while requests wait; and where others keep the processors."""
_WORK_S = 0.2
"""Of a processor: what a search needs, at least, for a plan that is near the best."""
_WEIGHTS = (Precision.W16A16, Precision.W8A16, Precision.W4A16, Precision.W3A16)
_KVS = (KVPrecision.KV16, KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2)
MOST_CUTS, CUT = 2, 8
"""How often a device that has run out of memory is planned with less, and which part of it less."""
_log = logging.getLogger("llmpq.run")

DeviceKey = tuple[str, int]
"""A device: its node, and its number there."""


@dataclass(frozen=True)
class RemainingDevices:
    """The devices of a cluster without those that are gone."""

    cluster: Cluster
    devices: Mapping[str, Device]
    """Those of `cluster`, by the name there, as the plan before called them."""


class Replanner:
    """Plans an engine's job again, each time that its devices are others."""

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        plan: Plan,
        options: EngineOptions,
        *,
        on_limits: Callable[[PoolLimits], object] = lambda limits: None,
    ) -> None:
        """`options.cluster`: the devices, where they are known.

        `on_limits` gets the limits of each new plan that is carried out.
        """
        self._directory = directory
        self._spec = spec
        self._options = options
        known = options.cluster
        self._given = known if isinstance(known, Cluster) else None
        self._first, self.on_limits = plan, on_limits
        self._gone: set[DeviceKey] = set()
        self._slowdowns: dict[DeviceKey, float] = {}
        self._cuts: Counter[DeviceKey] = Counter()
        """How often devices were planned with less memory."""

    def __call__(
        self, plan: Plan, index: int, *, whole_node: bool = False, less_memory: bool = False
    ) -> Replanned:
        """Return a plan without the device of a stage, or without any of its node.

        `less_memory`: with an eighth less of its memory, once or twice; then without it.
        `DoesNotFitError` says what is short.
        """
        stage = plan.places[index]
        key = stage.node, stage.device_index
        if less_memory and self._cuts[key] < MOST_CUTS:
            self._cuts[key] += 1
            self._given = with_less_memory(self._cluster, key)
        else:
            self._gone |= {
                (device.node, device.index)
                for device in self._cluster.devices
                if device.node == stage.node and (whole_node or device.index == stage.device_index)
            }
        made = self._made(plan, self._cluster, self._gone, self._slowdowns)
        self.on_limits(made.limits)
        return made

    def with_devices(self, plan: Plan, name: str, cluster: Cluster | None = None) -> Change:
        """Return a plan that may use a node's devices, or one device, too.

        They are those of `cluster`, which has the devices of the plan as well, or were given up,
        drained or left out before.
        """
        known = self._cluster if cluster is None else cluster
        if cluster is not None:
            _require_devices(cluster, plan)
        added = devices_named(known, name)
        if {(s.node, s.device_index) for s in plan.places} >= added:
            raise ValueError(f"{name} is in use already")
        before = {(d.node, d.index) for d in self._cluster.devices} - self._gone
        gone = {(d.node, d.index) for d in known.devices} - before - added
        slow = {key: factor for key, factor in self._slowdowns.items() if key not in added}
        return Change(self._made(plan, known, gone, slow), known, gone, slow)

    def without(self, plan: Plan, name: str) -> Change:
        """Return a plan without a node's devices, or without one device.

        `DoesNotFitError` says what is short.
        """
        gone = self._gone | devices_named(self._cluster, name)
        made = self._made(plan, self._cluster, gone, self._slowdowns)
        return Change(made, self._cluster, gone, self._slowdowns)

    def at_measured_times(self, plan: Plan, slowdowns: Mapping[int, float]) -> Change:
        """Return a plan for devices that take so many times as long as they are planned to.

        `slowdowns`: by the number of their stage.
        """
        slow = dict(self._slowdowns)
        for index, factor in slowdowns.items():
            key = plan.places[index].node, plan.places[index].device_index
            slow[key] = slow.get(key, 1.0) * factor
        return Change(
            self._made(plan, self._cluster, self._gone, slow), self._cluster, self._gone, slow
        )

    def accept(self, change: Change) -> None:
        """Go on from a change that is carried out."""
        self._given, self._gone = change.cluster, set(change.gone)
        self._slowdowns = dict(change.slowdowns)
        self.on_limits(change.made.limits)

    @property
    def _cluster(self) -> Cluster:
        return self._given or cluster_of(self._first)

    def _made(
        self,
        plan: Plan,
        cluster: Cluster,
        gone: Collection[DeviceKey],
        slowdowns: Mapping[DeviceKey, float],
    ) -> Replanned:
        remaining = without_devices(cluster, gone)
        began_s = time.perf_counter()
        options = replace(self._options, **PLANNED, kv_cache_dtype=AUTO)
        found = self._planned(plan, remaining, options, slowdowns)
        there = {(was.node, was.index) for was in remaining.devices.values()}
        stays = all((s.node, s.device_index) in there for s in plan.places)
        made, options = self._completed(with_original_names(found.plan, remaining), options)
        before = None if found.known is None else with_original_names(found.known, remaining)
        return Replanned(
            plan=made,
            options=options,
            limits=request_limits(made, self._spec, options),
            change=plan_change(plan, made) | {"planner_s": time.perf_counter() - began_s},
            before=before if stays else None,
        )

    def _planned(
        self,
        plan: Plan,
        remaining: RemainingDevices,
        options: EngineOptions,
        slowdowns: Mapping[DeviceKey, float],
    ) -> MadePlan:
        """Return a plan of the same job with as many bits as fit."""
        from llmpq.planner.problem.known_plan import PlanSearch

        floor, work = self._options.min_quality, self._job
        most = max(precision.weight_bits for precision in self._first.precisions)
        bits = [p for p in _WEIGHTS if floor <= p.weight_bits <= most]
        fewer = packed_kv_sentence((d.kind, d.spec) for d in remaining.cluster.devices) is None
        most_kv = work.kv.mean_bits
        allowed = [kv for kv in _KVS if fewer and floor <= kv.key_bits and kv.mean_bits <= most_kv]
        kvs = list(dict.fromkeys([work.kv, *allowed]))
        names = {(was.node, was.index): name for name, was in remaining.devices.items()}
        search = PlanSearch(
            bits=None if self._is_stored else bits,
            # What a layer lost for want of room it gets back, and no more than it had.
            at_most=() if self._is_stored else self._first.precisions,
            chunk=plan.prefill_chunk,
            slowdowns={names[key]: f for key, f in slowdowns.items() if key in names},
            known=known_plan(plan, names),
            in_child=False,
            time_limit_s=TIME_LIMIT_S,
        )
        refusal: DoesNotFitError | NoDeviceRunsError | None = None
        for kv in kvs:
            planned = partial(
                plan_job,
                self._directory,
                remaining.cluster,
                work.model_copy(update={"kv": kv}),
                replace(options, profile=False),
                spec=self._spec,
            )
            began_s = time.thread_time()
            try:
                made = planned(search=search)
                proven = made.plan.solver.status == "optimal"
                if not proven and time.thread_time() - began_s < _WORK_S:
                    made = planned(search=replace(search, time_limit_s=BUSY_LIMIT_S))
                return made
            except (DoesNotFitError, NoDeviceRunsError) as error:
                refusal = error
        assert refusal is not None
        raise DoesNotFitError(
            f"the devices that are left ({', '.join(d.name for d in remaining.devices.values())}) "
            f"cannot hold the model with {floor} bits or more (--min-quality): "
            f"{_with_names(str(refusal), remaining)}"
        )

    @property
    def _job(self) -> Workload:
        """The job that plans are made for: prompts and answers, if the first plan has no answers.

        Such a plan is of one device, where only room counts; requests of any lengths come to it.
        """
        work = self._first.workload
        if work.gen_len > 1:
            return work
        return requests_of(work.batch, work.max_len, kv=work.kv, dtype=work.dtype)

    @property
    def _is_stored(self) -> bool:
        """Whether layers have the bits that the checkpoint has them in, which cannot be lowered."""
        folder = self._directory
        if not is_model(folder):
            return False
        return is_gguf(folder) or quantization_of(folder) is not None

    def _completed(self, plan: Plan, options: EngineOptions) -> tuple[Plan, EngineOptions]:
        """Decide what is left open, without drafts where the new plan cannot have them."""
        stored = stored_codes(self._directory)
        try:
            return complete_plan(plan, self._spec, options, stored)
        except ValueError as error:
            if options.speculate in (None, "off"):
                raise
            _log.warning("drafts end: %s", error)
            plain = replace(options, speculate="off", gamma=None, costs=None)
            return complete_plan(plan, self._spec, plain, stored)


@dataclass(frozen=True)
class Change:
    """Another plan, and the devices that it was made for."""

    made: Replanned
    cluster: Cluster
    gone: Collection[DeviceKey]
    """Devices of the cluster that must not be used."""
    slowdowns: Mapping[DeviceKey, float]


def devices_named(cluster: Cluster, name: str) -> set[DeviceKey]:
    """Return the devices of a node, or the one of a name; `ValueError` where there are none."""
    nodes = [node.name for node in cluster.nodes]
    found = {(d.node, d.index) for d in cluster.devices if name in (d.node, d.name)}
    if not found:
        known = [*nodes, *(device.name for device in cluster.devices)]
        raise unknown_name("node or device", name, known)
    return found


def _require_devices(cluster: Cluster, plan: Plan) -> None:
    """Refuse a cluster that lacks a device of the plan that runs."""
    known = {(d.node, d.index): d.kind for d in cluster.devices}
    for place in plan.places:
        if known.get((place.node, place.device_index)) != place.kind:
            raise ValueError(
                f"cluster '{cluster.name}' has no {place.kind} with number {place.device_index} on "
                f"node {place.node}, which {place.device} of the plan that runs is: give a cluster "
                "file with the devices in use and the new ones"
            )


def known_plan(plan: Plan, names: Mapping[DeviceKey, str]) -> KnownPlan | None:
    """Return a plan on those of its devices that have a name; None where there are none.

    Stages of several devices are not known: a cluster counts those as one.
    """
    if any(worker.shares for worker in plan.workers):
        return None
    from llmpq.planner.problem.known_plan import KnownPlan, KnownStage

    whole = KnownPlan(
        stages=tuple(
            KnownStage(device=s.device, layers=s.layers, precisions=s.precisions)
            for s in plan.stages
        ),
        prefill_microbatch=plan.prefill_microbatch,
        decode_microbatch=plan.decode_microbatch,
    )
    return whole.without([names.get((s.node, s.device_index)) for s in plan.stages])


def cluster_of(plan: Plan) -> Cluster:
    """Return the devices that a plan uses as a cluster, as far as the plan describes them."""
    nodes: dict[str, list[dict[str, Any]]] = {}
    for stage in sorted(plan.places, key=lambda stage: stage.device_index):
        nodes.setdefault(stage.node, []).append(_group_of(stage))
    known = {node.name: node for node in plan.nodes}
    found = [
        {"name": name, "devices": groups}
        | (known[name].model_dump(exclude_none=True) if name in known else {})
        for name, groups in nodes.items()
    ]
    return Cluster.parse_data({"name": plan.cluster.name, "nodes": found}, where="the plan")


def _group_of(stage: StagePlan) -> dict[str, Any]:
    group: dict[str, Any] = {"kind": stage.kind}
    if stage.threads is not None:
        group["threads"] = stage.threads
    memory = stage.memory
    if memory is not None:
        group |= {
            "memory": memory.limit_bytes + memory.reserve_bytes,
            "reserve": memory.reserve_bytes,
        }
    if stage.sms is not None:
        group["emulate"] = {"sms": stage.sms}
    return group


def without_devices(cluster: Cluster, gone: Collection[DeviceKey]) -> RemainingDevices:
    """Return a cluster without some devices; `DoesNotFitError` if none is left."""
    kept = [d for d in cluster.devices if (d.node, d.index) not in gone]
    if not kept:
        raise DoesNotFitError("no device is left that could take over")
    counts, nodes, index_of = Counter[tuple[str, int]](), [], {}
    for node in cluster.nodes:
        index = 0
        for place, group in enumerate(node.groups()):
            for _ in range(group.count):
                index_of[node.name, index] = place
                index += 1
    for device in kept:
        counts[device.node, index_of[device.node, device.index]] += 1
    for node in cluster.nodes:
        groups = [
            group.model_copy(update={"count": counts[node.name, place]})
            for place, group in enumerate(node.groups())
            if counts[node.name, place]
        ]
        if groups:
            nodes.append(node.model_copy(update={"devices": tuple(groups), "accelerators": None}))
    bare = cluster.model_copy(
        update={"nodes": tuple(nodes), "links": cluster.links.model_copy(update={"pairs": ()})}
    )
    renamed = Cluster.parse_data(bare.model_dump(by_alias=True), where="the devices left")
    pairs = []
    names = {was.name: now.name for was, now in zip(kept, renamed.devices, strict=True)}
    names |= {
        f"{was.node}:{was.index}": now.name for was, now in zip(kept, renamed.devices, strict=True)
    }
    names |= {node.name: node.name for node in nodes}
    for pair in cluster.links.pairs:
        if all(end in names for end in pair.between):
            ends = tuple(names[end] for end in pair.between)
            pairs.append(pair.model_copy(update={"between": ends}))
    linked = renamed.model_copy(
        update={"links": cluster.links.model_copy(update={"pairs": tuple(pairs)})}
    )
    whole = Cluster.parse_data(linked.model_dump(by_alias=True), where="the devices left")
    return RemainingDevices(
        whole, {now.name: was for was, now in zip(kept, whole.devices, strict=True)}
    )


def with_less_memory(cluster: Cluster, key: DeviceKey) -> Cluster:
    """Return a cluster with one device of which an eighth more stays free."""
    nodes = []
    for node in cluster.nodes:
        if node.name != key[0]:
            nodes.append(node)
            continue
        each = [group for group in node.groups() for _ in range(group.count)]
        own = [device for device in cluster.devices if device.node == node.name]
        free = {device.index: device.reserve_bytes for device in own}
        free[key[1]] += own[key[1]].memory_bytes // CUT
        devices = [
            group.model_copy(update={"count": 1, "reserve": free[index]})
            for index, group in enumerate(each)
        ]
        nodes.append(node.model_copy(update={"devices": tuple(devices), "accelerators": None}))
    changed = cluster.model_copy(update={"nodes": tuple(nodes)})
    return Cluster.parse_data(changed.model_dump(by_alias=True), where="the devices")


def _with_names(text: str, remaining: RemainingDevices) -> str:
    """Return a sentence about the devices left with their former names."""
    known = {now: was.name for now, was in remaining.devices.items()}
    words = "|".join(re.escape(name) for name in known)
    return re.sub(rf"(?<![\w-])({words})(?![\w-])", lambda found: known[found[1]], text)


def with_original_names(plan: Plan, remaining: RemainingDevices) -> Plan:
    """Return a plan of the devices left with their former names and numbers."""
    stages, inputs = [], plan.inputs
    for stage in plan.stages:
        was = remaining.devices[stage.device]
        stages.append(
            stage.model_copy(
                update={"device": was.name, "node": was.node, "device_index": was.index}
            )
        )
    if inputs is not None:
        inputs = inputs.renamed({now: (d.name, d.index) for now, d in remaining.devices.items()})
    return plan.model_copy(update={"stages": tuple(stages), "inputs": inputs})


def plan_change(before: Plan, now: Plan) -> dict[str, Any]:
    """Return both plans in short, for logs and reports."""

    def described(plan: Plan) -> dict[str, Any]:
        bits = Counter(precision.value for precision in plan.precisions)
        return {
            "stages": [
                {"device": s.device, "node": s.node, "layers": list(s.layers)} for s in plan.places
            ],
            "weights": ", ".join(f"{name} x{count}" for name, count in sorted(bits.items())),
            "kv": plan.workload.kv.value,
            "requests": plan.workload.batch,
        }

    return {"before": described(before), "now": described(now)}
