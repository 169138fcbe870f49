"""The devices of this machine as a cluster: what the driver and the system report, never torch.

GPUs where there are any (those of CUDA_VISIBLE_DEVICES, if it is set), else the cores this process
may use. Memory and cores that others use now are left to them.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.devices.cluster import Cluster
from llmpq.devices.device_spec import device_specs, known_kind

MIB, GIB = 2**20, 2**30
NAME, NODE = "this-machine", "here"
"""The names of this machine's cluster and of its one node: no other machine's node is so called."""
QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version", "compute_cap")
"""What nvidia-smi is asked, in the order of `Gpu`'s fields."""
SMI_S = 20.0
_ROUNDED_TO = 256 * MIB
"""Memory in use counts in such steps: cards that differ by less are alike to the planner."""
_THREAD_BYTES = 64 * MIB
"""Weights that keep a thread busy in a step: threads that have less wait for each other, for long
where cores are shared (7M parameters, two threads on two busy cores: 20 times one thread's time).
"""
_GUESS = {"mem_gbps": 300, "fp16_tflops": 50, "context": "0.5 GiB"}
"""Rates of a GPU that is not in the table: those of a small card."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as the driver reports it."""

    index: int
    uuid: str
    reported: str
    total_bytes: int | None
    """None where the driver does not say: a GPU that shares the host's memory."""
    free_bytes: int | None
    driver: str
    capability: str

    @property
    def kind(self) -> str | None:
        """The table's name of it, None where the table has none."""
        return kind_of(self.reported, self.total_bytes)


@dataclass(frozen=True, kw_only=True)
class Host:
    """The cores and memory that this process may use."""

    reported: str
    cores: int
    """Cores that this process may use."""
    threads: int
    """Cores that are not busy now, one at least: more threads than that wait for each other."""
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class MachineDevices:
    """What this machine has."""

    gpus: tuple[Gpu, ...]
    host: Host

    def has(self, kinds: Sequence[str]) -> bool:
        """Whether it has these GPUs, named as in the table, one for each name."""
        own = Counter(gpu.kind for gpu in self.gpus)
        return all(own[kind] >= count for kind, count in Counter(kinds).items())


def read_machine() -> MachineDevices:
    """Return this machine's visible GPUs and its host."""
    return MachineDevices(gpus=tuple(visible(read_gpus())), host=read_host())


def is_this_machine(cluster: Cluster) -> bool:
    """Whether a cluster's devices are this machine's."""
    return cluster.name == NAME or all(node.name == NODE for node in cluster.nodes)


def this_machine() -> Cluster:
    """Return this machine's GPUs, or its CPU when it has none, as a cluster."""
    machine = read_machine()
    host = machine.host
    groups = [gpu_group(gpu, host) for gpu in machine.gpus] or [cpu_group(host)]
    node = {"name": NODE, "devices": groups}
    return Cluster.parse_data({"schema": 1, "name": NAME, "nodes": [node]}, where="this machine")


def assumed(cluster: Cluster) -> list[str]:
    """Return what was assumed of devices that are not in the table."""
    guessed = f"{_GUESS['mem_gbps']} GB/s and {_GUESS['fp16_tflops']} TFLOP/s"
    # A group's kind ("2 x CPU") is in no table; its members' are.
    kinds = {device.kind for device in cluster.ungrouped().devices} - set(device_specs())
    return [f"'{kind}' is not in the table of cards: {guessed} are assumed" for kind in kinds]


def read_gpus() -> list[Gpu]:
    """Return what nvidia-smi reports; nothing where there is no driver."""
    query = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_S, check=False)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[Gpu]:
    """Read nvidia-smi's lines, one GPU each."""
    found = []
    for line in text.strip().splitlines():
        index, uuid, name, total, free, driver, capability = (x.strip() for x in line.split(","))
        found.append(
            Gpu(
                index=int(index),
                uuid=uuid,
                reported=name,
                total_bytes=int(total) * MIB if total.isdigit() else None,
                free_bytes=int(free) * MIB if free.isdigit() else None,
                driver=driver,
                capability=capability,
            )
        )
    return found


