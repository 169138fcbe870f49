"""Which engines a cluster's devices can make, as vectors of counts: devices of each class.

Devices of a class are alike, so an engine is known by how many it has of each class, and, behind
these, how many groups of each kind, whose devices share stages in tensor parallel. Where nodes are
twins (of the same devices and links), vectors that differ by an exchange of them are one engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from llmpq.devices.cluster import Cluster, Device
from llmpq.planner.problem.problem import MANY_DEVICES, Problem
from llmpq.planner.problem.work_clock import spend

Vector = tuple[int, ...]
"""Devices of each class; behind them groups of each kind."""
MOST_VECTORS, MOST_STATES = 2000, 20_000
"""Engines, and vectors of devices not used yet, up to which all are listed."""
FEWER = 1e-6
"""Rows taken off for each engine, so that of equal sums the one of fewer engines is the largest."""

Place = str | tuple[tuple[str, ...], tuple[int, ...]]
"""A device, or several that share a stage, with their shares."""


def count_vectors(
    counts: Sequence[int], uses: Sequence[Sequence[int]], most: int
) -> list[Vector] | None:
    """Return the vectors of all engines, or None if there are more than `most`.

    `counts`: the devices of each class. `uses`: of each kind of group, how many devices of each
    class it has; groups and devices of an engine are disjoint.
    """
    chosen: list[tuple[Vector, Vector]] = [((), tuple(counts))]
    for use in uses:
        fuller = []
        for groups, left in chosen:
            room = min(n // own for n, own in zip(left, use, strict=True) if own)
            for number in range(room + 1):
                rest = tuple(n - number * own for n, own in zip(left, use, strict=True))
                fuller.append(((*groups, number), rest))
        chosen = fuller
        if len(chosen) > most:
            return None
    if sum(math.prod(n + 1 for n in left) for _, left in chosen) > most + 1:
        return None
    return [
        (*alone, *groups)
        for groups, left in chosen
        for alone in itertools.product(*(range(n + 1) for n in left))
        if any(alone) or any(groups)
    ]


def partitions(cluster: Cluster, devices: Sequence[Device]) -> list[list[tuple[str, ...]]]:
    """Return ways to part devices of a cluster where its links are slow, as names of devices.

    The first way has a part for each node. There is one more for every bandwidth of a link: its
    parts are what links of at least that bandwidth join. Left out: one part of all devices, a part
    for each device, and ways that are there already.
    """
    few = len(devices) <= MANY_DEVICES
    ends = list(itertools.combinations(range(len(devices)), 2)) if few else []
    gbps = {(a, b): cluster.link(devices[a], devices[b]).gbps for a, b in ends}
    labels = [[d.node for d in devices]]  # of each way: the part of each device
    for least in sorted(set(gbps.values()), reverse=True):
        part = list(range(len(devices)))
        for a, b in (pair for pair in ends if gbps[pair] >= least):
            if part[a] != part[b]:
                part = [part[a] if one == part[b] else one for one in part]
        labels.append([str(one) for one in part])
    found = []
    for way in labels:
        parts = _parts([d.name for d in devices], way)
        if 1 < len(parts) < len(devices) and parts not in found:
            found.append(parts)
    return found


def _parts(names: Sequence[str], labels: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the names of each label, in the order in which labels first appear."""
    both = list(zip(names, labels, strict=True))
    return [tuple(name for name, of in both if of == label) for label in dict.fromkeys(labels)]


