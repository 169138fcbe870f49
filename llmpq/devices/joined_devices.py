"""Devices of a node that share stages in tensor parallel, as one device that plans can use.

A layer has two parts that end in a sum over the devices, attention and MLP: each takes as long as
the device whose cut of it (`Member.own`) takes longest, so a group's rates are those of the whole
layer over the sum of both. Sums take 2 x (latency + 2 (n - 1) / n x bytes of a token's hidden state
/ rate). The output matrix is the first device's alone. What a group has room for is counted device
by device (planner/problem/stage_memory.py); its own memory is that of all together.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from llmpq.devices.cluster import Cluster, Device, Link
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member

HOST_LINK = Link(gbps=40, latency_us=100)
"""Sums between processes of one host over gloo, about."""
PEER_GBPS, PEER_SUM_US = 800, 3.0
"""Links from which on GPUs write to each other's memory (NVLink), and what a sum of few tokens
takes then: 2.2 to 3.9 us on two H200, in a captured step (docs/lab-book/runtime.md)."""
RATES = {
    "mem_gbps": "memory_efficiency",
    **dict.fromkeys(
        ("fp16_tflops", "fp32_tflops", "int8_tops", "fp8_tflops", "int4_tops"), "matmul_efficiency"
    ),
}
"""Rates of a device's kind -> the share of them that it reaches."""

MOST_TOGETHER = 8
"""Devices of a group that is looked for, at most."""
MOST_SETS = 40
"""Sets of devices that are looked at as groups."""

Parts = tuple[int, int]
"""Weights of attention, and of MLPs."""


def joined(cluster: Cluster, shares: Sequence[int], spec: ModelSpec) -> Cluster:
    """Return a cluster whose nodes' devices are groups of as many as there are shares.

    Neighbours make a group, even shares only of devices that are alike; those left over stay as
    they are. A CPU is divided by the shares where its node has too few CPUs for a group.
    `ValueError` where no node has a group.
    """
    devices = [
        device
        for node in cluster.nodes
        for device in _grouped(
            [one for one in cluster.devices if one.node == node.name], tuple(shares), cluster, spec
        )
    ]
    if not any(device.joined for device in devices):
        kinds = ", ".join(sorted({device.name for device in cluster.devices}))
        even, remedy = len(set(shares)) == 1, "take fewer"
        most = max(Counter(device.node for device in cluster.devices).values())
        if even and most >= len(shares):
            uneven = ":".join(["3", *"1" * (len(shares) - 1)])
            remedy += f", or say which share each has, such as {uneven}"
        raise ValueError(
            f"tensor parallel of {len(shares)} needs as many devices of one node"
            f"{' that are alike' if even else ''}, got {kinds}; {remedy}"
        )
    return cluster.grouped(devices)


