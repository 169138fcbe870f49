"""Costs of messages between devices: until one has arrived, and how long it occupies its way.

A message of b bytes is on its way for delay + handshake + b * per_byte seconds. During all but the
delay it occupies link, sender and receiver: no other message starts meanwhile, so it bounds how
often one can follow another. The delay only lets it arrive later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.devices.cluster import Cluster, Device
from llmpq.planner.costs.cost_book import CostBook

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Hops:
    """Times in seconds of one message between classes of devices."""

    total_s: Floats
    """[C, C] until it has arrived."""
    busy_s: Floats
    """[C, C] for which it occupies its way; never more than `total_s`."""
    held_s: Floats
    """[C, C] the same on average, where the last message is smaller."""


@dataclass(frozen=True, kw_only=True)
class LinkTables:
    """Coefficients of every link, [N, N], sender first; zero from a device to itself."""

    delay_s: Floats
    handshake_s: Floats
    per_byte_s: Floats

    def same_from(self, i: int, j: int) -> bool:
        """Whether two devices have equal links to all others, both ways, and between them."""
        for table in (self.delay_s, self.handshake_s, self.per_byte_s):
            others = np.ones(len(table), dtype=bool)
            others[[i, j]] = False
            if table[i, j] != table[j, i]:
                return False
            if not np.array_equal(table[i, others], table[j, others]):
                return False
            if not np.array_equal(table[others, i], table[others, j]):
                return False
        return True

    def unchanged_by(self, order: NDArray[np.int64]) -> bool:
        """Whether renaming device i to `order[i]` leaves every link as it is."""
        tables = (self.delay_s, self.handshake_s, self.per_byte_s)
        return all(np.array_equal(t[np.ix_(order, order)], t) for t in tables)

    def between(self, members: Sequence[Sequence[int]]) -> ClassLinks:
        """Return the links between classes of devices, given as their numbers."""
        terms: dict[tuple[int, int], Floats] = {}
        for a, sources in enumerate(members):
            for b, targets in enumerate(members):
                rows, columns = np.array(sources)[:, None], np.array(targets)[None, :]
                apart = rows != columns
                tables = (self.delay_s, self.handshake_s, self.per_byte_s)
                found = np.stack([table[rows, columns][apart] for table in tables], axis=1)
                if len(found):
                    terms[a, b] = np.unique(found, axis=0)
        return ClassLinks(classes=len(members), terms=terms)


@dataclass(frozen=True, kw_only=True)
class ClassLinks:
    """The different links between any devices of two classes; within a class, between two of it."""

    classes: int
    terms: Mapping[tuple[int, int], Floats]
    """[k, 3] delay, handshake, per byte; no entry within a class of one device."""

    def hops(self, num_bytes: float, smaller: float = 0.0, share: float = 0.0) -> Hops:
        """Return the quickest message of `num_bytes` between two classes.

        A `share` of the messages, the last ones, has `smaller` bytes.
        """
        busy, held, total = (np.zeros((self.classes, self.classes)) for _ in range(3))
        for ends, (delay, handshake, per_byte) in ((k, t.T) for k, t in self.terms.items()):
            occupied = handshake + num_bytes * per_byte
            busy[ends], total[ends] = occupied.min(), (delay + occupied).min()
            last = (handshake + smaller * per_byte).min()
            held[ends] = busy[ends] + share * (last - busy[ends])
        return Hops(total_s=total, busy_s=busy, held_s=held)


def link_tables(cluster: Cluster, devices: Sequence[Device], costs: CostBook) -> LinkTables:
    """Return the coefficients of every link between devices of a cluster.

    Devices of a kind and node have the same, unless a link names one of them.
    """
    alike: dict[tuple[str, ...], Device] = {}
    of_device = []
    for device in devices:
        own = device.name if cluster.has_own_links(device) else ""
        key = (device.profile_kind, device.node, own)
        alike.setdefault(key, device)
        of_device.append(key)
    number = {key: k for k, key in enumerate(alike)}
    of_kinds = np.zeros((3, len(alike), len(alike)))
    for i, source in enumerate(alike.values()):
        for j, target in enumerate(alike.values()):
            terms = costs.link(cluster, source, target)
            of_kinds[:, i, j] = terms.delay_s, terms.handshake_s, terms.per_byte_s
    place = np.array([number[key] for key in of_device])
    tables = of_kinds[:, place[:, None], place[None, :]]
    tables[:, range(len(devices)), range(len(devices))] = 0.0
    delay, handshake, per_byte = tables
    return LinkTables(delay_s=delay, handshake_s=handshake, per_byte_s=per_byte)
