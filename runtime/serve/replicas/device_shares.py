"""Which devices of this machine each of several engines gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.devices.cluster import Cluster, Device, DeviceGroup, Links
from llmpq.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """The devices of one engine."""

    cluster: Cluster
    gpus: tuple[int, ...]
    """Numbers of its GPUs among those that this process sees; none on CPUs."""


def shares_of(cluster: Cluster, replicas: int) -> list[DeviceShare]:
    """Return as many shares of a machine's devices, in their order; the first get what is over.

    One CPU is divided by its threads and its memory. `ValueError` where there are too few devices,
    or several machines. Links of single devices are left out: a share numbers its devices anew.
    """
    if len(cluster.nodes) > 1:
        raise ValueError(
            f"--replicas divides the devices of one machine, got {len(cluster.nodes)} nodes in "
            f"'{cluster.name}'; run one server on each of them"
        )
    devices = cluster.devices
    if len(devices) == 1 and devices[0].spec.is_cpu:
        return [_share(cluster, [device]) for device in _divided(devices[0], replicas)]
    if replicas > len(devices):
        raise ValueError(
            f"--replicas {replicas} needs as many devices, got {len(devices)} "
            f"({', '.join(device.name for device in devices)}); ask for fewer replicas"
        )
    least, over = divmod(len(devices), replicas)
    ends = [least * (i + 1) + min(i + 1, over) for i in range(replicas)]
    starts = [0, *ends[:-1]]
    return [_share(cluster, devices[a:b]) for a, b in zip(starts, ends, strict=True)]


def gpus_of_copies(plan: Plan, replicas: int, visible: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each of several copies of a plan, none for one on CPUs.

    `visible`: GPUs that this process sees. `ValueError` where there are too few, or several nodes.
    """
    nodes = {stage.node for stage in plan.stages}
    if len(nodes) > 1:
        raise ValueError(
            f"--replicas runs plans of one machine, got one of {len(nodes)} nodes; run one server "
            "on each of them, with a plan for it"
        )
    gpus = [stage.device_index for stage in plan.places if not stage.is_cpu]
    if not gpus:
        _require_cores(replicas)
        return [()] * replicas
    most = max(gpus) + 1
    if replicas * most > visible:
        raise ValueError(
            f"--replicas {replicas} of a plan for {most} GPUs need {replicas * most}, this machine "
            f"has {visible}; ask for fewer replicas"
        )
    return [tuple(range(i * most, (i + 1) * most)) for i in range(replicas)]


def _require_cores(replicas: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if replicas > (cores or 1):
        raise ValueError(
            f"--replicas {replicas} needs as many cores, this machine has {cores}; ask for fewer "
            "replicas"
        )


def _divided(cpu: Device, replicas: int) -> list[DeviceGroup]:
    """Return a CPU's parts."""
    _require_cores(replicas)
    group = cpu.alone()
    part = {
        "threads": max(1, (cpu.threads or 1) // replicas),
        "memory": cpu.memory_bytes // replicas,
        "reserve": cpu.reserve_bytes // replicas,
    }
    return [group.model_copy(update=part)] * replicas


def _share(cluster: Cluster, devices: Sequence[Device | DeviceGroup]) -> DeviceShare:
    groups = tuple(one.alone() if isinstance(one, Device) else one for one in devices)
    node = cluster.nodes[0].model_copy(update={"devices": groups, "accelerators": None})
    links = Links(between_nodes=cluster.links.between_nodes, within_node=cluster.links.within_node)
    own = cluster.model_copy(update={"nodes": (node,), "links": links})
    own = Cluster.parse_data(own.model_dump(mode="json", by_alias=True), where="a share")
    gpus = [one.index for one in devices if isinstance(one, Device) and not one.spec.is_cpu]
    return DeviceShare(cluster=own, gpus=tuple(gpus))
