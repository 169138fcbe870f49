"""Re-plans after a change: one more or fewer device, another batch, prompt or length.

+V100          one more device of a kind, on the node that has it (or a node of its own)
-T4-0          without a device
batch=16       another batch; s=... and n=... likewise
"""

from __future__ import annotations

from llmpq.cluster import Cluster, DeviceGroup, Node
from llmpq.device_spec import canonical_kind
from llmpq.plan import Predicted
from llmpq.planner.costs import CostBook
from llmpq.planner.positions import positions_note
from llmpq.planner.problem import Problem
from llmpq.planner.roofline import estimate_costs

WORKLOAD_KEYS = {"batch": "batch", "s": "prompt_len", "n": "gen_len"}


def changed_problem(p: Problem, change: str) -> Problem:
    """Return the problem after one change."""
    if change.startswith("+"):
        return _with_cluster(p, _added(p.cluster, change[1:]))
    if change.startswith("-"):
        return _with_cluster(p, _removed(p.cluster, change[1:]))
    key, equals, number = change.partition("=")
    if not equals or key not in WORKLOAD_KEYS or not number.isdigit() or int(number) < 1:
        raise ValueError(
            f"--what-if {change}: expected +KIND, -DEVICE, batch=N, s=N or n=N, such as +V100"
        )
    work = p.workload.model_copy(update={WORKLOAD_KEYS[key]: int(number)})
    positions_note(p.spec, work)
    return p.with_changes(workload=work)


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
    costs = CostBook(estimate=estimate, profile=p.costs.profile, scale=p.costs.scale)
    return p.with_changes(cluster=cluster, costs=costs)


def _added(cluster: Cluster, kind: str) -> Cluster:
    groups = [(node, group) for node in cluster.nodes for group in node.groups()]
    inline = [(n, g) for n, g in groups if g.spec is not None and g.kind == kind]
    name = kind if inline else canonical_kind(kind)
    owners = inline or [
        (n, g) for n, g in groups if g.spec is None and canonical_kind(g.kind) == name
    ]
    if not owners:
        node = Node(name=f"added-{name.lower()}", devices=(DeviceGroup(kind=name),))
        return _with_nodes(cluster, [*cluster.nodes, node])
    node, group = owners[-1]
    return _replaced(cluster, node, group, group.model_copy(update={"count": group.count + 1}))


def _removed(cluster: Cluster, device: str) -> Cluster:
    gone = cluster.device(device)
    node = next(n for n in cluster.nodes if n.name == gone.node)
    position = 0
    for group in node.groups():
        if position <= gone.index < position + group.count:
            fewer = group.model_copy(update={"count": group.count - 1}) if group.count > 1 else None
            return _replaced(cluster, node, group, fewer)
        position += group.count
    raise AssertionError("a device belongs to a group of its node")


def _replaced(cluster: Cluster, node: Node, old: DeviceGroup, new: DeviceGroup | None) -> Cluster:
    groups = []
    for group in node.groups():
        if group is old or group == old:
            if new is not None:
                groups.append(new)
            old = None  # type: ignore[assignment]
        else:
            groups.append(group)
    nodes = []
    for other in cluster.nodes:
        if other.name != node.name:
            nodes.append(other)
        elif groups:
            nodes.append(other.model_copy(update={"devices": tuple(groups), "accelerators": None}))
    if not nodes:
        raise ValueError("--what-if would leave no device")
    return _with_nodes(cluster, nodes)


def _with_nodes(cluster: Cluster, nodes: list[Node]) -> Cluster:
    """Read the changed cluster anew: a copy would keep the old list of devices."""
    data = cluster.model_copy(update={"nodes": tuple(nodes)}).model_dump(by_alias=True)
    return Cluster.parse_data(data, where="--what-if")
