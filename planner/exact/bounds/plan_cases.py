"""Cases of plans that are bounded apart: on one island of quick links, of few or many stages.

Islands: sets of devices with quick links among them and slow ones to all others.

A plan stays on one island, or some message of it crosses a slow link and occupies it: then no phase
is quicker than that. Each case by itself has a far better bound than both together.

Cases that every plan falls into one of: its island, or that it crosses; how many stages it has.

With so many stages a plan has so many hops at least, and with at most so many some stage has so
many layers: each case by itself has a far better bound than all together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.problem.problem import Floats, Problem

SLOWER = 4.0
"""How many times slower than the links of an island those between islands are at least."""


@dataclass(frozen=True, kw_only=True)
class Islands:
    """Devices of each class on each island, and which hops between classes cross."""

    counts: NDArray[np.int64]
    """[I, C]; of islands that are alike one stands for all."""
    crosses: NDArray[np.bool_]
    """[C, C]."""
    sizes: NDArray[np.int64]
    """Devices of every island, those that are alike counted, too."""


def find_islands(p: Problem) -> Islands | None:
    """Return the islands of a cluster, None where all links are about equally quick."""
    classes = len(p.classes)
    per_byte = np.full((classes, classes), np.nan)
    for ends, terms in p.class_links.terms.items():
        per_byte[ends] = terms[:, 2].min()
    known = np.array(sorted(set(per_byte[np.isfinite(per_byte)].tolist())))
    if len(known) < 2 or known[0] <= 0:
        return None
    ratios = known[1:] / known[:-1]
    widest = int(np.argmax(ratios))
    if ratios[widest] < SLOWER:
        return None
    slow = np.isfinite(per_byte) & (per_byte > known[widest] * np.sqrt(ratios[widest]))
    near = _connected(~slow & np.isfinite(per_byte))
    found: list[NDArray[np.int64]] = []
    sizes: list[int] = []
    own, most = np.eye(classes, dtype=np.int64), np.array([cls.count for cls in p.classes])
    for c in range(classes):
        if not near[c, :c].any():
            others = np.delete(near[c], c).any()
            # Equal devices with slow links among them are an island each.
            apart = bool(slow[c, c]) and not others
            found.append(own[c] if apart else most * (near[c] | (own[c] > 0)))
            sizes += [1] * int(most[c]) if apart else [int(found[-1].sum())]
    crosses = ~(near | np.eye(classes, dtype=bool)) | (np.eye(classes, dtype=bool) & slow)
    if not crosses.any():
        return None
    return Islands(counts=np.array(found), crosses=crosses, sizes=np.array(sizes))


def _connected(near: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which classes are joined by quick links, over others, too."""
    joined = near | near.T
    for c in range(len(joined)):
        joined |= joined[:, c, None] & joined[None, c]
    return joined


MOST_CASES = 10
"""Ranges of the number of stages."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is known of the plans of a case."""

    counts: Floats
    """[C] devices of each class that a plan may use."""
    most: int
    """Largest number of stages."""
    fewest: int = 1
    island: int | None = None
    """The island on which plans stay."""
    crosses: bool = False
    """Whether some message crosses between islands."""


def cases_of(p: Problem, islands: Islands | None) -> list[Case]:
    """Return one case for each island, if there are any, and one for all plans, or all that cross.

    The last case is the one of several islands, or of everything.
    """
    counts = np.array([min(c.count, p.max_stages) for c in p.classes], dtype=float)
    whole = Case(counts=counts, most=p.max_stages, crosses=islands is not None)
    if islands is None:
        return [whole]
    own = np.minimum(islands.counts, counts)
    found = [
        Case(counts=row, most=min(p.max_stages, int(row.sum())), island=k)
        for k, row in enumerate(own)
    ]
    return found if p.max_stages == 1 else [*found, replace(whole, fewest=2)]


