"""What to say when nothing fits: by how much it is short, and what would fit.

Fitting is counted, not searched: layers of the fewest bytes allowed, micro-batches of one, stages
filled one after the other. A plan made so (`fitting_plan`) proves that a change is enough: nothing
is named that has not been planned so, its bytes counted again as the runtime allocates them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmpq.devices.cluster import Cluster, Device, DeviceGroup
from llmpq.devices.device_spec import known_kind
from llmpq.devices.joined_devices import joined
from llmpq.errors import DoesNotFitError
from llmpq.planner.check.build_plan import assigned_memory, build_plan
from llmpq.planner.check.check import check_plan
from llmpq.planner.costs.roofline import estimate_costs
from llmpq.planner.evaluate.fits import (
    end_pairs,
    fitting_plan,
    in_each_chunk,
    largest,
    smallest_microbatches,
)
from llmpq.planner.evaluate.objective import job_time, value
from llmpq.planner.problem import limits
from llmpq.planner.problem.make_problem import generic_sensitivity, runs_kv
from llmpq.planner.problem.named_inputs import with_reserve
from llmpq.planner.problem.outcome import Assignment, Outcome
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stage_memory import (
    DENSE,
    MIXED,
    PACKED,
    choices_of,
    layer_bytes,
    sort_of_stage,
)
from llmpq.plans.plan import Plan
from llmpq.precision import WEIGHT_ONLY, KVPrecision, Precision
from llmpq.units import format_size, parse_size, shown

GB = 10**9
CPU_SIZES = (16, 32, 64, 128, 256, 512)
"""Memory of a CPU that is offered as a way out, GB."""
PROPOSED_KV = (KVPrecision.KV8, KVPrecision.KV8V4, KVPrecision.KV4, KVPrecision.KV2)
"""KV precisions that are offered as a way out, most precise first."""
MANY_DEVICES = 64
"""Devices up to which all changes are tried."""
MOST_CARDS = 4
"""Cards of one kind that are offered as a way out."""


class NothingFitsError(DoesNotFitError):
    """No plan fits; the text is worked out when it is read."""

    def __init__(
        self,
        problem: Problem,
        kvs: Sequence[KVPrecision],
        *,
        budget: float | None = None,
        names_flags: bool = True,
        names_context: bool = False,
    ) -> None:
        super().__init__()
        self.problem = problem
        self._kvs = kvs
        self._budget = budget
        self._names_flags, self._names_context = names_flags, names_context

    @cached_property
    def _text(self) -> str:
        found = refusal_of(
            self.problem,
            self._kvs,
            budget=self._budget,
            names_flags=self._names_flags,
            names_context=self._names_context,
        )
        return found.text

    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True, kw_only=True)
class StageRoom:
    """How many layers fit at most, and what the rest would take."""

    layers: int
    device: Device
    """The device that is closest to holding what is missing."""
    missing_bytes: int


def too_big(p: Problem) -> bool:
    """Whether no plan can fit, at any precision, order and micro-batches: nothing to search."""
    return _room(p, None).layers < p.spec.num_layers


def too_big_in_any_chunks(p: Problem) -> bool:
    """Whether no plan can fit in the job's chunks of prompts, nor in smaller ones."""
    return all(too_big(of_size) for of_size in in_each_chunk(p))


def _mean_bytes(p: Problem) -> NDArray[np.int64]:
    """[B] bytes of a layer; where they differ of a mean one, rounded down: as many fit at least."""
    own = p.unlike_bytes
    return layer_bytes(p) if own is None else own.sum(axis=0) // len(own)


