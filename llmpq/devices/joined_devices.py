"""Devices of a node that share stages in tensor parallel, as one device that plans can use.

A group is as fast and as large as its shares let its devices be: with shares s of rates r, the sum
of s times the least r / s; memory alike. What every device holds whole, embedding and output matrix
and the temporaries of a step, is taken off once for each. What a layer takes beside the products is
two sums over the devices: 2 x (latency + 2 (n - 1) / n x bytes of a token's hidden state / rate).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmpq.cluster import Cluster, Device, DeviceGroup, JoinedDevice, Link
from llmpq.memory import embedding_bytes
from llmpq.model_spec import ModelSpec
from llmpq.workload import CHUNK_TOKENS, Workload

HOST_LINK = Link(gbps=40, latency_us=100)
"""Sums between processes of one host over gloo, about."""
SPREAD_TOKENS = 8
"""Numbers that a token's temporaries take on every device, in hidden states, about."""


def joined(cluster: Cluster, shares: Sequence[int], spec: ModelSpec, work: Workload) -> Cluster:
    """Return a cluster whose nodes' devices are groups of as many as there are shares.

    Neighbours make a group, even shares only of devices that are alike; those left over stay as
    they are. A CPU is divided by the shares. `ValueError` where no node has a group.
    """
    nodes = []
    for node in cluster.nodes:
        own = [device for device in cluster.devices if device.node == node.name]
        groups = list(_groups(own, tuple(shares), cluster, spec, work))
        nodes.append(node.model_copy(update={"devices": tuple(groups), "accelerators": None}))
    if not any(group.joined for node in nodes for group in node.devices):
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
    # Links of whole nodes stay; those of single devices have lost their ends.
    names = {node.name for node in cluster.nodes}
    pairs = tuple(pair for pair in cluster.links.pairs if set(pair.between) <= names)
    links = cluster.links.model_copy(update={"pairs": pairs})
    return Cluster(name=cluster.name, nodes=tuple(nodes), links=links, planning=cluster.planning)


def one_group(cluster: Cluster, size: int, spec: ModelSpec, work: Workload) -> Cluster:
    """Return the first devices that are `size` of one node and alike, as the only device."""
    whole = joined(cluster, (1,) * size, spec, work)
    node, group = next((n, g) for n in whole.nodes for g in n.devices if g.joined)
    alone = node.model_copy(update={"devices": (group,)})
    links = whole.links.model_copy(update={"pairs": ()})
    return Cluster(name=cluster.name, nodes=(alone,), links=links)


def _groups(
    devices: Sequence[Device],
    shares: tuple[int, ...],
    cluster: Cluster,
    spec: ModelSpec,
    work: Workload,
) -> list[DeviceGroup]:
    found, left = [], list(devices)
    while left:
        first = left[0]
        if first.spec.is_cpu:
            found.append(_divided(left.pop(0), shares, spec, work))
            continue
        run = left[: len(shares)]
        alike = len({device.kind for device in run}) == 1
        whole = len(run) == len(shares) and not any(device.spec.is_cpu for device in run)
        if whole and (alike or len(set(shares)) > 1):
            link = cluster.link(run[0], run[1])
            found.append(_together(run, shares, link, spec, work))
            left = left[len(run) :]
        else:
            found.append(left.pop(0).alone())
    return found


def _divided(cpu: Device, shares: tuple[int, ...], spec: ModelSpec, work: Workload) -> DeviceGroup:
    """Return a CPU whose cores and memory processes share."""
    threads, total = cpu.threads or 1, sum(shares)
    members = tuple(
        JoinedDevice(
            device=f"{cpu.name}.{number}",
            index=cpu.index + number,
            kind=cpu.kind,
            profile_kind=f"{cpu.kind}@{max(1, threads * share // total)}t",
            threads=max(1, threads * share // total),
            memory=cpu.memory_bytes * share // total,
            reserve=cpu.reserve_bytes * share // total,
        )
        for number, share in enumerate(shares)
    )
    limits = [one.memory - one.reserve for one in members]
    return DeviceGroup(
        kind=_kind_of((cpu.kind,) * len(shares), shares),
        memory=_room(limits, shares, _whole_bytes(spec, work, on_gpu=False)),
        reserve=0,
        threads=threads,
        spec=cpu.spec,
        joined=members,
        shares=shares,
        sum_link=HOST_LINK,
    )


def _together(
    devices: Sequence[Device],
    shares: tuple[int, ...],
    link: Link,
    spec: ModelSpec,
    work: Workload,
) -> DeviceGroup:
    total = sum(shares)

    def least(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        return total * min(value / share for value, share in zip(known, shares, strict=True))

    specs = [device.spec for device in devices]
    rates = ("mem_gbps", "fp16_tflops", "fp32_tflops", "int8_tops", "fp8_tflops", "int4_tops")
    change: dict[str, object] = {
        name: least([getattr(one, name) for one in specs]) for name in rates
    }
    whole = _whole_bytes(spec, work, on_gpu=True) + specs[0].context
    memory = _room([device.limit_bytes for device in devices], shares, whole)
    return DeviceGroup(
        kind=_kind_of([device.kind for device in devices], shares),
        memory=memory,
        reserve=0,
        spec=specs[0].model_copy(update={**change, "memory": memory, "reserve": 0, "sms": None}),
        joined=tuple(
            JoinedDevice(
                device=device.name,
                index=device.index,
                kind=device.kind,
                profile_kind=device.profile_kind,
                sms=device.emulate.sms if device.emulate else None,
                memory=device.memory_bytes,
                reserve=device.reserve_bytes,
            )
            for device in devices
        ),
        shares=shares,
        sum_link=link,
    )


def _room(limits: Sequence[int], shares: Sequence[int], whole: int) -> int:
    """Return the memory of a group: what shared parts may take, and once what each holds whole."""
    total = sum(shares)
    parts = [(limit - whole) * total / share for limit, share in zip(limits, shares, strict=True)]
    return max(1, int(min(parts)) + whole)


def _whole_bytes(spec: ModelSpec, work: Workload, *, on_gpu: bool) -> int:
    """Return about what every device of a group holds whole."""
    width = work.dtype_bytes
    ends = embedding_bytes(spec, first=True, last=True, dtype_bytes=width, on_gpu=on_gpu)
    tokens = min(CHUNK_TOKENS, work.prompt_len) * min(work.batch, 8)
    return ends + SPREAD_TOKENS * tokens * spec.hidden * width


def _kind_of(kinds: Sequence[str], shares: Sequence[int]) -> str:
    """Return what a group is called: `2 x A100`, or `RTX-5090 + RTX-3080 (3:1)`."""
    even = len(set(shares)) == 1
    name = f"{len(kinds)} x {kinds[0]}" if len(set(kinds)) == 1 else " + ".join(kinds)
    return name if even else f"{name} ({':'.join(map(str, shares))})"