def in_memory(cases: Sequence[Case], roomy: NDArray[np.int64], layers: int) -> list[Case]:
    """Leave out cases whose devices cannot hold all layers, and numbers of stages too small for it.

    The last case stays. roomy: [C, 2, 2] layers for which a device has memory.
    """
    found: list[Case] = []
    for case in cases:
        some = case.counts > 0
        whole = np.full((1, int(some.sum())), np.inf)
        for fewest in range(case.fewest, case.most + 1):
            exactly = replace(case, fewest=fewest, most=fewest)
            if _in_memory(whole, roomy[some], exactly)[0] >= layers:
                found.append(replace(case, fewest=fewest))
                break
    return found or [cases[-1]]


def by_stages(cases: Sequence[Case], hops_s: Sequence[Floats], step_s: float) -> list[Case]:
    """Cut cases where one stage more costs much in hops.

    hops_s: of each case, [most] what the hops of 1, 2, ... stages cost at least.
    step_s: what the plans of a case may differ by in it, in seconds.
    """
    found: list[Case] = []
    for case, cost in zip(cases, hops_s, strict=True):
        # The first hop is a step of its own: it occupies a link, too.
        several = min(max(case.fewest, 2), case.most)
        step = max(step_s, float(cost[case.most - 1] - cost[several - 1]) / MOST_CASES)
        low = case.fewest
        while low <= case.most:
            high = low
            while high < case.most and cost[high] - cost[low - 1] <= step:
                high += 1
            found.append(replace(case, fewest=low, most=high))
            low = high + 1
    return found


def most_priced(prices: Floats, counts: Floats | NDArray[np.int64], most: float) -> float:
    """Return the largest sum of prices of `most` devices, `counts` of each class at most."""
    order = np.argsort(-prices, kind="stable")
    held = np.asarray(counts, dtype=float)[order]
    taken = np.clip(most - (np.cumsum(held) - held), 0, held)
    return float(prices[order] @ taken)


def least_hops(case: Case, fewest: int, islands: Islands | None, hop_s: Floats) -> Floats:
    """[n] the least that the hops of a plan of so many stages cost together.

    hop_s: [n, C, C], infinite where no hop can be.
    """
    some = case.counts > 0
    among = hop_s[:, some][:, :, some]
    if fewest < 2:
        return np.zeros(len(hop_s))
    if islands is None:
        return np.asarray((fewest - 1) * among.min(axis=(1, 2)))
    crosses = islands.crosses[some][:, some]
    inner = np.where(crosses, np.inf, among).min(axis=(1, 2))
    if case.island is not None:
        return np.asarray((fewest - 1) * inner)
    crossing = np.where(crosses, among, np.inf).min(axis=(1, 2))
    # As many stages as there are take so many islands at least.
    held = np.cumsum(np.sort(islands.sizes)[::-1])
    visits = max(2, int(np.searchsorted(held, fewest)) + 1)
    visits = min(visits, fewest)
    stays = fewest - visits
    cheaper = np.minimum(inner, crossing)
    return np.asarray((visits - 1) * crossing + (stays * cheaper if stays else 0.0))


def quickest_hop(case: Case, islands: Islands | None, hop_s: Floats) -> Floats:
    """[n] the least that one hop of a plan of several stages takes, of those it must have.

    hop_s: [n, C, C], infinite where no hop can be.
    """
    some = case.counts > 0
    among = hop_s[:, some][:, :, some]
    if islands is not None:
        crosses = islands.crosses[some][:, some]
        among = np.where(crosses == (case.island is None), among, np.inf)
    return np.asarray(among.min(axis=(1, 2)))


