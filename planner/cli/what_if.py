"""Changes a plan's job: other devices, or another value of a flag.

+V100          one more device of a kind, on the node that has it (or, of several nodes, on a new
               one); +V100:2 two, and whatever else `--devices` takes
-T4-0          without a device; -T4 without the last one of a kind, -T4:2 without two
-node-b        without a node of several
batch=16       another value of a flag: prompt-len=8000, context=32k, bits=8, kv=8, prefer=speed
-T4,+V100      several changes as one

What was fixed stays fixed: pins follow their devices, micro-batches shrink with the batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from llmpq.devices.cluster import Cluster, Device, Node
from llmpq.devices.device_list import read_devices
from llmpq.devices.device_spec import canonical_kind
from llmpq.errors import LlmpqError
from llmpq.planner.cli.alternatives import Speed
from llmpq.planner.problem import limits
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.plans.gpu_memory import cluster_within
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.precision import bits_of
from llmpq.units import parse_size, shown_loss

CHANGEABLE = {
    "batch": limits.MAX_BATCH,
    "prompt_len": limits.MAX_TOKENS,
    "gen_len": limits.MAX_TOKENS,
    "context": limits.MAX_TOKENS,
    "dtype": None,
    "prefer": None,
    "theta": None,
    "quality_budget": None,
    "bits": None,
    "kv": None,
    "reserve": None,
    "gpu_memory_utilization": None,
    "max_devices": None,
    "group": None,
    "prefill_microbatch": None,
    "decode_microbatch": None,
    "weight_group_size": None,
    "head_bits": None,
}
"""Flags, as a request calls them, that may have another value; the most it may be."""
INSTEAD = ("prefer", "theta", "quality_budget")
"""Flags of which one at most is given."""
EXPECTED = (
    "+KIND, +KIND:2, -KIND, -DEVICE, -NODE, or another value of a flag, such as batch=16, "
    "prompt-len=8000, bits=8 or kv=8, or several of these with commas"
)


def changed_request(
    request: PlanRequest, change: str, read: Callable[[str, str], dict[str, object]]
) -> PlanRequest:
    """Return the request with another value of a flag; `read` parses one, as the command does."""
    key, equals, text = change.removeprefix("--").partition("=")
    if not equals or not key or not text:
        raise ValueError(f"--what-if {change}: expected {EXPECTED}")
    try:
        found = read(key, text)
    except ValueError as error:
        if str(error).startswith("unknown flag"):
            raise ValueError(f"--what-if {change}: expected {EXPECTED}") from None
        raise ValueError(f"--what-if {change}: {error}") from None
    if not found or not set(found) <= set(CHANGEABLE):
        raise ValueError(f"--what-if {change}: expected {EXPECTED}")
    ((name, value),) = found.items()
    most = CHANGEABLE[name]
    if most is not None:
        assert isinstance(value, int), "counts are whole numbers"
        limits.whole(f"--what-if {key}", value, most)
    if name in INSTEAD:
        request = replace(request, prefer=None, theta=None, quality_budget=None)
    if name == "prompt_len":  # else the context that was asked for would say it
        request = replace(request, context=None)
    changed = replace(request, **{name: value})  # type: ignore[arg-type]
    batch = changed.batch
    return replace(
        changed,
        prefill_microbatch=_within(changed.prefill_microbatch, batch),
        decode_microbatch=_within(changed.decode_microbatch, batch),
    )


def _within(microbatch: int | None, batch: int) -> int | None:
    return None if microbatch is None else min(microbatch, batch)


_NEXT = re.compile(r",(?=[+-]|[a-z][a-z_-]*=)")


def parts_of(change: str) -> list[str]:
    """Return the changes that a comma joins: devices that are added, that go, values of flags.

    `-3090,+5090`, `+3090,batch=8`; the comma of `bits=4,8` is the value's own.
    """
    kinds = {"+": 0, "-": 1}
    parts = _NEXT.split(change)
    return sorted(parts, key=lambda one: 2 if one.startswith("--") else kinds.get(one[:1], 2))


def only_adds(change: str) -> bool:
    """Whether a change adds devices and does nothing else: the plan without it is one with it."""
    return all(part.startswith("+") for part in parts_of(change))


def changed_devices(
    request: PlanRequest, cluster: Cluster, change: str
) -> tuple[PlanRequest, Cluster | None]:
    """Return the request, its pins on the devices they were on, and the devices after a change.

    No devices where the request names them all, those that are added as well. Their name says the
    change: a refusal is of them.
    """
    if request.devices is not None and change.startswith("+") and len(change) > 1:
        added = f"{request.devices},{change[1:]}"
        try:
            read_devices(added, where="--what-if")
        except ValueError as error:
            typed = str(error).replace(f"--what-if {change[1:]}", f"--what-if {change}")
            raise ValueError(typed) from None
        return replace(request, devices=added), None
    cluster = cluster.ungrouped()
    name, count = _counted(cluster, change)
    of_node = [device for device in cluster.devices if device.node == name]
    if change.startswith("-") and len(cluster.nodes) > 1 and of_node and not _is_kind(name):
        count = len(of_node)
    there = len(_of_kind(cluster, name))
    if change.startswith("-") and 1 < count > there > 0:
        raise ValueError(f"--what-if {change}: the devices have {there} of them")
    reserve = None if request.reserve is None else parse_size(request.reserve)
    whole = cluster.name
    for _ in range(count):
        if change.startswith("+"):
            cluster = with_added(cluster, name, reserve)
            continue
        gone = _one_of(cluster, name)
        left, names = without(cluster, gone)
        pins = [_moved(pin, cluster, names, change) for pin in request.pin]
        request, cluster = replace(request, pin=pins), left
    named = cluster.model_copy(update={"name": f"{whole} with {change}"})
    return request, cluster_within(named, request.gpu_memory_utilization)


def _counted(cluster: Cluster, change: str) -> tuple[str, int]:
    """Read `+V100:2` or `-T4`: what, and how many. A device may be named `node:1`, too."""
    name, colon, count = change[1:].rpartition(":")
    places = {f"{device.node}:{device.index}" for device in cluster.devices}
    if not colon or not count.isdecimal() or (change[0] == "-" and change[1:] in places):
        name, count = change[1:], "1"
    if not name:
        raise ValueError(f"--what-if {change}: expected {EXPECTED}")
    return name, limits.whole(f"--what-if {change}: devices", int(count), limits.MAX_DEVICES)


def _is_kind(name: str) -> bool:
    try:
        canonical_kind(name)
    except (ValueError, LlmpqError):
        return False
    return True


def _one_of(cluster: Cluster, name: str) -> Device:
    """Return the device of this name, or the last one of this kind."""
    of_kind = _of_kind(cluster, name)
    try:
        return of_kind[-1] if of_kind else cluster.device(name)
    except ValueError as error:
        raise ValueError(f"--what-if -{name}: {error}") from None


def _of_kind(cluster: Cluster, name: str) -> list[Device]:
    """Return the devices of a kind, or else of a node of several."""
    kind = canonical_kind(name) if _is_kind(name) else name
    found = [device for device in cluster.devices if device.kind in (kind, name)]
    if found or len(cluster.nodes) == 1:
        return found
    return [device for device in cluster.devices if device.node == name]


def _moved(pin: str, cluster: Cluster, names: dict[str, str], change: str) -> str:
    """Return a `--pin` with its device's new name."""
    layers, equals, device = pin.partition("=")
    if not equals:
        return pin  # refused where pins are read
    old = cluster.device(device).name
    if old not in names:
        raise ValueError(f"--what-if {change}: a --pin needs {old}; leave one of them out")
    return f"{layers}={names[old]}"


