"""The cluster of devices said in one text: `4090,3090:2,cpu` (device_text.py), without a YAML.

Devices that this machine has are this machine's: `cpu` is then its cores and memory. What the text
leaves open of others is assumed, and `assumptions` says what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.devices.cluster import Cluster, Links
from llmpq.devices.device_spec import device_specs
from llmpq.devices.device_text import CPU_THREADS, MAX_COUNT, groups_of_text
from llmpq.devices.this_machine import MIB, NODE, Host, MachineDevices, cpu_group, gpu_group
from llmpq.units import format_size

ELSEWHERE = "machine"
"""Name of the node of devices that are not this machine's."""


@dataclass(frozen=True)
class DeviceList:
    """The cluster that a text describes, and what was assumed for what it leaves open."""

    cluster: Cluster
    assumptions: tuple[str, ...]


def read_devices(
    text: str, *, machine: MachineDevices | None = None, where: str = "--devices"
) -> DeviceList:
    """Read `4090,3090:2,cpu`: devices of one machine; `ValueError` offers the nearest names.

    `machine`: this one. The devices are taken to be its own where it has all of them.
    """
    groups, assumed = [], []
    for group, notes in groups_of_text(text, where):
        groups.append(group)
        assumed += notes
    if not groups:
        raise ValueError(f"{where} is empty, expected devices such as 4090,3090:2,cpu")
    here = machine is not None and _has(machine, groups)
    host = machine.host if machine is not None and here else None
    assumed += _complete_cpus([group for group in groups if _is_cpu(group)], host)
    counts = [f"{g['kind']}:{g['count']}" if g["count"] > 1 else g["kind"] for g in groups]
    if machine is not None and here:
        groups, in_use = _as_they_are(groups, machine)
        assumed += in_use
    node = {"name": NODE if here else ELSEWHERE, "devices": groups}
    data = {"name": ",".join(counts), "nodes": [node]}
    cluster = Cluster.parse_data(data, where=where)
    if len(cluster.devices) > MAX_COUNT:
        raise ValueError(
            f"{where}: got {len(cluster.devices):,} devices, expected at most {MAX_COUNT:,}"
        )
    return DeviceList(cluster, (*_machine(cluster), *filter(None, dict.fromkeys(assumed))))


def _has(machine: MachineDevices, groups: list[dict[str, Any]]) -> bool:
    """Whether the groups are a machine's devices: its GPUs, and no more cores than it has."""
    cpus = [group for group in groups if _is_cpu(group)]
    gpus = [group for group in groups if not _is_cpu(group)]
    stated = sum(group["count"] * group.get("threads", 1) for group in cpus)
    memory = sum(group["count"] * group.get("memory", 0) for group in cpus)
    return (
        machine.has([kind for group in gpus for kind in [group["kind"]] * group["count"]])
        and stated <= machine.host.cores
        and memory <= machine.host.total_bytes
        and not any("spec" in group for group in groups)
    )


def _as_they_are(
    groups: list[dict[str, Any]], machine: MachineDevices
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the groups with the memory that this machine's GPUs have free, and notes of the rest.

    A group that states its memory stays as stated.
    """
    left = list(machine.gpus)
    found: list[dict[str, Any]] = []
    notes = []
    for group in groups:
        own = [gpu for gpu in left if gpu.kind == group["kind"]][: group["count"]]
        left = [gpu for gpu in left if gpu not in own]
        if "memory" in group or not own:
            found.append(group)
            continue
        for gpu in own:
            measured = gpu_group(gpu, machine.host)
            if measured["reserve"]:
                size = format_size(measured["reserve"])
                notes.append(f"{size} of {gpu.kind} (GPU {gpu.index}) are in use now")
            if found and {**found[-1], "count": 1} == {**measured, "count": 1}:
                found[-1]["count"] += 1
            else:
                found.append({**measured, "count": 1})
    return found, notes


def _is_cpu(group: dict[str, Any]) -> bool:
    spec = device_specs().get(group["kind"])
    return spec is not None and spec.is_cpu


def _machine(cluster: Cluster) -> Iterator[str]:
    """Yield what is assumed of the machine as a whole."""
    link = Links().within_node
    if len(cluster.devices) > 1:
        yield (
            f"one machine, {link.gbps:g} Gb/s and {link.latency_us:g} us between any two devices "
            "(as PCIe 4.0 x4); describe other links or several machines in a cluster YAML"
        )


def _complete_cpus(groups: Sequence[dict[str, Any]], host: Host | None) -> list[str]:
    """Fill in what a text leaves open of its `cpu`s, from this machine's host or by assumption.

    Groups that state nothing share equally what the others leave of the host. Returns a note a
    group of what was filled in.
    """
    count = sum(group["count"] for group in groups)
    each = "cpu" if count == 1 else f"each of {count} cpu devices"
    shares: dict[str, int] = {}
    for key, whole in (cpu_group(host) if host is not None and groups else {}).items():
        if key in ("threads", "memory", "reserve"):
            sharing = [g for g in groups if ("threads" if key == "threads" else "memory") not in g]
            stated = sum(group["count"] * group.get(key, 0) for group in groups)
            shares[key] = max(0, whole - stated) // max(1, sum(g["count"] for g in sharing))
    return [_complete_cpu(group, each, shares) for group in groups]


def _complete_cpu(group: dict[str, Any], each: str, shares: Mapping[str, int]) -> str:
    """Fill in one group and return the note; `shares`: of this machine's host, empty elsewhere."""
    spec = device_specs()[group["kind"]]
    example = "cpu=64GB+60GB/s+16threads"
    speed = [] if "spec" in group else [f"{spec.mem_gbps:g} GB/s"]
    taken = {"threads": CPU_THREADS, "memory": spec.memory}
    if shares:
        memory = max(2 * MIB, shares["memory"])
        taken = {"threads": max(1, shares["threads"]), "memory": memory}
        if "memory" not in group:
            taken["reserve"] = min(shares["reserve"], memory - MIB)
    open_facts = {key: value for key, value in taken.items() if key not in group}
    group |= open_facts
    threads = group["threads"]
    shown = [f"{threads} thread{'s' * (threads > 1)}"] if "threads" in open_facts else []
    if "memory" in open_facts:
        free = group["memory"] - group.get("reserve", 0)
        shown.append(f"{format_size(free)} of memory")
    if not shown and not speed:
        return ""
    if not shares:
        return f"{each} has {', '.join(shown + speed)}; or say {example}"
    own = f"{each} is this machine's: {', '.join(shown)} free; " if shown else ""
    return own + (f"it reads {speed[0]} unless measured" if speed else "")