def least_slowest(
    case: Case, layer_s: Floats, ends_s: Floats, layers: int, roomy: NDArray[np.int64]
) -> Floats:
    """[n] a time that the slowest stage takes at least.

    The `most` devices that hold most in it must hold all layers, and a device with embedding or
    head holds fewer for it. layer_s: [n, C] a layer at its quickest; ends_s: [n, C, 2]; roomy:
    [C, 2, 2] layers for which a device has memory, as first stage or not, last or not.
    """
    some = case.counts > 0
    once, ends = np.maximum(layer_s[:, some], 1e-300), ends_s[:, some]
    single = (once[:, :, None] + ends).min(axis=1).max(axis=1)
    fewer = np.floor(ends / once[:, :, None] * (1 - 1e-9)).min(axis=1)
    lost = fewer.sum(axis=1) if case.fewest >= 2 else fewer.max(axis=1)
    steps: Floats = np.arange(1.0, layers + 1)[None, :, None] * once[:, None, :]
    times: Floats = np.sort(steps.reshape(len(once), -1), axis=1)
    # Embedding and head take of the time, not of the layers there is memory for. With them a stage
    # may take longer than all layers on the quickest device: beyond that time proves nothing.
    highest = steps[:, -1].min(axis=1)
    in_time = np.minimum(times, highest[:, None])
    by_time = _first(in_time, once, lambda whole: _of_most(whole, case) - lost >= layers)
    by_memory = _first(times, once, lambda whole: _in_memory(whole, roomy[some], case) >= layers)
    return np.asarray(np.maximum(single, np.maximum(by_time, by_memory)) * (1 - 1e-9))


def _first(times: Floats, once: Floats, enough: Callable[[Floats], NDArray[np.bool_]]) -> Floats:
    """[n] the first of times [n, T] at which as many whole layers as each class has are enough.

    At all times from some one on they are, at the last if at none.
    """
    low, high = np.full(len(once), -1), np.full(len(once), times.shape[1] - 1)
    rows = np.arange(len(once))
    while (high - low > 1).any():
        middle = (low + high) // 2
        whole = np.floor(times[rows, np.maximum(middle, 0)][:, None] / once * (1 + 1e-9))
        found, wide = enough(whole), high - low > 1
        high = np.where(wide & found, middle, high)
        low = np.where(wide & ~found, middle, low)
    return np.asarray(times[rows, high])


def _in_memory(whole: Floats, roomy: NDArray[np.int64], case: Case) -> Floats:
    """[n] the most layers that a case's devices hold, `whole` [n, C] of each class in time.

    Some device is the first stage, and some the last, with a layer at least.
    """
    held = np.minimum(whole[:, :, None, None], roomy)
    changes = np.where(held >= 1, held - held[:, :, :1, :1], -np.inf)
    several = _of_most(held[:, :, 0, 0], case)
    several = several + changes[:, :, 1, 0].max(axis=1) + changes[:, :, 0, 1].max(axis=1)
    if case.fewest >= 2:
        return np.asarray(several)
    return np.asarray(np.maximum(several, held[:, :, 1, 1].max(axis=1)))


def _of_most(layers: Floats, case: Case) -> Floats:
    """[n] the most layers that the devices of a case hold, [n, C] of each class."""
    order = np.argsort(-layers, axis=1, kind="stable")
    counts = case.counts[case.counts > 0]
    held = np.take_along_axis(np.broadcast_to(counts, layers.shape), order, axis=1)
    taken = np.clip(case.most - (np.cumsum(held, axis=1) - held), 0, held)
    return np.asarray((np.take_along_axis(layers, order, axis=1) * taken).sum(axis=1))


@dataclass(frozen=True, kw_only=True)
class Box:
    """A range of P and D in seconds: what a part of the search may assume of the slowest stages."""

    p_low: float = 0.0
    p_high: float = math.inf
    d_low: float = 0.0
    d_high: float = math.inf
    island: int | None = None
    """The island on which plans stay (planner/exact/bounds/plan_cases.py)."""
    fewest: int = 1
    """Smallest number of stages."""
    most: int | None = None
    """Largest number of stages, None for any."""
    hops_prefill_s: float = 0.0
    """What all hops of prefill take together at least."""
    hops_decode_s: float = 0.0

    def with_limits(self, limits: dict[str, float]) -> Box:
        """Return the box with some limits of P and D replaced."""
        return replace(self, **limits)  # type: ignore[arg-type]


EVERYWHERE = Box()
