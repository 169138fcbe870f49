"""Which devices there are: on this machine, in a Ray cluster, or in the shipped table.

Asks `nvidia-smi` and `/proc`, never torch; Ray is imported only for `--from-ray`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import yaml

from llmpq.commands.ray_address import import_ray, named_ray, on_loopback, require_ray, signals_kept
from llmpq.devices.card_names import card_name
from llmpq.devices.cluster import Cluster
from llmpq.devices.device_spec import device_specs, known_kind, unknown_card
from llmpq.devices.this_machine import MIB, Gpu, kind_of, read_gpus, read_host, visible
from llmpq.planner.problem.requests import ListRequest
from llmpq.units import format_size


@dataclass(frozen=True, kw_only=True)
class FoundDevices:
    """Equal devices of this machine; `kind` is None when the table does not know them."""

    reported: str
    kind: str | None
    count: int
    memory_bytes: int | None
    """None where the driver does not say: a GPU that shares the host's memory."""


def local_devices() -> list[FoundDevices]:
    """Return this machine's GPUs, or its CPU when it has none."""
    host = read_host()
    return grouped(visible(read_gpus())) or [
        FoundDevices(reported=host.reported, kind="CPU", count=1, memory_bytes=host.total_bytes)
    ]


def grouped(gpus: Sequence[Gpu]) -> list[FoundDevices]:
    """Return GPUs as entries with a count: equal neighbours become one."""
    alike = groupby(gpus, key=lambda gpu: (gpu.reported, gpu.kind, gpu.total_bytes))
    return [
        FoundDevices(reported=name, kind=kind, count=len(list(members)), memory_bytes=memory)
        for (name, kind, memory), members in alike
    ]


def cluster_yaml(found: list[FoundDevices]) -> str:
    """Return a cluster YAML of this machine to start from."""
    groups: list[dict[str, Any]] = []
    for device in found:
        if device.kind is None:
            continue
        group: dict[str, Any] = {"kind": device.kind, "count": device.count}
        if device.kind == "CPU":
            group["threads"] = read_host().threads
        if device.memory_bytes is not None:
            group["memory"] = f"{device.memory_bytes // MIB} MiB"
        groups.append(group)
    if not groups:
        raise ValueError(
            "no device here is in the table; describe it with 'spec' in a cluster YAML"
        )
    data = {"schema": 1, "name": "this-machine", "nodes": [{"name": "here", "devices": groups}]}
    return yaml.safe_dump(data, sort_keys=False)


def cluster_from_ray(address: str) -> Cluster:
    """Return the cluster of a running Ray: a node per Ray node, GPUs by accelerator type."""
    require_ray(address)
    import_ray(address)
    import ray

    try:
        named, local = named_ray(address)
        with on_loopback(local), signals_kept():
            ray.init(address=named, logging_level="ERROR", log_to_driver=False)
    except ConnectionError:
        raise ValueError(
            f"no Ray cluster at '{address}'; start one with: ray start --head, or give its address"
        ) from None
    try:
        return cluster_of_nodes(ray.nodes())
    finally:
        with signals_kept():
            ray.shutdown()


def cluster_of_nodes(nodes: list[dict[str, Any]]) -> Cluster:
    """Build a cluster from `ray.nodes()` entries."""
    described: list[dict[str, Any]] = []
    for node in nodes:
        if not node.get("Alive", False):
            continue
        resources = node.get("Resources", {})
        group: dict[str, Any]
        if resources.get("GPU"):
            types = [k.partition(":")[2] for k in resources if k.startswith("accelerator_type:")]
            kind = kind_of(types[0]) if types else None
            if kind is None:
                raise ValueError(
                    f"node {node['NodeManagerAddress']}: GPU type {types or 'not reported'} is not "
                    "in the table; write a cluster YAML with 'spec'"
                )
            group = {"kind": kind, "count": int(resources["GPU"])}
        else:
            threads = max(1, int(resources.get("CPU", 1)))
            memory = int(resources.get("memory", 0)) or int(resources.get("object_store_memory", 0))
            group = {"kind": "CPU", "threads": threads, "memory": memory}
        name = f"{node['NodeManagerAddress']}-{len(described)}"
        described.append({"name": name, "host": node["NodeManagerAddress"], "devices": [group]})
    return Cluster.parse_data({"name": "ray", "nodes": described}, where="--from-ray")


UNLIKE = (("known", "from_ray"), ("known", "yaml"), ("from_ray", "yaml"), ("json", "yaml"))
"""Flags of `llmpq-algo devices` of which one would have no effect beside the other."""


def show_devices(request: ListRequest) -> None:
    """Print the devices found (or known) as a table, JSON or a cluster YAML."""
    for one, other in UNLIKE:
        if getattr(request, one) and getattr(request, other):
            flags = f"--{one} does not go with --{other}".replace("_", "-")
            raise ValueError(f"{flags}; leave one of them out")
    if request.word is not None and (request.from_ray or request.yaml):
        flag = "--yaml" if request.yaml else "--from-ray"
        raise ValueError(f"'{request.word}' is a word of known cards' names; leave out {flag}")
    if request.known or request.word is not None:
        _show_known(request.word, as_json=request.json)
        return
    if request.from_ray:
        cluster = cluster_from_ray(request.from_ray)
        rows = [
            {"name": d.name, "node": d.node, "memory_bytes": d.memory_bytes}
            for d in cluster.devices
        ]
        text = "".join(f"{r['name']} on {r['node']}\n" for r in rows)
        sys.stdout.write(json.dumps(rows, indent=1) + "\n" if request.json else text)
        return
    found = local_devices()
    if request.yaml:
        sys.stdout.write(cluster_yaml(found))
    elif request.json:
        sys.stdout.write(json.dumps([asdict(f) for f in found], indent=1) + "\n")
    else:
        for device in found:
            known = device.kind or "not in the table: describe it with 'spec' in a cluster YAML"
            size = device.memory_bytes
            memory = "memory not reported" if size is None else format_size(size)
            sys.stdout.write(f"{device.count} x {device.reported}, {memory}: {known}\n")


def _show_known(word: str | None, *, as_json: bool) -> None:
    """Print the table of cards; of a word: those whose names have it."""
    specs = device_specs()
    if word is not None:
        core, own = card_name(word).core, known_kind(word)
        named = {kind: spec for kind, spec in specs.items() if core in card_name(kind).core}
        specs = named if named or own is None else {own: specs[own]}
        if not specs:
            raise ValueError(unknown_card(word))
    if as_json:
        rows = {kind: spec.model_dump(mode="json") for kind, spec in specs.items()}
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    for kind, spec in specs.items():
        sys.stdout.write(
            f"{kind:18s} {format_size(spec.memory):>10s} {spec.mem_gbps:6.0f} GB/s "
            f"{spec.fp16_tflops:7.1f} TFLOP/s fp16  {spec.source}\n"
        )
