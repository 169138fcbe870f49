"""Islands: sets of devices with quick links among them and slow ones to all others.

A plan stays on one island, or some message of it crosses a slow link and occupies it: then no phase
is quicker than that. Each case alone has a far better bound than both together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.problem.problem import Problem

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
            # Equal devices with slow links among them alone are an island each.
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
