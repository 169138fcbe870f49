"""Helix's objective where links do not bind: most tokens/s through nodes that hold layer ranges.

Each node holds one range of consecutive layers, and serves fewer tokens/s the longer it is. A token
passes nodes so that every layer is computed once, and a node may be used for the last part of its
range only. The largest flow is then the smallest over layers of the sum of the rates of the nodes
that hold it: if every layer has a node left, the node that reaches furthest from layer 0 on leads
to one that holds the next layer, and so on to the end; so what cuts all ways is the nodes of some
layer.

    maximise t      sum over nodes with layer l of T(k) >= t  for every layer l

Rates above t are worth t. Nodes of a kind are counted, not named. A rate is proven too high
where no counts of ranges, whole numbers, cover all layers with it (HiGHS).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np

STEP = 1e-5
"""Relative step above the best cover that the proof leaves open."""
SHARE = 0.25
"""Of the time that is left, for one try."""
Rates = Mapping[int, float]
"""Layers on a node -> tokens/s."""


@dataclass(frozen=True, kw_only=True)
class Cover:
    """Ranges of layers, and how good they are known to be."""

    rate: float
    bound: float
    """No placement has more tokens/s."""
    ranges: tuple[tuple[str, int, int], ...]
    """(kind, first layer, layers)"""
    seconds: float

    @property
    def gap(self) -> float:
        """How far the bound is above the rate, as a share of it."""
        return self.bound / self.rate - 1 if self.bound else 0.0


def covered_rate(
    rates: Mapping[str, Rates], ranges: tuple[tuple[str, int, int], ...], layers: int
) -> float:
    """Return the largest flow through nodes of these ranges."""
    total = np.zeros(layers)
    for kind, start, length in ranges:
        total[start : start + length] += rates[kind][length]
    return float(total.min())


def best_cover(
    rates: Mapping[str, Rates], counts: Mapping[str, int], layers: int, *, time_limit_s: float
) -> Cover:
    """Return the best cover found in the time, and a bound of all."""
    start_s = time.perf_counter()
    ranges = _one_behind_the_other(rates, counts, layers)
    best = covered_rate(rates, ranges, layers) if ranges else 0.0
    bound = max(best, _area_bound(rates, counts, layers))
    if sum(n * max(rates[kind]) for kind, n in counts.items()) < layers:
        bound = 0.0  # all nodes together have no room for the layers
    target = _next(best, bound)
    while bound > best * (1 + STEP):
        left_s = time_limit_s - (time.perf_counter() - start_s)
        if left_s <= 0:
            break
        found = _covers(rates, counts, layers, target, max(left_s * SHARE, 1.0))
        if found is None:  # unknown: what is nearer to the bound may be proven
            target = (target + bound) / 2
            if bound - target < STEP * bound:
                break
            continue
        if found:
            ranges, best = found, covered_rate(rates, found, layers)
        else:
            bound = target
        target = _next(best, bound)
    return Cover(rate=best, bound=bound, ranges=ranges, seconds=time.perf_counter() - start_s)


def _next(best: float, bound: float) -> float:
    """Return the rate to try: halfway, or where the two are near just above the best."""
    return (best + bound) / 2 if bound > 1.02 * best else best * (1 + STEP)


def _one_behind_the_other(
    rates: Mapping[str, Rates], counts: Mapping[str, int], layers: int
) -> tuple[tuple[str, int, int], ...]:
    """Return the best cover in which no two nodes hold the same layer."""
    for rate in sorted({t for own in rates.values() for t in own.values()}, reverse=True):
        longest = {
            kind: max([k for k, t in rates[kind].items() if t >= rate], default=0)
            for kind in counts
        }
        if sum(n * longest[kind] for kind, n in counts.items()) < layers:
            continue
        found, at = [], 0
        for kind, count in counts.items():
            for _ in range(count):
                length = min(longest[kind], layers - at)
                if length > 0:
                    # Of fewer layers a node may be slower than of more: take those it is best at.
                    found.append((kind, at, length))
                    at += length
        if covered_rate(rates, tuple(found), layers) >= rate:
            return tuple(found)
    return ()


def _area_bound(rates: Mapping[str, Rates], counts: Mapping[str, int], layers: int) -> float:
    """Return the highest t that the nodes' layers times rates, each at most t, can have."""
    low, high = 0.0, max(t for own in rates.values() for t in own.values()) * sum(counts.values())
    for _ in range(200):
        t = (low + high) / 2
        area = sum(
            n * max(k * min(r, t) for k, r in rates[kind].items()) for kind, n in counts.items()
        )
        low, high = (t, high) if area >= layers * t * (1 - 1e-12) else (low, t)
    return high * (1 + 1e-9)


def _covers(
    rates: Mapping[str, Rates],
    counts: Mapping[str, int],
    layers: int,
    target: float,
    time_limit_s: float,
) -> tuple[tuple[str, int, int], ...] | None:
    """Return ranges that cover all layers with a rate; empty if there are none, None if unknown."""
    columns = [
        (kind, start, length, share)
        for kind in counts
        for length, share in _useful(rates[kind], target).items()
        for start in range(layers - length + 1)
    ]
    solver = highspy.Highs()
    for name, value in (("output_flag", False), ("threads", 1), ("time_limit", time_limit_s)):
        solver.setOptionValue(name, value)
    for number, (kind, *_) in enumerate(columns):
        solver.addVar(0, counts[kind])
        solver.changeColIntegrality(number, highspy.HighsVarType.kInteger)
    for layer in range(layers):
        own = [
            n for n, (_, start, length, _) in enumerate(columns) if start <= layer < start + length
        ]
        shares = np.array([columns[n][3] for n in own])
        solver.addRow(1.0, highspy.kHighsInf, len(own), np.array(own, dtype=np.int32), shares)
    for kind, count in counts.items():
        own = [n for n, column in enumerate(columns) if column[0] == kind]
        index = np.array(own, dtype=np.int32)
        solver.addRow(-highspy.kHighsInf, count, len(own), index, np.ones(len(own)))
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return ()
    if status != highspy.HighsModelStatus.kOptimal:
        return None
    values = solver.getSolution().col_value
    found = [
        (kind, start, length)
        for (kind, start, length, _), value in zip(columns, values, strict=True)
        for _ in range(round(value))
    ]
    return tuple(sorted(found, key=lambda one: one[1]))


def _useful(rates: Rates, target: float) -> dict[int, float]:
    """Return the share of the target that a node has with so many layers, where worth having.

    A longer range with as large a share is as good. A share that is not below one is one.
    """
    shares = {k: min(1.0, t / target) for k, t in rates.items()}
    return {
        k: share
        for k, share in shares.items()
        if not any(k2 > k and s2 >= share for k2, s2 in shares.items())
    }