def visible(gpus: Sequence[Gpu], wanted: str | None = None) -> list[Gpu]:
    """Return the GPUs that CUDA programs started here see, in their order.

    `wanted` stands for CUDA_VISIBLE_DEVICES: numbers or the beginnings of UUIDs; what follows a
    name that is none of a GPU's is not seen.
    """
    if wanted is None:
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus)
    found = []
    for name in (part.strip() for part in wanted.split(",")):
        match = [g for g in gpus if name and (name == str(g.index) or g.uuid.startswith(name))]
        if len(match) != 1:
            break
        found += match
    return found


def kind_of(reported: str, memory_bytes: int | None = None) -> str | None:
    """Return the table's kind for a driver's or Ray's name; the memory tells versions apart."""
    return known_kind(reported, memory_bytes) or known_kind(reported.split(" (")[0], memory_bytes)


def read_host() -> Host:
    """Return the host's processor, and the cores and memory that this process may use."""
    total, free = host_memory()
    limit, used = _group_memory()
    if limit is not None and limit < total:
        total, free = limit, min(free, max(0, limit - used))
    cores = usable_cores()
    return Host(
        reported=processor_name(),
        cores=cores,
        threads=free_cores(cores, os.getloadavg()[0]),
        total_bytes=total,
        free_bytes=free,
    )


def free_cores(cores: int, load: float) -> int:
    """Return how many of the cores are not busy, one at least; `load`: tasks that want one."""
    return max(1, cores - round(load))


def host_memory() -> tuple[int, int]:
    """Return total and available memory of the host; without /proc all counts as available."""
    path = Path("/proc/meminfo")
    if not path.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    total, free = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    return total, free


def useful_threads(threads: int, weight_bytes: int, rows: int = 1) -> int:
    """Return how many of a host's threads a model keeps busy whose steps have so many rows.

    examples/demo-7m, ms a step and a prefill of 128 tokens a row, one thread / two: one row 3.8 /
    5.2, 17 / 14; 16 rows 12 / 8, 250 / 125.
    """
    return min(threads, 1 + weight_bytes * max(1, rows // 4) // _THREAD_BYTES)


def usable_cores() -> int:
    """Return the cores that this process may use: its affinity's, within its container's quota."""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    cores = len(own) or os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return min(cores, max(1, int(quota) // int(period))) if quota.isdigit() else cores


def _group_memory() -> tuple[int | None, int]:
    """Return the memory limit of this container (cgroup v2) and what of it is used."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None, 0
    return (int(limit), used) if limit.isdigit() else (None, used)


def processor_name() -> str:
    """Return the processor as the system reports it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def gpu_group(gpu: Gpu, host: Host) -> dict[str, Any]:
    """Return a GPU, and what others hold of its memory now, as a device group of a cluster."""
    total = gpu.total_bytes if gpu.total_bytes is not None else host.total_bytes
    free = gpu.free_bytes if gpu.free_bytes is not None else host.free_bytes
    group: dict[str, Any] = {"kind": gpu.kind, "memory": total, "reserve": _in_use(total, free)}
    if gpu.kind is None:
        capability = gpu.capability if gpu.capability[:1].isdigit() else None
        spec = {"memory": total, "capability": capability or "0.0", "source": "a guess", **_GUESS}
        group |= {"kind": gpu.reported, "spec": spec}
    return group


def cpu_group(host: Host) -> dict[str, Any]:
    """Return the host's free cores and memory as a device group of a cluster."""
    total = host.total_bytes
    reserve = _in_use(total, host.free_bytes)
    return {"kind": "CPU", "threads": host.threads, "memory": total, "reserve": reserve}


def _in_use(total: int, free: int) -> int:
    """Return the memory that others use, rounded up, of which something must be left."""
    return min(-(-(total - free) // _ROUNDED_TO) * _ROUNDED_TO, total - MIB)
