"""Which engines a cluster's devices can make: how many devices of each class one has.

Devices of a class are alike, so an engine is a vector of counts; of nodes that are twins, vectors
that differ by an exchange of the nodes are the same engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from llmpq.planner.problem.problem import Problem

Vector = tuple[int, ...]
"""Devices of each class."""
MOST_VECTORS, MOST_STATES = 2000, 20_000
"""Engines, and counts of devices left, up to which all groupings are seen."""
FEWER = 1e-6
"""Rows that one more engine costs: of equal sums the one of fewer engines is taken."""


class CountVectors:
    """The engines that the devices of a problem can make."""

    def __init__(self, p: Problem) -> None:
        self.counts: Vector = tuple(cls.count for cls in p.classes)
        self._names = [[device.name for device in cls.devices] for cls in p.classes]
        self._twins = p.node_twins
        states = math.prod(count + 1 for count in self.counts)
        self.complete = states <= MOST_STATES and states <= MOST_VECTORS
        """Whether all engines are listed; else those of few devices, and that of all."""
        self.vectors: list[Vector] = (
            [v for v in itertools.product(*(range(n + 1) for n in self.counts)) if any(v)]
            if self.complete
            else self._small()
        )

    def _small(self) -> list[Vector]:
        """Return vectors of few devices, as many as there is room for, and the whole."""
        found: list[Vector] = [self.counts]
        kinds = len(self.counts)
        for size in range(1, sum(self.counts)):
            new = []
            for chosen in itertools.combinations_with_replacement(range(kinds), size):
                v = tuple(chosen.count(c) for c in range(kinds))
                if all(n <= most for n, most in zip(v, self.counts, strict=True)):
                    new.append(v)
                if len(found) + len(new) > MOST_VECTORS:
                    return found
            found += new
        return found

    def canonical(self, v: Vector) -> Vector:
        """Return the vector that stands for all that twin nodes make alike."""
        found = list(v)
        for nodes in self._twins:
            parts = sorted((tuple(v[c] for c in node) for node in nodes), reverse=True)
            for node, part in zip(nodes, parts, strict=True):
                for c, count in zip(node, part, strict=True):
                    found[c] = count
        return tuple(found)

    def names(self, v: Vector, used: Sequence[int] | None = None) -> tuple[str, ...]:
        """Return devices of an engine: those behind the `used` ones of each class."""
        start = used or [0] * len(v)
        return tuple(
            name
            for own, at, count in zip(self._names, start, v, strict=True)
            for name in own[at : at + count]
        )

    def most_rows(
        self, rows: Mapping[Vector, float], exactly: int | None = None
    ) -> tuple[float, list[Vector]]:
        """Return the most rows that engines of disjoint devices do together, and those engines.

        `exactly`: how many engines; None: any number.
        """
        able = [(v, done - FEWER) for v, done in rows.items() if done > 0]
        shape = tuple(count + 1 for count in self.counts)
        best = np.zeros(shape)
        if exactly is None:
            via = np.full(shape, -1)
            for number, (v, done) in enumerate(able):
                _add(best, best, via, v, done, number, repeat=max(self.counts))
            return self._found(able, lambda _: via, exactly)
        layers = []
        for _ in range(exactly):
            after, via = np.full(shape, -np.inf), np.full(shape, -1)
            for number, (v, done) in enumerate(able):
                _add(best, after, via, v, done, number, repeat=1)
            layers.append(via)
            best = after
        return self._found(able, lambda left: layers[left - 1], exactly)

    def _found(
        self,
        able: Sequence[tuple[Vector, float]],
        via_of: object,
        exactly: int | None,
    ) -> tuple[float, list[Vector]]:
        """Walk back from all devices to the engines that were added."""
        assert callable(via_of)
        state, chosen, total = list(self.counts), [], 0.0
        left = exactly
        while left is None or left > 0:
            number = int(via_of(left)[tuple(state)])
            if number < 0:
                break
            v, done = able[number]
            chosen.append(v)
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
    for _ in range(repeat):
        new = before[source] + done
        better = new > after[target]
        if not better.any():
            return
        after[target] = np.where(better, new, after[target])
        via[target] = np.where(better, number, via[target])
