"""Which devices, and which whole nodes, can take each other's place in any plan.

Two devices are alike if their kind, free memory, limits, pins and links to all others agree. Two
nodes are twins if exchanging all their devices changes no link. The names of nodes decide nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from llmpq.cluster import Device
from llmpq.planner.costs.links import LinkTables


def device_key(device: Device, pins: Mapping[str, tuple[int, int]]) -> Hashable:
    """Return what makes a device's speed, memory and duties."""
    pinned = device.name if device.name in pins else ""
    return device.profile_kind, device.limit_bytes, device.spec.context, pinned


def alike_devices(
    devices: Sequence[Device], keys: Sequence[Hashable], links: LinkTables | None
) -> list[list[int]]:
    """Return the classes of devices that are alike; without `links` by their keys only."""
    classes: list[list[int]] = []
    for i in range(len(devices)):
        for members in classes:
            same = keys[members[0]] == keys[i]
            if same and (links is None or links.same_from(members[0], i)):
                members.append(i)
                break
        else:
            classes.append([i])
    return classes


def twin_nodes(
    devices: Sequence[Device],
    keys: Sequence[Hashable],
    classes: Sequence[Sequence[int]],
    links: LinkTables,
) -> list[list[tuple[int, ...]]]:
    """Return groups of interchangeable nodes, each node as the numbers of its classes.

    Only nodes whose classes lie wholly within them: elsewhere their devices are alike already.
    """
    own: dict[str, list[int]] = {}
    for c, members in enumerate(classes):
        nodes = {devices[i].node for i in members}
        if len(nodes) == 1:
            own.setdefault(nodes.pop(), []).append(c)
    of_node: dict[str, list[int]] = {}
    for i, device in enumerate(devices):
        of_node.setdefault(device.node, []).append(i)
    whole = {
        node: tuple(cs)
        for node, cs in own.items()
        if sum(len(classes[c]) for c in cs) == len(of_node[node])
    }
    groups: list[list[str]] = []
    for node in whole:
        for group in groups:
            if _twins(whole[group[0]], whole[node], classes, keys, links):
                group.append(node)
                break
        else:
            groups.append([node])
    return [[whole[node] for node in group] for group in groups if len(group) > 1]


def _twins(
    one: Sequence[int],
    other: Sequence[int],
    classes: Sequence[Sequence[int]],
    keys: Sequence[Hashable],
    links: LinkTables,
) -> bool:
    """Whether exchanging the devices of two nodes, class by class, changes nothing."""
    if len(one) != len(other):
        return False
    order = np.arange(len(keys))
    for c, d in zip(one, other, strict=True):
        if len(classes[c]) != len(classes[d]) or keys[classes[c][0]] != keys[classes[d][0]]:
            return False
        order[list(classes[c])], order[list(classes[d])] = list(classes[d]), list(classes[c])
    return links.unchanged_by(order)