def use_sets(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return how many of each kind of a node's devices may be in a group.

    Of few kinds first, of these all devices of a kind, or two, four, eight.
    """
    most = [range(min(count, MOST_TOGETHER) + 1) for count in counts]
    found = [use for use in itertools.product(*most) if 2 <= sum(use) <= MOST_TOGETHER]
    return sorted(found, key=lambda use: use_order(use, counts))


def use_order(use: Sequence[int], counts: Sequence[int]) -> tuple[object, ...]:
    """Return what sorts sets of devices."""
    size, kinds = sum(use), sum(count > 0 for count in use)
    whole = all(not own or own == count for own, count in zip(use, counts, strict=True))
    return kinds > 1, not (whole or size & (size - 1) == 0), size, [-count for count in use]


def group_kinds(devices: Sequence[Device]) -> list[tuple[str, ...]]:
    """Return the profile kinds, sorted, of the sets of a node's devices that may share stages."""
    found: dict[tuple[str, ...], None] = {}
    for counts in _kinds_of_nodes(devices):
        kinds = sorted(counts)
        for use in use_sets([counts[kind] for kind in kinds])[:MOST_SETS]:
            own = zip(kinds, use, strict=True)
            found[tuple(kind for kind, count in own for _ in range(count))] = None
    return list(found)


def default_shares(devices: Sequence[Device]) -> list[tuple[int, ...]]:
    """Return the shares by whose parts of layers those of all groups of a node's devices are known.

    Alike devices have even shares. Unlike ones may have any: those between are interpolated.
    """
    found: dict[tuple[int, ...], None] = {}
    for counts in _kinds_of_nodes(devices):
        most = min(sum(counts.values()), MOST_TOGETHER)
        if len(counts) > 1:
            found |= dict.fromkeys(((1,) * 2, (1,) * 4, (1,) * 8, (3, 1)))
        elif most > 1:
            sizes = sorted({*(n for n in (2, 4, 8) if n <= most), most})
            found |= dict.fromkeys((1,) * n for n in sizes)
    return list(found)


def _kinds_of_nodes(devices: Sequence[Device]) -> list[Counter[str]]:
    """Return how many devices of each profile kind nodes have."""
    nodes: dict[str, Counter[str]] = {}
    for device in devices:
        nodes.setdefault(device.node, Counter())[device.profile_kind] += 1
    return list(nodes.values())


def is_cut(spec: ModelSpec, shares: tuple[int, ...]) -> bool:
    """Whether every device with one of these shares has less than the whole of a layer."""
    return all(one.own.layer_params < spec.layer_params for one in members_of(spec, shares))


def crowded_notes(cluster: Cluster) -> list[str]:
    """Say which CPUs have fewer threads than the processes that share their stages."""
    found = []
    for device in cluster.devices:
        asked = sum(part.threads or 0 for part in device.joined)
        if device.threads is not None and asked > device.threads:
            has = f"{device.threads} thread{'s' * (device.threads != 1)}"
            cpu = device.joined[0].name.rpartition(".")[0]
            found.append(
                f"warning: {len(device.joined)} processes share {cpu}, which has {has}: "
                "each waits for the others' turns; a smaller tensor parallel size is quicker"
            )
    return found


def one_group(cluster: Cluster, size: int, spec: ModelSpec) -> Cluster:
    """Return the first devices that are `size` of one node and alike, as the only device."""
    whole = joined(cluster, (1,) * size, spec)
    return whole.grouped([next(device for device in whole.devices if device.joined)])


def group_of(
    cluster: Cluster, names: Sequence[str], shares: Sequence[int], spec: ModelSpec
) -> Device:
    """Return the group of devices named as in a plan; parts of a CPU are `CPU-0.0`."""
    cluster = cluster.ungrouped()
    known = {device.name for device in cluster.devices}
    whole = names[0].rpartition(".")[0]
    if names[0] not in known and whole in known:
        return _divided(cluster.device(whole), tuple(shares), spec)
    return together([cluster.device(name) for name in names], tuple(shares), cluster, spec)


def together(
    devices: Sequence[Device], shares: tuple[int, ...], cluster: Cluster, spec: ModelSpec
) -> Device:
    """Return devices of a node as one, with a part of every layer each."""
    links = [cluster.link(devices[0], other) for other in devices[1:]]
    slowest = max(links, key=lambda link: link.seconds(spec.hidden * 2))
    return _group(devices, shares, slowest, spec)


def _grouped(
    devices: Sequence[Device], shares: tuple[int, ...], cluster: Cluster, spec: ModelSpec
) -> Iterator[Device]:
    left = list(devices)
    divides = sum(device.spec.is_cpu for device in devices) < len(shares)
    while left:
        if left[0].spec.is_cpu and divides:
            yield _divided(left.pop(0), shares, spec)
            continue
        run = left[: len(shares)]
        alike = len({device.kind for device in run}) == 1
        whole = len(run) == len(shares) and len({device.spec.is_cpu for device in run}) == 1
        if whole and (alike or len(set(shares)) > 1):
            yield together(run, shares, cluster, spec)
            left = left[len(run) :]
        else:
            yield left.pop(0)


def _divided(cpu: Device, shares: tuple[int, ...], spec: ModelSpec) -> Device:
    """Return a CPU whose cores and memory processes share."""
    threads, total = cpu.threads or 1, sum(shares)
    parts = []
    for number, share in enumerate(shares):
        own = max(1, threads * share // total)
        parts.append(
            replace(
                cpu,
                name=f"{cpu.name}.{number}",
                index=cpu.index + number,
                profile_kind=f"{cpu.kind}@{own}t",
                threads=own,
                memory_bytes=cpu.memory_bytes * share // total,
                reserve_bytes=cpu.reserve_bytes * share // total,
            )
        )
    group = _group(parts, shares, HOST_LINK, spec)
    return replace(group, spec=cpu.spec, threads=cpu.threads)  # as fast as the whole CPU


def _group(
    devices: Sequence[Device], shares: tuple[int, ...], link: Link, spec: ModelSpec
) -> Device:
    first = devices[0]
    oldest = next((one for one in devices if not one.spec.drives_tensor_cores), first)
    if link.gbps >= PEER_GBPS:
        link = link.model_copy(update={"latency_us": min(link.latency_us, PEER_SUM_US)})
    parts = [weight_parts(member.own) for member in members_of(spec, shares)]
    of_spec: dict[str, object] = {
        name: min(getattr(device.spec, name) for device in devices) for name in RATES.values()
    }
    for name, efficiency in RATES.items():
        known = [getattr(device.spec, name) for device in devices]
        reached = [getattr(device.spec, efficiency) * _compute(device) for device in devices]
        of_spec[name] = None
        if None not in known:
            each = [rate * own for rate, own in zip(known, reached, strict=True)]
            of_spec[name] = _rate(weight_parts(spec), parts, each) / float(str(of_spec[efficiency]))
    memory = sum(device.limit_bytes for device in devices)
    of_spec |= {"memory": memory, "reserve": 0, "sms": None}
    kind = _kind_of([device.kind for device in devices], shares)
    measured = _kind_of([device.profile_kind for device in devices], shares)
    return Device(
        name=f"{kind}-{first.name.removeprefix(f'{first.kind}-')}",
        kind=kind,
        profile_kind=f"{measured}, {link.gbps:g} Gb/s, {link.latency_us:g} us",
        node=first.node,
        index=first.index,
        spec=oldest.spec.model_copy(update=of_spec),
        memory_bytes=memory,
        reserve_bytes=0,
        threads=None,
        emulate=None,
        joined=tuple(devices),
        shares=shares,
        sum_link=link,
    )


def _compute(device: Device) -> float:
    """Return the share of its card's SMs that a device has."""
    if device.emulate is not None and device.emulate.sms and device.spec.sms:
        return min(1.0, device.emulate.sms / device.spec.sms)
    return 1.0


def _rate(whole: Parts, parts: Sequence[Parts], rates: Sequence[float]) -> float:
    """Return the rate at which devices pass a layer: the whole over what its two parts take."""
    seconds = [max(own[at] / rate for own, rate in zip(parts, rates, strict=True)) for at in (0, 1)]
    return sum(whole) / sum(seconds)


@lru_cache(maxsize=1024)
def members_of(spec: ModelSpec, shares: tuple[int, ...]) -> tuple[Member, ...]:
    """Return what each device of a group holds."""
    return tuple(Member(spec=spec, shares=shares, index=index) for index in range(len(shares)))


@lru_cache(maxsize=4096)
def weight_parts(spec: ModelSpec) -> Parts:
    """Return the weights of attention (or another mixer) and of the MLPs, all layers' mean."""
    kinds = Counter(map(spec.of_layer, range(spec.num_layers)))
    found = [0, 0]
    for layer, count in kinds.items():
        for linear in layer.linears():
            found[linear.kind.endswith(("up", "down"))] += count * linear.num_weights
    return found[0], found[1]


def _kind_of(kinds: Sequence[str], shares: Sequence[int]) -> str:
    """Return what a group is called: `2 x A100`, or `RTX-5090 + RTX-3080 (3:1)`."""
    even = len(set(shares)) == 1
    name = f"{len(kinds)} x {kinds[0]}" if len(set(kinds)) == 1 else " + ".join(kinds)
    return name if even else f"{name} ({':'.join(map(str, shares))})"
