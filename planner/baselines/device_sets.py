"""Which devices a partial pipeline has used: the states of `pipeedge`'s dynamic program.

A state's number is above that of every state it can come from; state 0 has used nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class DeviceSets:
    """States, and what follows when one more device of a class is used."""

    after: NDArray[np.int64]
    """[S, C] the next state, -1 where no device of the class is left."""


def num_sets(p: Problem) -> int:
    """Return how many sets of at most `max_stages` devices there are, equal ones counted as one."""
    ways = [1] + [0] * p.max_stages
    for cls in p.classes:
        ways = [sum(ways[max(0, t - cls.count) : t + 1]) for t in range(len(ways))]
    return sum(ways)


def every_set(p: Problem) -> DeviceSets:
    """Return all sets of devices: every order is covered."""
    tuples: list[tuple[int, ...]] = [()]
    for cls in p.classes:
        tuples = [(*t, n) for t in tuples for n in range(min(cls.count, p.max_stages - sum(t)) + 1)]
    index = {t: i for i, t in enumerate(sorted(tuples, key=lambda t: (sum(t), t)))}
    after = np.full((len(index), len(p.classes)), -1, dtype=np.int64)
    for used, i in index.items():
        for c in range(len(p.classes)):
            after[i, c] = index.get((*used[:c], used[c] + 1, *used[c + 1 :]), -1)
    return DeviceSets(after=after)


def in_a_row(p: Problem) -> DeviceSets:
    """Return the states of one row of devices, equal ones together, any of which may be skipped.

    A row of more devices than a plan may have keeps those with the most memory, and pinned ones.
    """
    devices = [(c, cls) for c, cls in enumerate(p.classes) for _ in cls.devices]
    by_room = sorted(
        range(len(devices)),
        key=lambda k: (devices[k][1].pinned is None, -devices[k][1].first.limit_bytes, k),
    )
    row = [devices[k][0] for k in sorted(by_room[: p.max_stages])]
    after = np.full((len(row) + 1, len(p.classes)), -1, dtype=np.int64)
    for k in range(len(row) - 1, -1, -1):  # the nearest one ahead is the last to be written
        after[: k + 1, row[k]] = k + 1
    return DeviceSets(after=after)
