"""Plans beside one whose stages have one precision each (shapes.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmpq.planner.exact.start.shapes import Ints, Shapes

STEPS = (1, 2, 4, 8)
"""Layers moved at once."""
MOST_PAIRS = 300
"""Pairs of stages that are looked at: of more, some by chance."""
Order = tuple[Ints, Ints]
"""[n, J] classes and choices of stages."""


def moved_layers(s: Shapes, chance: np.random.Generator) -> Shapes:
    """Return the first of some plans with layers of any stage given to any other one."""
    count = s.cls.shape[1]
    pairs = _pairs(count, chance)
    step = np.repeat(np.array(STEPS), len(pairs))
    givers, takers = np.tile(pairs, (len(STEPS), 1)).T
    rows = np.repeat(s.layers[:1], len(step), axis=0)
    number = np.arange(len(rows))
    rows[number, givers] -= step
    rows[number, takers] += step
    some = (rows > 0).all(axis=1)
    size = (int(some.sum()), count)
    return Shapes(
        cls=np.broadcast_to(s.cls[0], size),
        bits=np.broadcast_to(s.bits[0], size),
        layers=rows[some],
    )


def _pairs(count: int, chance: np.random.Generator) -> Ints:
    """[n, 2] pairs of different stages."""
    pairs = np.argwhere(~np.eye(count, dtype=bool))
    return pairs if len(pairs) <= MOST_PAIRS else chance.choice(pairs, MOST_PAIRS, replace=False)


def other_orders(
    s: Shapes, counts: Ints, most: int, choices: Ints, chance: np.random.Generator
) -> Iterator[Order]:
    """Yield the orders beside a plan's: of as many stages, of one less, of one more."""
    cls, bits = s.cls[0], s.bits[0]
    unused = np.flatnonzero(np.bincount(cls, minlength=len(counts)) < counts)
    yield from _exchanged(cls, bits, chance)
    yield from _replaced(cls, bits, unused, choices)
    if len(cls) > 1:
        kept = ~np.eye(len(cls), dtype=bool)
        rows = np.array([np.flatnonzero(own) for own in kept])
        yield cls[rows], bits[rows]
    if len(cls) < most and len(unused):
        yield _inserted(cls, bits, unused, choices)


def _exchanged(cls: Ints, bits: Ints, chance: np.random.Generator) -> Iterator[Order]:
    """Exchange two stages, put one elsewhere, begin elsewhere, go the other way round."""
    count = len(cls)
    rows = []
    for j, k in _pairs(count, chance).tolist():
        order = list(range(count))
        order.insert(k, order.pop(j))
        rows.append(order)
        if j < k:
            swapped = list(range(count))
            swapped[j], swapped[k] = k, j
            rows.append(swapped)
    rows += [list(np.roll(np.arange(count), k)) for k in range(1, count)]
    rows.append(list(range(count))[::-1])
    wanted = np.unique(np.array(rows), axis=0)
    pair = cls[wanted] * (int(bits.max()) + 1) + bits[wanted]
    _, different = np.unique(pair, axis=0, return_index=True)
    chosen = wanted[different]
    yield cls[chosen], bits[chosen]


def _replaced(cls: Ints, bits: Ints, unused: Ints, choices: Ints) -> Iterator[Order]:
    """Take another device for a stage, another choice for one, or for all of one choice."""
    found = []
    for j in range(len(cls)):
        for c in unused:
            if c != cls[j]:
                found.append((_with(cls, j, c), bits))
        for b in choices:
            if b != bits[j]:
                found.append((cls, _with(bits, j, b)))
    for old in np.unique(bits):
        found += [(cls, np.where(bits == old, b, bits)) for b in choices if b != old]
    if found:
        yield np.array([own for own, _ in found]), np.array([own for _, own in found])


def _inserted(cls: Ints, bits: Ints, unused: Ints, choices: Ints) -> Order:
    """Add an unused device anywhere, of a choice that a stage beside it has, or of any."""
    found = [
        (np.insert(cls, j, c), np.insert(bits, j, b))
        for j in range(len(cls) + 1)
        for c in unused
        for b in (set(bits.tolist()) if len(set(bits.tolist())) > 1 else choices)
    ]
    return np.array([own for own, _ in found]), np.array([own for _, own in found])


def _with(row: Ints, j: int, value: int) -> Ints:
    changed = row.copy()
    changed[j] = value
    return changed