def compared(before: Plan | Topology, after: Plan | Topology) -> str:
    """Return the new time, rate, bits, engines and quality beside the old ones."""
    old, new = before.predicted, after.predicted
    assert old is not None and new is not None, "the planner always predicts"
    slower = round(new.total_s / old.total_s - 1, 3) + 0.0  # never "-0.0%"
    speed = Speed.of_found(after).beside(Speed.of_found(before))
    return (
        f"{new.total_s:.3f} s ({slower:+.1%}), {speed}, {_bits_of(after)}, "
        f"{_engines_change(before, after)}{_waves_of(after)}"
        f"{loss_change(old.sum_omega, new.sum_omega)}"
    )


def made_possible(after: Plan | Topology) -> str:
    """Return what a change gives where nothing fits without it."""
    new = after.predicted
    assert new is not None, "the planner always predicts"
    engines = _num_engines(after)
    several = f"{engines} engines, " if engines > 1 else ""
    return (
        f"fits: {new.total_s:.3f} s, {Speed.of_found(after).text}, {_bits_of(after)}, {several}"
        f"{_waves_of(after)}quality loss {shown_loss(new.sum_omega)}"
    )


def _bits_of(found: Plan | Topology) -> str:
    """Return what layers have, of each engine where they differ."""
    return " and ".join(dict.fromkeys(bits_of(plan.precisions) for plan in found.plans))


def _waves_of(found: Plan | Topology) -> str:
    """Return in how many waves rows run that do not fit at once."""
    most = max(engine.waves for engine in found.engines) if isinstance(found, Topology) else 1
    return f"rows in {most} waves, " if most > 1 else ""


def _num_engines(found: Plan | Topology) -> int:
    return len(found.plans)


def _engines_change(before: Plan | Topology, after: Plan | Topology) -> str:
    """Return how many engines there are, where there are several before or after."""
    old, new = _num_engines(before), _num_engines(after)
    if old == new:
        return f"{new} engines as now, " if new > 1 else ""
    now = "one engine" if new == 1 else f"{new} engines"
    return f"{now} instead of {'one' if old == 1 else old}, "


