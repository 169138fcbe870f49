"""Groups of a node's devices that may share stages in tensor parallel, beside the devices alone.

A group is another device to plan with, which uses up those that it is of. Alike devices of a group
have equal shares; unlike ones those that are best for something: reading, products, or room. A
group that is at most as good as another of the same devices in all three is left out.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmpq.devices.cluster import Device
from llmpq.devices.joined_devices import (
    MOST_SETS,
    group_of,
    is_cut,
    members_of,
    together,
    use_order,
    use_sets,
)
from llmpq.models.tensor_parallel import Member
from llmpq.planner.costs.group_costs import has_parts, with_groups_measured
from llmpq.planner.costs.roofline import estimate_costs
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.count_vectors import Place, count_vectors
from llmpq.precision import KVPrecision

MOST_SHARE = 8
"""The largest share, the smallest being 1."""
MOST_WITH_GROUPS = 400
"""Engines up to which groups are added."""
BEST_SHARES = 3
"""Ways to share that are kept for a set of unlike devices."""


Measures = tuple[float, float, float]
"""Of a group: rates of reading and of products, and room for layers."""


@dataclass(frozen=True, kw_only=True)
class WithGroups:
    """A problem whose devices are groups, too."""

    problem: Problem
    left_out: int
    """Sets of devices that were not looked at, for there would be too many engines."""


def with_groups(p: Problem, kvs: Sequence[KVPrecision]) -> WithGroups | None:
    """Return the problem with groups among its devices; None where none can be.

    Of devices with measured costs those of which parts of layers are measured, too; of others those
    whose are all estimated: an estimate is not compared with measured times.
    """
    counts = [cls.count for cls in p.classes]
    if not may_group(p):
        return None
    kept: list[Device] = []
    uses: list[tuple[int, ...]] = []
    sets = _sets(p)
    left_out = max(0, len(sets) - MOST_SETS)
    for use in sets[:MOST_SETS]:
        for shares in _ways(p, use):
            if count_vectors(counts, [*uses, use], MOST_WITH_GROUPS) is None:
                left_out += 1
                break
            uses.append(use)
            kept += _disjoint(p, use, shares)
    if not kept:
        return WithGroups(problem=p, left_out=left_out)
    whole = _among(p, [*p.cluster.devices, *kept], kvs)
    return WithGroups(problem=whole, left_out=left_out)


def may_group(p: Problem) -> bool:
    """Whether devices of a problem may share stages."""
    plain = p.objective == "makespan" and p.group == 1 and not p.pins and p.max_devices is None
    if not plain or any(device.joined for device in p.cluster.devices):
        return False
    pair = Member(spec=p.spec, shares=(1, 1), index=0)
    return (pair.heads is not None or pair.cuts_mlps) and next(_may_join(p), None) is not None


def _may_join(p: Problem) -> Iterator[int]:
    """Yield the classes whose devices may be in groups with another one.

    None of CPUs, and none that share the memory of their host: these are machines by themselves,
    unless their sums are measured. Of measured ones those of which parts of layers were.
    """
    profile = p.costs.profile
    summed = set[str]() if profile is None else {kind for s in profile.sums for kind in s.kinds}

    def can(device: Device) -> bool:
        if device.spec.export_only is not None:
            return False
        measured, kind = p.costs.measures(device), device.profile_kind
        if measured and kind in summed:
            return True
        if measured and (profile is None or kind not in profile.kinds_with_parts):
            return False
        return not device.spec.is_cpu and device.spec.host_share is None

    def place(device: Device) -> tuple[str, bool]:
        return device.node, p.costs.measures(device)  # both sorts share no stage

    able = Counter(place(device) for device in p.cluster.devices if can(device))
    for number, cls in enumerate(p.classes):
        on_one_node = len({device.node for device in cls.devices}) == 1
        if on_one_node and can(cls.first) and able[place(cls.first)] > 1:
            yield number


def _sets(p: Problem) -> list[tuple[int, ...]]:
    """Return how many devices of each class a group may have.

    Those that use few kinds of devices first, of these the ones of two, four or all.
    """
    nodes: dict[str, list[int]] = {}
    for number in _may_join(p):
        nodes.setdefault(p.classes[number].first.node, []).append(number)
    found: list[tuple[int, ...]] = []
    for own in nodes.values():
        for chosen in use_sets([p.classes[c].count for c in own]):
            of_class = dict(zip(own, chosen, strict=True))
            found.append(tuple(of_class.get(c, 0) for c in range(len(p.classes))))
    counts = [cls.count for cls in p.classes]
    return sorted(found, key=lambda use: use_order(use, counts))


def _ways(p: Problem, use: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shares of one device of each class that are worth trying; even ones of one."""
    own = [c for c, count in enumerate(use) if count]
    if not _agree(p, _of(p, use, _by_class(use, (1,) * len(own)))):
        return []
    if len(own) == 1:
        group = _of(p, use, _by_class(use, (1,)))
        return [_by_class(use, (1,))] if _is_cut(p, group) else []
    tried: dict[Measures, tuple[int, ...]] = {}
    for shares in _tried(p, own):
        by_class = _by_class(use, shares)
        group = _of(p, use, by_class)
        if _is_cut(p, group):
            tried.setdefault(_measures(p, group), by_class)
    best = [key for key in tried if not any(o != key and _as_good(o, key) for o in tried)]
    if len(best) > BEST_SHARES:  # the quickest to read, to multiply, and the roomiest
        best = list(dict.fromkeys(max(best, key=lambda key: key[at]) for at in range(3)))
    found = [tried[key] for key in best]
    even = _by_class(use, (1,) * len(own))
    if _is_whole(p, use) and even in tried.values() and even not in found:
        found.append(even)
    return found


