"""Which model and which devices the command's flags name: files read, built-in names looked up.

Knows nothing of jobs and solvers. Every error names the flag and what to do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from llmpq.checkpoints.gguf_file import is_model
from llmpq.checkpoints.hub import local_model, require_named
from llmpq.devices.cluster import Cluster, Device, DeviceGroup, Node
from llmpq.devices.device_list import DeviceList, read_devices
from llmpq.devices.device_spec import canonical_kind, device_specs
from llmpq.devices.device_text import which_version
from llmpq.devices.this_machine import read_machine, this_machine
from llmpq.errors import nearest, shortened
from llmpq.models.model_spec import ModelSpec, builtin_configs, builtin_name
from llmpq.planner.problem import limits
from llmpq.planner.problem.requests import DevicesRequest, ModelRequest
from llmpq.planner.problem.stored_precisions import Source
from llmpq.plans.gpu_memory import cluster_within, with_groups
from llmpq.plans.plan import Plan
from llmpq.units import format_size, parse_size


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model that flags name."""

    spec: ModelSpec
    path: str | None
    """Its directory or GGUF file, or its name on the hub; None of a built-in one."""
    source: Source
    """What says how it is stored: files of this machine, or a built-in config."""


def read_model(request: ModelRequest) -> NamedModel:
    """Return the model that flags name; `ValueError` says what to type instead."""
    if request.model and (request.model_name or request.model_size):
        raise ValueError("give either --model or --model-name with --model-size, not both")
    if request.model_name:
        return _builtin(request.model_name, request.model_size)
    if request.model is None:
        raise ValueError("--model is missing: a Hugging Face directory, or a name such as opt-30b")
    require_named(request.model)
    if is_model(request.model):
        path = str(request.model)
        return NamedModel(spec=ModelSpec.from_directory(path), path=path, source=path)
    if request.model.endswith(".gguf"):
        raise ValueError(f"no such file: '{shortened(request.model)}'; expected a GGUF file")
    is_path = "/" in request.model or os.path.isfile(request.model)
    if is_path and builtin_name(request.model) is None:
        return _of_hub(request.model)
    return _builtin(request.model)


def _builtin(name: str, size: str | None = None) -> NamedModel:
    spec = ModelSpec.by_name(name, size)
    return NamedModel(spec=spec, path=None, source=builtin_configs()[spec.name])


def _of_hub(name: str) -> NamedModel:
    """Return a model of Hugging Face's hub by its config.json, and its name there."""
    try:
        folder = str(local_model(name, config_only=True))
        return NamedModel(spec=ModelSpec.from_directory(folder), path=name, source=folder)
    except ValueError as error:
        short = name.rstrip("/").rsplit("/", 1)[-1]
        hint = nearest(short, builtin_configs()).strip()
        raise ValueError(f"{error}; or a built-in model: {hint}" if hint else str(error)) from None


def model_of_plan(request: ModelRequest, plan: Plan) -> ModelSpec:
    """Return the model a plan is for: as named, else by the plan's own path or name."""
    if request.model or request.model_name or request.model_size:
        spec = read_model(request).spec
    elif plan.model.path and is_model(plan.model.path):
        spec = ModelSpec.from_directory(plan.model.path)
    elif plan.inputs is not None:
        spec = plan.inputs.model
    elif plan.model.name in builtin_configs():
        spec = ModelSpec.by_name(plan.model.name)
    else:
        raise ValueError(f"the plan's model '{plan.model.name}' is not here; give --model DIR")
    plan.require_model(spec)
    return spec


def names_devices(request: DevicesRequest) -> bool:
    """Whether any flag says which devices there are."""
    ways = (
        request.devices,
        request.cluster,
        request.device_names,
        request.device_numbers,
        request.from_ray,
    )
    return any(way is not None for way in ways)


def read_cluster(request: DevicesRequest) -> Cluster:
    """Return the cluster, with `--reserve` taken off every device."""
    return read_devices_of(request).cluster


def read_devices_of(request: DevicesRequest) -> DeviceList:
    """Return the cluster, and what is assumed of its devices."""
    found = _named_devices(request)
    reserve = getattr(request, "reserve", None)
    share = getattr(request, "gpu_memory_utilization", None)
    if reserve is not None:
        found = replace(found, cluster=with_reserve(found.cluster, _reserve_bytes(reserve)))
    elif share is None:
        found = replace(found, assumptions=(*found.assumptions, *_left_free(found.cluster)))
    return replace(found, cluster=cluster_within(found.cluster, share))


