"""Which model and which devices the command's flags name: files read, built-in names looked up.

Knows nothing of jobs and solvers. Every error names the flag and what to do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llmpq.cluster import Cluster
from llmpq.device_list import read_devices
from llmpq.errors import nearest, shortened
from llmpq.model_spec import ModelSpec, builtin_configs, builtin_name
from llmpq.plan import Plan
from llmpq.planner import limits
from llmpq.this_machine import this_machine
from llmpq.units import parse_size


def read_model(args: argparse.Namespace) -> tuple[ModelSpec, str | None]:
    """Return the model and the directory it was read from."""
    if args.model and (args.model_name or args.model_size):
        raise ValueError("give either --model or --model-name with --model-size, not both")
    if args.model_name:
        return ModelSpec.by_name(args.model_name, args.model_size), None
    if not args.model:
        raise ValueError("--model is missing: a Hugging Face directory, or a name such as opt-30b")
    if _is_directory(args.model):
        return ModelSpec.from_directory(args.model), str(args.model)
    if "/" in args.model and builtin_name(args.model) is None:
        short = args.model.rstrip("/").rsplit("/", 1)[-1]
        hint = nearest(short, builtin_configs()).strip()
        wrong = f"no such model directory: '{shortened(args.model)}'"
        raise ValueError(f"{wrong}; no built-in model has this name: {hint}" if hint else wrong)
    return ModelSpec.by_name(args.model), None


def _is_directory(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return False


def model_of_plan(args: argparse.Namespace, plan: Plan) -> ModelSpec:
    """Return the model a plan is for: as told, else by the plan's own path or name."""
    if args.model or args.model_name or args.model_size:
        spec, _ = read_model(args)
    elif plan.model.path and Path(plan.model.path).is_dir():
        spec = ModelSpec.from_directory(plan.model.path)
    elif plan.inputs is not None:
        spec = plan.inputs.model
    elif plan.model.name in builtin_configs():
        spec = ModelSpec.by_name(plan.model.name)
    else:
        raise ValueError(f"the plan's model '{plan.model.name}' is not here; give --model DIR")
    plan.require_model(spec)
    return spec


def names_devices(args: argparse.Namespace) -> bool:
    """Whether any flag says which devices there are."""
    ways = (args.devices, args.cluster, args.device_names, args.device_numbers, args.from_ray)
    return any(way is not None for way in ways)


def read_cluster(args: argparse.Namespace) -> Cluster:
    """Return the cluster, with `--reserve` taken off every device."""
    if args.device_numbers and not args.device_names:
        raise ValueError(
            "--device-numbers does nothing without --device-names; add it or leave "
            "--device-numbers out"
        )
    ways = (args.devices, args.cluster, args.device_names, args.from_ray)
    if sum(way is not None for way in ways) > 1:
        raise ValueError(
            "give the devices in one way: --devices 4090,3090:2,cpu, --cluster FILE, "
            "--device-names with --device-numbers, or --from-ray"
        )
    if args.from_ray:
        from llmpq.planner.discovery import cluster_from_ray

        cluster = cluster_from_ray(args.from_ray)
    elif args.devices is not None:
        cluster = read_devices(args.devices).cluster
    elif args.device_names:
        numbers = args.device_numbers or ()
        for name, number in zip(args.device_names, numbers, strict=False):
            limits.whole(f"--device-numbers: {name}", number, limits.MAX_DEVICES)
        cluster = Cluster.from_counts(args.device_names, numbers)
    else:
        cluster = this_machine() if args.cluster is None else Cluster.load(args.cluster)
    reserve = getattr(args, "reserve", None)
    return cluster if reserve is None else with_reserve(cluster, _reserve_bytes(reserve))


def assumed_of_devices(args: argparse.Namespace) -> list[str]:
    """Return what `--devices` leaves open and the plan assumes."""
    if args.devices is None:
        return []
    return [f"assumed: {line}" for line in read_devices(args.devices).assumptions]


def _reserve_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"--reserve: {error}") from None


def with_reserve(cluster: Cluster, extra_bytes: int) -> Cluster:
    """Return the cluster with this much memory kept free on every device."""
    nodes = []
    for node in cluster.nodes:
        groups = tuple(
            group.model_copy(update={"reserve": group.reserve + extra_bytes})
            for group in node.groups()
        )
        nodes.append(node.model_copy(update={"devices": groups, "accelerators": None}))
    data = cluster.model_copy(update={"nodes": tuple(nodes)})
    return Cluster.parse_data(data.model_dump(by_alias=True), where="--reserve")