def is_even(p: Problem, group: Device) -> bool:
    """Whether the devices of a group have the same of every layer: heads go into equal parts."""
    heads = {member.heads and len(member.heads) for member in members_of(p.spec, group.shares)}
    return len(set(group.shares)) == 1 and len(heads) == 1


def _agree(p: Problem, group: Device) -> bool:
    """Whether a group's layers are as its devices' are: all measured, or all estimated."""
    own = list(map(p.costs.measures, group.joined))
    return has_parts(p.costs.profile, group, p.spec) if all(own) else not any(own)


def _tried(p: Problem, own: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the shares of a device of each of these classes that are looked at.

    All of two classes; of more those in proportion to a rate or to memory.
    """
    if len(own) == 2:
        pairs = itertools.product(range(1, MOST_SHARE + 1), repeat=2)
        yield from (pair for pair in pairs if math.gcd(*pair) == 1)
        return
    firsts = [p.classes[c].first for c in own]
    seen = {(1,) * len(own)}
    yield from seen
    for measure in (
        [one.spec.mem_gbps for one in firsts],
        [one.spec.fp16_tflops for one in firsts],
        [float(one.limit_bytes) for one in firsts],
    ):
        for largest in range(2, MOST_SHARE + 1):
            scaled = [max(1, round(largest * one / max(measure))) for one in measure]
            shares = tuple(one // math.gcd(*scaled) for one in scaled)
            if shares not in seen:
                seen.add(shares)
                yield shares


def _is_whole(p: Problem, use: Sequence[int]) -> bool:
    """Whether these are all of a node's devices that may be in a group."""
    nodes = {p.classes[c].first.node for c, count in enumerate(use) if count}
    return all(
        use[c] == p.classes[c].count for c in _may_join(p) if p.classes[c].first.node in nodes
    )


def _by_class(use: Sequence[int], shares: Sequence[int]) -> tuple[int, ...]:
    left = list(shares)
    return tuple(left.pop(0) if count else 0 for count in use)


def _is_cut(p: Problem, group: Device) -> bool:
    """Whether every device has less than the whole of a layer, and can store its part."""
    members, outliers = members_of(p.spec, group.shares), p.quantization.outliers
    return is_cut(p.spec, group.shares) and all(m.has_few_bits(outliers) for m in members)


def _measures(p: Problem, group: Device) -> Measures:
    """Return what a group is good for: reading, products, and room for layers."""
    rooms = [
        device.limit_bytes / member.own.layer_params
        for device, member in zip(group.joined, members_of(p.spec, group.shares), strict=True)
    ]
    return group.spec.mem_gbps, group.spec.fp16_tflops, min(rooms)


def _as_good(one: Measures, other: Measures) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))


def _of(p: Problem, use: Sequence[int], shares: Sequence[int], copy: int = 0) -> Device:
    """Return a group of the next devices of each class; the one with most room leads."""
    members = [
        (device, share)
        for cls, count, share in zip(p.classes, use, shares, strict=True)
        for device in cls.devices[copy * count : (copy + 1) * count]
    ]
    members.sort(key=lambda pair: (-pair[0].spec.mem_gbps, -pair[0].limit_bytes))
    devices, parts = zip(*members, strict=True)
    return together(devices, parts, p.cluster, p.spec)


def _disjoint(p: Problem, use: Sequence[int], shares: Sequence[int]) -> list[Device]:
    copies = min(cls.count // count for cls, count in zip(p.classes, use, strict=True) if count)
    return [_of(p, use, shares, copy) for copy in range(copies)]


def _among(p: Problem, devices: Sequence[Device], kvs: Sequence[KVPrecision]) -> Problem:
    """Return the problem on these devices, with the costs of the groups among them."""
    known = {entry.device_kind for entry in p.costs.estimate.entries}
    groups = [d for d in devices if d.joined and d.profile_kind not in known]
    estimate = p.costs.estimate
    profile = with_groups_measured(p.costs.profile, groups, p.spec)
    if groups:
        estimate = estimate.merged(
            estimate_costs(
                p.spec,
                groups,
                dtype=p.workload.dtype,
                precisions=p.choices,
                kvs=kvs or (p.kv,),
                quantization=p.quantization,
            )
        )
    return p.with_changes(
        cluster=p.cluster.grouped(devices),
        costs=replace(p.costs, estimate=estimate, profile=profile),
    )


def on_places(p: Problem, places: Sequence[Place], kvs: Sequence[KVPrecision]) -> Problem:
    """Return the problem on devices and groups of them, given by name."""
    names = [place for place in places if isinstance(place, str)]
    if len(names) == len(places):
        return p.part(names)
    devices = [
        p.cluster.device(place)
        if isinstance(place, str)
        else group_of(p.cluster, place[0], place[1], p.spec)
        for place in places
    ]
    return _among(p, devices, kvs)


def with_places(
    p: Problem, engines: Sequence[Sequence[Place]], kvs: Sequence[KVPrecision]
) -> Problem:
    """Return the problem whose devices are grouped as engines have them, and the others alone."""
    places = [place for own in engines for place in own]
    grouped = {name for place in places if not isinstance(place, str) for name in place[0]}
    others = [d.name for d in p.cluster.devices if d.name not in grouped]
    return on_places(p, [*(one for one in places if not isinstance(one, str)), *others], kvs)