def _named_devices(request: DevicesRequest) -> DeviceList:
    if request.device_numbers and not request.device_names:
        raise ValueError(
            "--device-numbers does nothing without --device-names; add it or leave "
            "--device-numbers out"
        )
    ways = (request.devices, request.cluster, request.device_names, request.from_ray)
    if sum(way is not None for way in ways) > 1:
        raise ValueError(
            "give the devices in one way: --devices 4090,3090:2,cpu, --cluster FILE, "
            "--device-names with --device-numbers, or --from-ray"
        )
    if request.devices is not None:
        return read_devices(request.devices, machine=read_machine())
    if request.from_ray:
        from llmpq.planner.problem.discovery import cluster_from_ray

        cluster = cluster_from_ray(request.from_ray)
    elif request.device_names:
        numbers = request.device_numbers or ()
        for name, number in zip(request.device_names, numbers, strict=False):
            limits.whole(f"--device-numbers: {name}", number, limits.MAX_DEVICES)
        cluster = Cluster.from_counts(request.device_names, numbers)
    else:
        cluster = this_machine() if request.cluster is None else Cluster.load(request.cluster)
    return DeviceList(cluster, (*_versions(cluster), *_open_cpus(cluster)))


def _versions(cluster: Cluster) -> list[str]:
    """Say which of several cards of a name a cluster's groups mean, where the name leaves it."""
    named = (
        group.kind
        for node in cluster.nodes
        for group in node.groups()
        if group.memory is None and group.spec is None
    )
    return [
        line for name in dict.fromkeys(named) for line in which_version(name, canonical_kind(name))
    ]


def _open_cpus(cluster: Cluster) -> list[str]:
    """Say what a cluster's CPUs are taken to have, where their groups leave it open."""
    lines = []
    for node in cluster.nodes:
        for group in node.groups():
            if group.spec is not None or not device_specs()[canonical_kind(group.kind)].is_cpu:
                continue
            threads = "" if group.threads is not None else "1 thread"
            memory = device_specs()[canonical_kind(group.kind)].memory
            size = "" if group.memory is not None else f"{format_size(memory)} of memory"
            taken = [said for said in (threads, size) if said]
            if taken:
                lines.append(f"{node.name}: cpu has {', '.join(taken)}; or say threads and memory")
    return list(dict.fromkeys(lines))


def _left_free(cluster: Cluster) -> list[str]:
    """Say which devices' memory is left free by default, and whose."""
    screens: dict[str, int] = {}
    lines = []
    groups = [group for node in cluster.nodes for group in node.groups() if group.reserve is None]
    for device in cluster.devices:
        if not device.reserve_bytes or not any(_is_of(device, group) for group in groups):
            continue
        size = format_size(device.reserve_bytes)
        if device.spec.host_share is not None:
            whole = format_size(device.memory_bytes)
            lines.append(f"{size} of the {whole} that {device.kind} shares with the host stay free")
        else:
            screens[device.kind] = device.reserve_bytes
    if screens:
        size = format_size(max(screens.values()))
        one = next(device for device in cluster.devices if device.kind in screens)
        less = f"to plan with less of one card: {one.kind}={one.memory_bytes / 1e9 - 2:.0f}GB"
        cards = ", ".join(screens)
        lines.append(f"{size} of {cards} stay free for a screen (--reserve 0: none; {less})")
    return list(dict.fromkeys(lines))


def _is_of(device: Device, group: DeviceGroup) -> bool:
    """Whether a device may be of a group."""
    kind = group.kind if group.spec is not None else canonical_kind(group.kind)
    return device.kind == kind


def _reserve_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"--reserve: {error}") from None


def with_reserve(cluster: Cluster, extra_bytes: int) -> Cluster:
    """Return the cluster with this much memory left free on every device.

    It comes on top of what a cluster states to be in use and of the host's share of memory in
    common, and replaces what would be left to a screen.
    """
    taken = {
        device.kind: device.spec.default_reserve(device.memory_bytes)
        for device in cluster.devices
        if device.spec.host_share is not None
    }

    def with_more(_: Node, group: DeviceGroup) -> DeviceGroup:
        kind = group.kind if group.spec is not None else canonical_kind(group.kind)
        own = taken.get(kind, 0) if group.reserve is None else group.reserve
        return group.model_copy(update={"reserve": own + extra_bytes})

    return with_groups(cluster, with_more, where="--reserve")
