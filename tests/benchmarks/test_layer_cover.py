"""Helix's objective: the largest flow is the thinnest layer, and the best cover is proven."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from lib.layer_cover import best_cover, covered_rate

pytestmark = pytest.mark.pure

Range = tuple[str, int, int]


def _max_flow(rates: dict[str, dict[int, float]], ranges: Sequence[Range], layers: int) -> float:
    """Augmenting paths through nodes; a node may be used from any layer of its range on."""
    ends = [start + length for _, start, length in ranges]
    room: dict[tuple[int, int], float] = {}
    source, sink = 2 * len(ranges), 2 * len(ranges) + 1
    for n, (kind, start, length) in enumerate(ranges):
        room[2 * n, 2 * n + 1] = rates[kind][length]
        if start == 0:
            room[source, 2 * n] = 1e9
        if ends[n] == layers:
            room[2 * n + 1, sink] = 1e9
        for other, (_, first, _) in enumerate(ranges):
            if first <= ends[n] < ends[other]:
                room[2 * n + 1, 2 * other] = 1e9
    total = 0.0
    while True:
        before, queue = {source: source}, [source]
        for at in queue:
            for (a, b), left in list(room.items()):
                if a == at and left > 1e-9 and b not in before:
                    before[b] = at
                    queue.append(b)
        if sink not in before:
            return total
        path, at = [], sink
        while at != source:
            path.append((before[at], at))
            at = before[at]
        least = min(room[edge] for edge in path)
        for a, b in path:
            room[a, b] -= least
            room[b, a] = room.get((b, a), 0.0) + least
        total += least


def _problem(seed: int) -> tuple[dict[str, dict[int, float]], dict[str, int], int]:
    draw = random.Random(seed)
    layers = draw.randint(3, 6)
    rates = {}
    for kind in ("A", "B"):
        one = draw.uniform(50, 100)
        rates[kind] = {k: one / k**1.2 for k in range(1, draw.randint(1, 3) + 1)}
    return rates, {"A": draw.randint(1, 2), "B": draw.randint(1, 2)}, layers


@pytest.mark.parametrize("seed", range(40))
def test_the_thinnest_layer_is_the_largest_flow(seed: int) -> None:
    rates, counts, layers = _problem(seed)
    draw = random.Random(seed)
    ranges = []
    for kind in [k for k, n in counts.items() for _ in range(2 * n)]:
        length = draw.choice(list(rates[kind]))
        ranges.append((kind, draw.randint(0, layers - length), length))
    assert _max_flow(rates, ranges, layers) == pytest.approx(
        covered_rate(rates, tuple(ranges), layers)
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_best_cover_is_that_of_all(seed: int) -> None:
    rates, counts, layers = _problem(seed)
    nodes = [kind for kind, n in counts.items() for _ in range(n)]
    each = [[(kind, s, k) for k in rates[kind] for s in range(layers - k + 1)] for kind in nodes]
    best = max(covered_rate(rates, ranges, layers) for ranges in itertools.product(*each))
    found = best_cover(rates, counts, layers, time_limit_s=60)
    assert found.rate == pytest.approx(best, rel=1e-4)
    assert found.bound >= best * (1 - 1e-9)
    if best:
        assert found.gap <= 1e-4