def loss_change(before: float, after: float) -> str:
    """Return what becomes of the quality loss, in words."""
    old, new = shown_loss(before), shown_loss(after)
    if abs(after - before) <= 1e-6 * max(after, before):
        return f"quality loss as now ({old})"
    if before <= 0 or after <= 0:
        return f"quality loss {new} instead of {old}"
    if after < before:
        return f"quality loss {new} instead of {old}, {before / after:.3g} times less"
    return f"quality loss {new} instead of {old}, {after / before:.3g} times more"


def with_added(cluster: Cluster, kind: str, reserve: int | None = None) -> Cluster:
    """Return the cluster with one more device of a kind; `reserve`: bytes a new one leaves free."""
    groups = [(n, at, g) for n in cluster.nodes for at, g in enumerate(n.groups())]
    inline = [(n, at) for n, at, g in groups if g.spec is not None and g.kind == kind]
    if inline:
        return _resized(cluster, *inline[-1], 1)
    (group,) = read_devices(kind, where="--what-if").cluster.nodes[0].groups()
    owners = [
        (n, at)
        for n, at, g in groups
        if g.spec is group.spec is None and canonical_kind(g.kind) == group.kind
    ]
    if owners:
        return _resized(cluster, *owners[-1], 1)
    if reserve is not None:
        group = group.model_copy(update={"reserve": reserve})
    first, *others = cluster.nodes
    if others:
        node = Node(name=f"added-{group.kind.lower()}", devices=(group,))
        return _with_nodes(cluster, [*cluster.nodes, node], None)
    update = {"devices": (*first.groups(), group), "accelerators": None}
    return _with_nodes(cluster, [first.model_copy(update=update)], None)


def without(cluster: Cluster, gone: Device) -> tuple[Cluster, dict[str, str]]:
    """Return the cluster without a device, and the new names of the others, by their old ones.

    Those behind it are numbered anew.
    """
    cluster = cluster.ungrouped()
    less = _removed(cluster, gone)
    left = [device for device in cluster.devices if device.name != gone.name]
    return less, {old.name: new.name for old, new in zip(left, less.devices, strict=True)}


def share_of(p: Problem, engines: int) -> Cluster:
    """Return the devices of one engine: as many of every class."""
    cluster = p.cluster
    kept = [d.name for cls in p.classes for d in cls.devices[: cls.count // engines]]
    names = {device.name: device.name for device in cluster.ungrouped().devices}
    for name in list(names):
        if name not in kept:
            cluster, moved = without(cluster, cluster.device(names.pop(name)))
            names = {old: moved[new] for old, new in names.items()}
    counts = Counter(device.kind for device in cluster.devices)
    text = ",".join(kind if count == 1 else f"{kind}:{count}" for kind, count in counts.items())
    return cluster.model_copy(update={"name": text})


def _removed(cluster: Cluster, gone: Device) -> Cluster:
    node = next(n for n in cluster.nodes if n.name == gone.node)
    end = 0
    for position, group in enumerate(node.groups()):
        end += group.count
        if gone.index < end:
            return _resized(cluster, node, position, -1, gone)
    raise AssertionError("a device belongs to a group of its node")


def _resized(
    cluster: Cluster, node: Node, position: int, change: int, gone: Device | None = None
) -> Cluster:
    """Add devices to a node's group, or take them away: an empty group and an empty node go."""
    groups = list(node.groups())
    count = groups[position].count + change
    groups[position : position + 1] = (
        [groups[position].model_copy(update={"count": count})] if count else []
    )
    nodes = []
    for other in cluster.nodes:
        if other.name != node.name:
            nodes.append(other)
        elif groups:
            nodes.append(other.model_copy(update={"devices": tuple(groups), "accelerators": None}))
    if not nodes:
        raise ValueError("--what-if would leave no device")
    return _with_nodes(cluster, nodes, gone)


def _with_nodes(cluster: Cluster, nodes: list[Node], gone: Device | None) -> Cluster:
    """Read the changed cluster anew: a copy would keep the old list of devices.

    Links of single devices follow them to their new numbers; those of what is gone go.
    """
    data = cluster.model_copy(update={"nodes": tuple(nodes)}).model_dump(by_alias=True)
    pairs, data["links"]["pairs"] = cluster.links.pairs, []
    changed = Cluster.parse_data(data, where="--what-if")
    left = [d for d in cluster.devices if gone is None or d.name != gone.name]
    # A device that is added comes last of its kind: the others keep their names.
    kept = changed.devices if gone is not None else left
    names = {old.name: new.name for old, new in zip(left, kept, strict=True)}
    own = {node.name for node in cluster.nodes}
    names |= {node.name: node.name for node in changed.nodes}
    for pair in pairs:
        ends = [end if end in own else cluster.device(end).name for end in pair.between]
        if all(end in names for end in ends):
            moved = [names[end] for end in ends]
            data["links"]["pairs"].append({**pair.model_dump(), "between": moved})
    return Cluster.parse_data(data, where="--what-if")
