"""Re-plans after a change: one more or fewer device, another batch, prompt or length.

+V100          one more device of a kind, on the node that has it (or a node of its own)
-T4-0          without a device
batch=16       another batch; s=... and n=... likewise

What was fixed stays fixed: pins follow their devices, micro-batches shrink with the batch.
"""

from __future__ import annotations

from dataclasses import replace

from llmpq.cluster import Cluster, Device, DeviceGroup, Node
from llmpq.devices.device_spec import canonical_kind
from llmpq.plan import Predicted
from llmpq.planner import limits
from llmpq.planner.costs.roofline import estimate_costs
from llmpq.planner.formulation.positions import positions_note
from llmpq.planner.formulation.problem import Problem

WORKLOAD_KEYS = {
    "batch": ("batch", limits.MAX_BATCH),
    "s": ("prompt_len", limits.MAX_TOKENS),
    "n": ("gen_len", limits.MAX_TOKENS),
}
"""Key -> field of the workload, and the most it may be."""


def changed_problem(p: Problem, change: str) -> Problem:
    """Return the problem after one change."""
    if change.startswith("+"):
        return _with_cluster(p, _added(p.cluster, change[1:]))
    if change.startswith("-"):
        return _without(p, change[1:])
    key, equals, number = change.partition("=")
    if not equals or key not in WORKLOAD_KEYS or not number.isdecimal() or int(number) < 1:
        raise ValueError(
            f"--what-if {change}: expected +KIND, -DEVICE, batch=N, s=N or n=N, such as +V100"
        )
    field, most = WORKLOAD_KEYS[key]
    value = limits.whole(f"--what-if {key}", int(number), most)
    work = p.workload.model_copy(update={field: value})
    positions_note(p.spec, work)
    return p.with_changes(
        workload=work,
        prefill_microbatch=_within(p.prefill_microbatch, work.batch),
        decode_microbatch=_within(p.decode_microbatch, work.batch),
    )


def _within(microbatch: int | None, batch: int) -> int | None:
    return None if microbatch is None else min(microbatch, batch)


def compared(before: Predicted, after: Predicted) -> str:
    """Return the new time, rate and quality beside the old ones."""
    slower = after.total_s / before.total_s - 1
    faster = after.output_tokens_per_s / before.output_tokens_per_s - 1
    return (
        f"{after.total_s:.3f} s ({slower:+.1%}), {after.output_tokens_per_s:.1f} tokens/s "
        f"({faster:+.1%}), sum omega {after.sum_omega:.4g} (now {before.sum_omega:.4g})"
    )


def _with_cluster(p: Problem, cluster: Cluster) -> Problem:
    estimate = estimate_costs(
        p.spec,
        cluster.devices,
        dtype=p.workload.dtype,
        precisions=p.choices,
        kvs=sorted({e.kv for e in p.costs.estimate.entries}, key=lambda kv: kv.bits),
        quantization=p.quantization,
    )
    costs = replace(p.costs, estimate=estimate)
    return p.with_changes(cluster=cluster, costs=costs)


def _added(cluster: Cluster, kind: str) -> Cluster:
    groups = [(n, at, g) for n in cluster.nodes for at, g in enumerate(n.groups())]
    inline = [(n, at) for n, at, g in groups if g.spec is not None and g.kind == kind]
    name = kind if inline else canonical_kind(kind)
    owners = inline or [
        (n, at) for n, at, g in groups if g.spec is None and canonical_kind(g.kind) == name
    ]
    if not owners:
        node = Node(name=f"added-{name.lower()}", devices=(DeviceGroup(kind=name),))
        return _with_nodes(cluster, [*cluster.nodes, node], None)
    node, position = owners[-1]
    return _resized(cluster, node, position, 1)


def _without(p: Problem, device: str) -> Problem:
    """Remove a device; those behind it are numbered anew, and pins follow their devices."""
    gone = p.cluster.device(device)
    if gone.name in p.pins:
        raise ValueError(f"--what-if -{device}: a --pin needs {gone.name}; leave one of them out")
    cluster = _removed(p.cluster, gone)
    left = [d for d in p.cluster.devices if d is not gone]
    names = {old.name: new.name for old, new in zip(left, cluster.devices, strict=True)}
    pins = {names[name]: layers for name, layers in p.pins.items()}
    return _with_cluster(p.with_changes(pins=pins), cluster)


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
