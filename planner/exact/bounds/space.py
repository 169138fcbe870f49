"""Which devices a partial plan has used: the states that labels and bounds go by.

Few devices or kinds: every state is listed, and bounds know exactly which devices are left. Many:
a state gets its number when a label first reaches it, and bounds charge a price for each device
used instead (planner/exact/bounds/completion.py).

Nodes that are twins are used in one order: the second only once the first has a stage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem

MAX_STATES = 3000
"""Most states that are listed."""
MAX_WORK = 60e6
"""Most steps of the program over listed states: states x classes x layers^2 / 2."""

Used = tuple[int, ...]
"""Devices of each class that are used."""


class Space:
    """The states of a problem; state 0 is the start."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.counts = np.array([cls.count for cls in p.classes])
        self._most, self._max_stages = self.counts.tolist(), p.max_stages
        self.allowed = allowed_stages(p)
        self._before = _nodes_before(p)
        self.used: list[Used] = []
        self._index: dict[Used, int] = {}
        self._after: dict[tuple[int, int], int] = {}
        self.number((0,) * len(p.classes))
        self.listed = self._list_all()

    def number(self, used: Used) -> int:
        """Return the number of a state."""
        if used not in self._index:
            self._index[used] = len(self.used)
            self.used.append(used)
        return self._index[used]

    def after(self, state: int, c: int) -> int:
        """Return the state after one more device of a class, -1 if there is none."""
        found = self._after.get((state, c))
        if found is None:
            found = self._after[state, c] = self._next(self.used[state], c)
        return found

    def unused(self, state: int) -> NDArray[np.int64]:
        """[C] devices of each class that stages to come may use at most."""
        left = self.p.max_stages - sum(self.used[state])
        return np.minimum(self.counts - np.array(self.used[state]), left)

    @cached_property
    def next_states(self) -> NDArray[np.int64]:
        """[S, C] the state after one more device of a class, -1 if there is none; of all listed."""
        classes = len(self.p.classes)
        found = [[self.after(s, c) for c in range(classes)] for s in range(len(self.used))]
        return np.array(found, dtype=np.int64)

    def _next(self, used: Used, c: int) -> int:
        if used[c] >= self._most[c] or sum(used) >= self._max_stages:
            return -1
        before = self._before.get(c)
        if before is not None and not any(used[d] for d in before):
            return -1
        return self.number((*used[:c], used[c] + 1, *used[c + 1 :]))

    def _list_all(self) -> bool:
        """Number every state, those with fewer devices first, unless there are too many."""
        p = self.p
        most = min(MAX_STATES, MAX_WORK * 2 / (len(p.classes) * (p.num_layers + 1) ** 2))
        state, classes = 0, len(p.classes)
        while state < len(self.used):
            for c in range(classes):
                self.after(state, c)
            if len(self.used) > most:
                self.used = []
                self._index = {}
                self._after = {}
                self.number((0,) * len(p.classes))
                return False
            state += 1
        return True


def _nodes_before(p: Problem) -> dict[int, tuple[int, ...]]:
    """Return class -> the classes of the twin node one of which must be used before it."""
    before: dict[int, tuple[int, ...]] = {}
    for group in p.node_twins:
        for node, after in zip(group, group[1:], strict=False):
            for c in after:
                before[c] = node
    return before


def allowed_stages(p: Problem) -> NDArray[np.bool_]:
    """[C, L+1, L+1] whether pins and shared caches let a stage of a class hold layers [a, a')."""
    size = p.num_layers + 1
    table = np.zeros((len(p.classes), size, size), dtype=bool)
    upper = np.triu(np.ones((size, size), dtype=bool), 1)
    for c in range(len(p.classes)):
        table[c] = upper
        if p.is_restricted:
            for a, b in zip(*np.nonzero(upper), strict=True):
                table[c, a, b] = p.allowed(c, int(a), int(b))
    return table


def searched(p: Problem) -> tuple[Problem, Space]:
    """Return the problem to prove, and its states: itself, or with the nearest links."""
    space = Space(p)
    if space.listed:
        return p, space
    nearest = p.with_changes(nearest_links=True)
    if len(nearest.classes) < len(p.classes):
        return nearest, Space(nearest)
    return p, space


def with_true_links(true: Problem, nearest: Problem, a: Assignment) -> Assignment:
    """Return the plan with a true class for each stage: the one nearest to the stage before."""
    members: dict[int, list[int]] = {}
    of_device = {i: c for c, devices in enumerate(nearest.members) for i in devices}
    for c, devices in enumerate(true.members):
        members.setdefault(of_device[devices[0]], []).append(c)
    unused = [cls.count for cls in true.classes]
    hop = true.numbers(a.prefill_microbatch, a.decode_microbatch).hop_decode.total_s
    stages, last = [], -1
    for position, stage in enumerate(a.stages):
        options = [c for c in members[stage.cls] if unused[c]]
        ahead = {d for s in a.stages[position:] for d in members[s.cls]}
        hops = [float(hop[last, c]) if last >= 0 else 0.0 for c in options]
        near = [-_beside(true, unused, c, ahead) for c in options]
        # A short hop, then a node that has most of what comes next.
        chosen = min(zip(hops, near, options, strict=True))[2]
        unused[chosen] -= 1
        stages.append(replace(stage, cls=chosen))
        last = chosen
    return replace(a, stages=tuple(stages))


def _beside(true: Problem, unused: list[int], c: int, ahead: set[int]) -> int:
    """Return how many unused devices of the classes ahead are on a class's node."""
    node = true.classes[c].first.node
    return sum(unused[d] for d in ahead if true.classes[d].first.node == node)