def _room(p: Problem, choice: int | None) -> StageRoom:
    """Return how much of the model fits at a choice of precision and the smallest micro-batches.

    Without a choice no plan has more room: every stage has layers of the fewest bytes that its sort
    of weights may have.
    """
    table, sizes = p.capacity(*smallest_microbatches(p)), _mean_bytes(p)
    if choice is None:
        units = {
            sort: int(sizes[some].min())
            for sort in (DENSE, PACKED, MIXED)
            if (some := choices_of(p.choices, sort)).any()
        }
    else:
        units = {sort_of_stage(p.packed, [choice]): int(sizes[choice])}
    devices = [(index, d) for index, cls in enumerate(p.classes) for d in cls.devices]
    most = min(len(devices), p.max_devices or len(devices))
    found: StageRoom | None = None
    for first, last in end_pairs([index for index, _ in devices]):
        rooms = [
            {sort: int(table[index, int(k == first), int(k == last), sort]) for sort in units}
            for k, (index, _) in enumerate(devices)
        ]
        held = [max(0, *(room[sort] // units[sort] for sort in units)) for room in rooms]
        some_devices = [first] if first == last else list(range(len(devices)))
        used = sorted(some_devices, key=lambda k: -held[k])[:most]
        total = sum(held[k] for k in used)
        if p.unlike_bytes is not None:  # what is left on each may be room for a smaller layer
            total += len(used)
        lacking = max(0, p.spec.num_layers - total)
        needs = {
            k: min((held[k] + lacking) * units[sort] - rooms[k][sort] for sort in units)
            for k in used
        }
        nearest = min(used, key=lambda k: needs[k])
        if found is None or total > found.layers:
            missing = max(0, needs[nearest]) if lacking else 0
            found = StageRoom(layers=total, device=devices[nearest][1], missing_bytes=missing)
    assert found is not None, "a cluster has at least one device"
    return found


@dataclass(frozen=True, kw_only=True)
class PlanRefusal:
    """Why nothing fits, and what would."""

    said: str
    """What is short, as a sentence without its end."""
    remedy: str
    """What to do where there is no way out."""
    device: str | None = None
    """The device that is closest to holding what is missing of the best form allowed."""
    missing_bytes: int = 0
    ways: tuple[str, ...] = ()
    """Changes that fit, cheapest first, a CPU's memory last; each has been planned."""

    @property
    def text(self) -> str:
        """One sentence."""
        ways = f"what fits: {', or '.join(self.ways)}" if self.ways else self.remedy
        return f"{self.said}; {ways}"


def refusal_of(
    p: Problem,
    kvs: Sequence[KVPrecision],
    *,
    budget: float | None = None,
    names_flags: bool = True,
    names_context: bool = False,
) -> PlanRefusal:
    """Return what is short of the best form allowed, and changes that fit.

    `names_flags`: changes are flags of llmpq-algo, else words. `names_context`: a shorter context
    is `--context`, else a shorter prompt or answer.
    """
    problems = [p.with_job(kv=kv) for kv in kvs]
    given = _limits_given(p, budget)
    dropped = [flag for flag, change in given.items() if _some_fit(problems, **change)]
    short = [q for q in problems if too_big_in_any_chunks(q)]
    if given and len(short) < len(problems):
        which = " or ".join(dropped) if dropped else ", ".join(given)
        verb = "leave it out" if len(given) == 1 else f"leave out {which}"
        only = f"{p.spec.name} fits {p.cluster.name} only without {', '.join(given)}"
        return PlanRefusal(said=only, remedy=verb)
    lack = _shortfall(p, problems)
    said = f"{p.spec.name} does not fit {p.cluster.name}: {lack.text}"
    context, positions = p.workload.prompt_len + p.workload.gen_len, p.spec.max_positions
    if not _some_fit(problems, prompt_len=1, gen_len=1):
        said += ", whatever the context"
    elif p.workload.batch > 1:
        said += f" for {p.workload.requests} of {context:,} tokens at once"
    if context > positions and p.spec.positions != "alibi":
        said += f"; {context} tokens are also beyond the model's {positions} positions"
    ways = _Ways(p, kvs, names_flags, names_context).found()
    return PlanRefusal(
        said=said,
        remedy="take more devices or a smaller model",
        device=lack.room.device.name if lack.room.missing_bytes else None,
        missing_bytes=lack.room.missing_bytes,
        ways=(*(f"leaving out {flag}" for flag in dropped), *ways),
    )


_NO_LIMITS: dict[str, Any] = {
    "pins": {},
    "max_devices": None,
    "group": 1,
    "prefill_microbatch": None,
    "decode_microbatch": None,
}


def _limits_given(p: Problem, budget: float | None) -> dict[str, dict[str, Any]]:
    """Return the flags that were given and forbid plans, each with the change that drops it."""
    given = {
        "--pin": ("pins", bool(p.pins)),
        "--max-devices": ("max_devices", p.max_devices is not None),
        "--group": ("group", p.group > 1),
        "--prefill-microbatch": ("prefill_microbatch", p.prefill_microbatch is not None),
        "--decode-microbatch": ("decode_microbatch", p.decode_microbatch is not None),
    }
    flags = {flag: {name: _NO_LIMITS[name]} for flag, (name, was) in given.items() if was}
    return flags if budget is None else {**flags, "--quality-budget": {}}


def _some_fit(problems: Sequence[Problem], **change: Any) -> bool:
    return any(fitting_plan(q.with_job(**change)) is not None for q in problems)


@dataclass(frozen=True, kw_only=True)
class _Shortfall:
    """What the form that is nearest to fitting lacks."""

    form: str
    room: StageRoom

    @property
    def text(self) -> str:
        """`at w4a16 and kv16, T4-0 is short by 1 GiB`."""
        return f"{self.form}, {_short(self.room)}"


def _shortfall(p: Problem, problems: Sequence[Problem]) -> _Shortfall:
    """Return what the form that is nearest to fitting lacks."""
    problems = [of_size for q in problems for of_size in in_each_chunk(q)]
    forms = [
        (_room(q, b).missing_bytes, -k, q, b)
        for k, q in enumerate(problems)
        for b in range(len(q.choices))
        if q.open[:, b].all()
    ]
    if not forms:
        return _Shortfall(form="with every layer as it is stored", room=_room(problems[-1], None))
    _, _, q, b = min(forms, key=lambda form: form[:2])
    even = "even " if len({(q.kv, b) for _, _, q, b in forms}) > 1 else ""
    form = f"{even}at {q.choices[b].value} and {q.kv.value}"
    return _Shortfall(form=form, room=_room(q, b))


def _short(room: StageRoom) -> str:
    if not room.missing_bytes:
        return "its layers do not share out over the devices"
    return f"{room.device.name} is short by {format_size(room.missing_bytes)}"


class _Ways:
    """Changes of a job that does not fit that make it fit, cheapest first."""

    def __init__(
        self, p: Problem, kvs: Sequence[KVPrecision], names_flags: bool, names_context: bool
    ) -> None:
        self.p = p
        self.names_flags = names_flags
        self.names_context = names_context
        self.kv = min(kvs, key=lambda kv: kv.mean_bits)
        """The fewest bits allowed."""
        job = p.with_job(kv=self.kv)
        self.whole = p.cluster.ungrouped()
        self.shares = next((device.shares for device in p.cluster.devices if device.joined), ())
        # Links of many devices are a table of all pairs, which few changes of theirs would share.
        self.job = job if len(p.cluster.devices) > MANY_DEVICES else job.prepared()

    def found(self) -> list[str]:
        """Return the ways out, each planned: together only where none is enough by itself."""
        ways = [way for way in (self._kv(), self._bits()) if way] or [self._bits_and_kv()]
        if len(self.p.cluster.devices) > MANY_DEVICES:  # the rest takes minutes
            return [way for way in ways if way]
        fewer_at_once = self._batch() or ("" if any(ways) else self._batch_of_fewer_bits())
        ways += [fewer_at_once, self._length()]
        if not any(ways):
            ways = [self._least_and_length()]
        reserve = self._reserve() if self.names_flags else ""
        return [way for way in (reserve, *ways, self._larger(), self._cards(), self._cpu()) if way]

    def _fewer_bits(self) -> list[Precision]:
        """Return the precisions below those allowed, most bits first."""
        if self.p.offered:  # stored bits stay as they are
            return []
        least = min(choice.weight_bits for choice in self.p.choices)
        below = [c for c in WEIGHT_ONLY if c.weight_bits < least]
        return sorted(below, key=lambda c: -c.weight_bits)

    def _fewer_kv(self) -> list[KVPrecision]:
        """Return what may take less: fewer bits; 16, too, of windows and latents."""
        below = [
            kv for kv in PROPOSED_KV if kv.mean_bits < self.kv.mean_bits and runs_kv(self.p, kv)
        ]
        spec, whole = self.p.spec, KVPrecision.KV16
        if self.kv is not whole and (spec.widest_window or spec.latent is not None):
            below.append(whole)
        return sorted(below, key=lambda kv: -kv.mean_bits)

    def _bits(self) -> str:
        for bits in self._fewer_bits():
            if _planned(self.job, choices=(bits,)):
                return self._said(bits=bits)
        return ""

    def _kv(self) -> str:
        for kv in self._fewer_kv():
            if _planned(self.job, kv=kv):
                return self._said(kv=kv)
        return ""

    def _bits_and_kv(self) -> str:
        """Return fewer bits of both: of what fits, the most bits of weights, then of the cache."""
        for bits, kv in product(self._fewer_bits(), self._fewer_kv()):
            if _planned(self.job, choices=(bits,), kv=kv):
                return self._said(bits=bits, kv=kv)
        return ""

    def _length(self) -> str:
        """Return the longest context that fits."""
        longest = self._longest()
        return self._said(**longest) if longest else ""

    def _longest(self, **change: Any) -> dict[str, Any]:
        """Return the longest context that fits after a change: the longer of prompt and answer is
        cut, to the model's positions at most; nothing where none fits."""
        work, positions = self.p.workload, self.p.spec.max_positions
        name = "prompt_len" if work.prompt_len >= work.gen_len else "gen_len"
        own = getattr(work, name)
        context = work.prompt_len + work.gen_len
        if self.p.spec.positions != "alibi" and context > positions > context - own:
            own -= context - positions
            if _planned(self.job.with_job(**change), **{name: own}):
                return {name: own}
        most = self._most(name, below=own, **change)
        return {name: most} if most else {}

    def _batch(self) -> str:
        most = self._most("batch", below=self.p.workload.batch)
        return self._said(batch=most) if most else ""

    def _batch_of_fewer_bits(self) -> str:
        """Return how many requests of the whole context fit at once, with as few bits as needed."""
        if self.p.workload.batch == 1:
            return ""
        weights, caches = self._fewer_bits(), self._fewer_kv()
        both = product([None, *weights], [None, *caches])
        for bits, kv in sorted(both, key=lambda own: (own[0] is not None, own[1] is not None)):
            change: dict[str, Any] = {} if bits is None else {"choices": (bits,)}
            change |= {} if kv is None else {"kv": kv}
            if change and fitting_plan(self.job.with_job(**change, batch=1)) is not None:
                most = self._most("batch", below=self.p.workload.batch, **change)
                return self._said(bits=bits, kv=kv, batch=most) if most else ""
        return ""

    def _most(self, name: str, *, below: int, **change: Any) -> int:
        """Return the largest value of a field of the job, below one, with which it fits."""
        job = self.job.with_job(**change)
        most = largest(
            lambda value: fitting_plan(job.with_job(**{name: value})) is not None,
            below,
        )
        return most if most and _planned(job, **{name: most}) else 0

    def _least_and_length(self) -> str:
        """Return the longest context at the fewest bits of weights and cache."""
        bits, kvs = self._fewer_bits(), self._fewer_kv()
        if not bits and not kvs:
            return ""
        choices = (bits[-1],) if bits else self.p.choices
        kv = kvs[-1] if kvs else self.kv
        longest = self._longest(choices=choices, kv=kv)
        own: dict[str, Any] = {"bits": bits[-1] if bits else None, "kv": kv if kvs else None}
        return self._said(**own, **longest) if longest else ""

    def _reserve(self) -> str:
        """Return that the memory which is left free by default would do."""
        groups = [group for node in self.whole.nodes for group in node.groups()]
        if all(group.reserve is not None for group in groups):
            return ""
        free = with_reserve(self.whole, 0)
        more = free.fingerprint() != self.whole.fingerprint()
        return "--reserve 0" if more and self._planned_on(free) else ""

    def _planned_on(self, cluster: Cluster) -> tuple[Problem, Assignment] | None:
        """Return the job on other devices, which share stages as those of the job do, and a plan
        of it that fits; None where none does."""
        if self.shares:
            with suppress(ValueError):  # too few on a node
                return _planned(self.job, cluster=joined(cluster, self.shares, self.p.spec))
            return None
        return _planned(self.job, cluster=cluster)

    def _cpu(self) -> str:
        """Return the memory of a CPU beside the devices, or instead of that of the one there is:
        last of all ways, and with its speed, which may be of hours."""
        for size in CPU_SIZES:
            cluster = _with_cpu(self.whole, size * GB)
            found = None if cluster is None else self._planned_on(cluster)
            if found is None:
                continue
            times = job_time(*found)
            steps = self.p.workload.gen_len - 1
            rate = f", then {shown(steps / times.decode_s)} tokens/s a request" if steps else ""
            return (
                f"cpu={size}GB among the devices (first token after {_wait(times.prefill_s)}{rate})"
            )
        return ""

    def _larger(self) -> str:
        """Return a machine with more memory, of those that are sold with several sizes."""
        for device in self.whole.devices:
            for sold in device.spec.sold_with:
                size = parse_size(sold)
                if device.spec.installed(size) <= device.memory_bytes:
                    continue
                if self._planned_on(_with_memory(self.whole, device, size)):
                    return f"{device.kind}={sold.replace(' ', '')} instead"
        return ""

    def _cards(self) -> str:
        """Return the fewest cards more, of a kind there is and that a machine may have more of."""
        own = [d for d in self.whole.devices if not d.spec.is_cpu and not d.spec.host_share]
        gpus = {device.kind: device.memory_bytes for device in own}
        room, step = limits.MAX_DEVICES - len(self.whole.devices), len(self.shares) or 1
        for count in range(step, min(max(MOST_CARDS, step), room) + 1, step):
            for kind in sorted(gpus, key=lambda kind: gpus[kind]):
                if self._planned_on(_with_cards(self.whole, kind, count)):
                    return f"{count} more {kind}" if count > 1 else f"one more {kind}"
        return ""

    def _said(
        self,
        bits: Precision | None = None,
        kv: KVPrecision | None = None,
        prompt_len: int | None = None,
        gen_len: int | None = None,
        batch: int | None = None,
    ) -> str:
        """Return a change as it is typed, or in words."""
        allowed = min(self.p.choices, key=lambda choice: choice.weight_bits)
        both = "" if bits is None else f"{_spelled(bits)},{_spelled(allowed)}"
        parts = {
            f"--bits {both}": f"{bits and bits.weight_bits}-bit weights",
            f"--kv {kv and kv.typed}": f"a KV cache of {kv and kv.title}",
            self._length_flag(prompt_len): f"prompts of {prompt_len} tokens",
            self._answer_flag(gen_len): f"{gen_len} tokens of answer",
            f"--batch {batch}": f"{batch} at once",
        }
        given = [value is not None for value in (bits, kv, prompt_len, gen_len, batch)]
        some = [pair for pair, is_given in zip(parts.items(), given, strict=True) if is_given]
        return (
            " ".join(f for f, _ in some) if self.names_flags else " with ".join(w for _, w in some)
        )

    def _length_flag(self, prompt_len: int | None) -> str:
        if prompt_len is None or not self.names_context:
            return f"--prompt-len {prompt_len}"
        return f"--context {prompt_len + self.p.workload.gen_len}"

    def _answer_flag(self, gen_len: int | None) -> str:
        if gen_len is None or not self.names_context:
            return f"--gen-len {gen_len}"
        return f"--context {self.p.workload.prompt_len + gen_len} --gen-len {gen_len}"


def _wait(seconds: float) -> str:
    """Return a time as people say it: `346 s`, `5.4 hours`."""
    return f"{seconds:,.0f} s" if seconds < 3600 else f"{seconds / 3600:,.1f} hours"


def _spelled(precision: Precision) -> str:
    """Return a precision as --bits takes it: `4`, `w8a8`."""
    plain = precision.activation_bits == 16
    return str(precision.weight_bits) if plain else precision.value


def _planned(p: Problem, **changes: Any) -> tuple[Problem, Assignment] | None:
    """Return a changed job and a plan of it that fits, None where none does.

    Its bytes are counted again, stage by stage; its times, which say nothing of that, are not.
    """
    found = fitting_plan(p.with_job(**changes))
    if found is None or not _holds(*found):
        return None
    with suppress(ValueError):  # a profile or an omega file that does not know a precision
        return repriced(found[0], (found[0].kv,)), found[1]
    return None


def _holds(p: Problem, a: Assignment) -> bool:
    """Whether every device holds its stage as the runtime will allocate it."""
    for position, stage in enumerate(a.stages):
        device = p.classes[stage.cls].first
        memory = assigned_memory(p, a, position, device)
        if memory.total_bytes > device.limit_bytes:
            return False
    return True


def repriced(p: Problem, kvs: Sequence[KVPrecision]) -> Problem:
    """Return a changed job with costs and guessed losses of its precisions, devices and KV bits."""
    sensitivity = p.sensitivity
    if sensitivity.indicator == "generic":
        made = generic_sensitivity(p.spec, p.choices, kvs)
        # Those known already count a checkpoint's own codes as lossless.
        weights = {**made.weights, **sensitivity.weights}
        sensitivity = made.model_copy(update={"weights": weights})
    estimate = estimate_costs(
        p.spec,
        p.cluster.devices,
        dtype=p.workload.dtype,
        precisions=p.choices,
        kvs=kvs,
        quantization=p.quantization,
    )
    costs = replace(p.costs, estimate=estimate)
    return p.with_changes(costs=costs, sensitivity=sensitivity)


def counted_plan(p: Problem, a: Assignment, *, model_path: str | None = None) -> Plan:
    """Return the checked plan of an assignment that no search has found."""
    outcome = Outcome(
        method="counted",
        status="heuristic",
        assignment=a,
        value=value(p, a),
        bound=None,
        seconds=0.0,
    )
    plan = build_plan(p, outcome, model_path=model_path)
    check_plan(plan, spec=p.spec, cluster=p.cluster, costs=p.costs)
    return plan


def _with_cpu(cluster: Cluster, memory_bytes: int) -> Cluster | None:
    """Return a cluster with a CPU of this memory on its first node; None where it has as much, or
    where its memory is the GPU's as well."""
    cpus = [device for device in cluster.devices if device.spec.is_cpu]
    if known_kind("cpu") is None or any(device.memory_bytes >= memory_bytes for device in cpus):
        return None
    node = next(n for n in cluster.nodes if not cpus or n.name == cpus[0].node)
    if any(device.spec.host_share for device in cluster.devices if device.node == node.name):
        return None
    own = [g for g in node.groups() if g.kind.lower() != "cpu"]
    kept = [g for g in node.groups() if g.kind.lower() == "cpu"][:1]
    cpu = kept[0] if kept else DeviceGroup(kind="CPU", threads=8)
    groups = (*own, cpu.model_copy(update={"memory": memory_bytes, "reserve": 0, "count": 1}))
    return _with_groups(cluster, node.name, groups)


def _with_cards(cluster: Cluster, kind: str, count: int) -> Cluster:
    """Return a cluster with more cards of a kind, on the node that has one."""
    first = next(d for d in cluster.devices if d.kind == kind)
    return _with_group_of(
        cluster,
        first,
        lambda group: group.model_copy(update={"count": group.count + count}),
    )


def _with_memory(cluster: Cluster, device: Device, size: int) -> Cluster:
    """Return a cluster with another size of memory of a device, and of those in its group."""
    larger = {"memory": size, "reserve": None}
    return _with_group_of(cluster, device, lambda group: group.model_copy(update=larger))


def _with_group_of(
    cluster: Cluster, device: Device, change: Callable[[DeviceGroup], DeviceGroup]
) -> Cluster:
    """Return a cluster in which the group that a device is of is changed."""
    groups, before = [], 0
    for group in next(n for n in cluster.nodes if n.name == device.node).groups():
        is_its = before <= device.index < before + group.count
        groups.append(change(group) if is_its else group)
        before += group.count
    return _with_groups(cluster, device.node, groups)


def _with_groups(cluster: Cluster, node: str, groups: Sequence[DeviceGroup]) -> Cluster:
    nodes = [
        n.model_copy(update={"devices": tuple(groups), "accelerators": None})
        if n.name == node
        else n
        for n in cluster.nodes
    ]
    data = cluster.model_copy(update={"nodes": tuple(nodes)}).model_dump(by_alias=True)
    data["links"]["pairs"] = []  # of devices, whose numbers change
    return Cluster.parse_data(data, where="a change that would fit")