class CountVectors:
    """The engines that the devices of a problem can make, groups that share stages among them."""

    def __init__(self, p: Problem) -> None:
        known = {device.name for device in p.cluster.devices}
        # Devices that a command shares by itself are joined, too, of others that are not there.
        made_of = [[one.name for one in cls.first.joined] for cls in p.classes]
        self.is_group = [bool(names) and known.issuperset(names) for names in made_of]
        """Of each class of devices: whether it is a group of others of them."""
        both = list(zip(p.classes, self.is_group, strict=True))
        alone = [cls for cls, is_group in both if not is_group]
        self._groups = [cls.first for cls, is_group in both if is_group]
        self.counts: Vector = tuple(cls.count for cls in alone)
        """Devices of each class, groups left out."""
        number = {device.name: c for c, cls in enumerate(alone) for device in cls.devices}
        self._uses = [
            [[number[one.name] for one in group.joined].count(c) for c in range(len(alone))]
            for group in self._groups
        ]
        self._members = [[number[one.name] for one in group.joined] for group in self._groups]
        self._gbps = [cls.first.spec.mem_gbps for cls in alone]
        self._gbps += [group.spec.mem_gbps for group in self._groups]
        self._names = [[device.name for device in cls.devices] for cls in p.classes]
        self._twins = p.node_twins
        self.partitions = [
            [self._engine_of(number[name] for name in part) for part in parts]
            for parts in partitions(p.cluster, [d for d in p.cluster.devices if d.name in number])
        ]
        """Engines that part the devices where links are slow, the nodes first."""
        nodes = {d.node for d in p.cluster.devices}
        self.by_node = bool(self.partitions) and len(nodes) > 1
        """Whether the first of those are the nodes."""
        states = math.prod(count + 1 for count in self.counts)
        listed = count_vectors(self.counts, self._uses, MOST_VECTORS)
        self.complete = states <= MOST_STATES and listed is not None
        """Whether `vectors` has all engines; else it has those of few devices, and that of all."""
        self.vectors: list[Vector] = listed if self.complete and listed else self._small()

    @property
    def whole(self) -> Vector:
        """All devices, none in a group."""
        return self.alone(self.counts)

    def alone(self, counts: Sequence[int]) -> Vector:
        """Return the engine of so many devices of each class, none in a group."""
        return (*counts, *(0,) * len(self._groups))

    def _engine_of(self, classes: Iterable[int]) -> Vector:
        """Return the engine of devices of these classes, none in a group."""
        chosen = list(classes)
        return self.alone([chosen.count(c) for c in range(len(self.counts))])

    @property
    def groups(self) -> dict[Vector, Device]:
        """Engines of one group each."""
        kinds = len(self.counts)
        return {
            tuple(int(c == kinds + g) for c in range(kinds + len(self._groups))): group
            for g, group in enumerate(self._groups)
        }

    def parts(self, v: Vector) -> list[Vector]:
        """Return the engines of one device or group each that an engine is of, each once."""
        places = range(len(v))
        return [tuple(int(c == own) for c in places) for own in places if v[own]]

    def mem_gbps(self, v: Vector) -> float:
        """Return the rate at which an engine's devices read, together."""
        return sum(n * own for n, own in zip(v, self._gbps, strict=True))

    def same_devices(self, v: Vector) -> list[Vector]:
        """Return the engines of one group, in other shares, of the devices of an engine of one."""
        own = self.used(v)
        return [other for other in self.groups if other != v and self.used(other) == own]

    def used(self, v: Vector) -> Vector:
        """Return how many devices of each class an engine has."""
        kinds, found = len(self.counts), list(v[: len(self.counts)])
        for number, use in zip(v[kinds:], self._uses, strict=True):
            found = [n + number * own for n, own in zip(found, use, strict=True)]
        return tuple(found)

    def _small(self) -> list[Vector]:
        """Return up to MOST_VECTORS engines.

        Those of all devices, of one part or two of `partitions`, and within a node; then those of
        the fewest devices.
        """
        kinds = len(self.counts)
        nodes = self.partitions[0] if self.partitions else []
        within = (itertools.product(*(range(n + 1) for n in v[:kinds])) for v in nodes)
        joined = (
            [sum(counts) for counts in zip(*parts, strict=True)]
            for own in self.partitions
            for parts in itertools.combinations([v[:kinds] for v in own], 2)
        )
        first = itertools.islice(itertools.chain(*within, joined), MOST_VECTORS // 2)
        parts = itertools.chain(*self.partitions)
        found = list(dict.fromkeys([self.whole, *parts, *map(self.alone, filter(any, first))]))
        known = set(found)
        for size in range(1, sum(self.counts)):
            new: list[Vector] = []
            for chosen in itertools.combinations_with_replacement(range(kinds), size):
                v = tuple(chosen.count(c) for c in range(kinds))
                if all(n <= most for n, most in zip(v, self.counts, strict=True)):
                    new += [] if self.alone(v) in known else [self.alone(v)]
                if len(found) + len(new) > MOST_VECTORS:
                    return found
            found += new
        return found

    def canonical(self, v: Vector) -> Vector:
        """Return the vector that stands for all that differ by an exchange of twin nodes."""
        found = list(v)
        for nodes in self._twins:
            parts = sorted((tuple(v[c] for c in node) for node in nodes), reverse=True)
            for node, part in zip(nodes, parts, strict=True):
                for c, count in zip(node, part, strict=True):
                    found[c] = count
        return tuple(found)

    def names(self, v: Vector, used: Sequence[int] | None = None) -> tuple[str, ...]:
        """Return devices and groups of an engine: those behind the `used` ones of each class."""
        start = used or [0] * len(v)
        return tuple(
            name
            for own, at, count in zip(self._names, start, v, strict=True)
            for name in own[at : at + count]
        )

    def places(self, v: Vector, used: Sequence[int]) -> tuple[Place, ...]:
        """Return an engine's own devices, behind the `used` ones of each class; groups first."""
        kinds, at, found = len(self.counts), list(used), list[Place]()
        for number, group, members in zip(v[kinds:], self._groups, self._members, strict=True):
            for _ in range(number):
                names = []
                for c in members:
                    names.append(self._names[c][at[c]])
                    at[c] += 1
                found.append((tuple(names), group.shares))
        for c, count in enumerate(v[:kinds]):
            found += self._names[c][at[c] : at[c] + count]
        return tuple(found)

    def most_rows(
        self, rows: Mapping[Vector, float], exactly: int | None = None
    ) -> tuple[float, list[Vector]]:
        """Return the most rows that engines of disjoint devices do together, and those engines.

        `exactly`: how many engines; None: any number.
        """
        able = [(self.used(v), done - FEWER) for v, done in rows.items() if done > 0]
        listed = [v for v, done in rows.items() if done > 0]
        shape = tuple(count + 1 for count in self.counts)
        best = np.zeros(shape)
        if exactly is None:
            via = np.full(shape, -1)
            for number, (v, done) in enumerate(able):
                _add(best, best, via, v, done, number, repeat=max(self.counts))
            return self._found(able, listed, lambda _: via, exactly)
        layers = []
        for _ in range(exactly):
            after, via = np.full(shape, -np.inf), np.full(shape, -1)
            for number, (v, done) in enumerate(able):
                _add(best, after, via, v, done, number, repeat=1)
            layers.append(via)
            best = after
        return self._found(able, listed, lambda left: layers[left - 1], exactly)

    def _found(
        self,
        able: Sequence[tuple[Vector, float]],
        listed: Sequence[Vector],
        via_of: object,
        exactly: int | None,
    ) -> tuple[float, list[Vector]]:
        """Walk back from all devices to the engines that were added.

        `via_of`: of so many engines left, the engine (its number in `able`) that was added last for
        each count of devices; -1 for none.
        """
        assert callable(via_of)
        state, chosen, total = list(self.counts), [], 0.0
        left = exactly
        while left is None or left > 0:
            number = int(via_of(left)[tuple(state)])
            if number < 0:
                break
            v, done = able[number]
            chosen.append(listed[number])
            total += done + FEWER
            state = [n - used for n, used in zip(state, v, strict=True)]
            left = None if left is None else left - 1
        if exactly is not None and len(chosen) < exactly:
            return 0.0, []
        return total, chosen


def _add(
    before: np.ndarray,
    after: np.ndarray,
    via: np.ndarray,
    v: Vector,
    done: float,
    number: int,
    *,
    repeat: int,
) -> None:
    """Add an engine wherever its devices are left and it makes the sum larger."""
    source = tuple(slice(0, size - n) for size, n in zip(before.shape, v, strict=True))
    target = tuple(slice(n, None) for n in v)
    spend(8, 3 * repeat * after.size)
    for _ in range(repeat):
        new = before[source] + done
        better = new > after[target]
        if not better.any():
            return
        after[target] = np.where(better, new, after[target])
        via[target] = np.where(better, number, via[target])
