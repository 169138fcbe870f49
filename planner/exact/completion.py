"""Lower bounds on finishing a partial plan, for one pair, one kappa and its prices.

With prices lambda, mu a stage costs (1 + lambda) tp + (wS' + mu) td + theta omega, whatever else
the plan does; the cheapest way to finish from every state is a dynamic program over

    state s (how many devices of each class are used), last class c, layer boundary a

    B[s, c, a] = min over c', a' of  hop(c, c') + T[c', a, a'] + B[s + c', c', a']

T is the cheapest filling of a stage that fits its memory (embedding and head where they live). As P
is at least any stage so far, F >= cost + (A - rem lambda) P + (D's weight - rem mu) D + B, where
rem sums the prices of the devices still unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.exact.columns import Columns, priced
from llmpq.planner.exact.form import EVERYWHERE, Box, Form
from llmpq.planner.exact.relaxation import Prices
from llmpq.planner.problem import Floats, Problem

MAX_STATES = 1500
"""Largest space searched over all device orders; larger ones keep a class's devices together."""


class Space:
    """The states of a problem: tuples of used devices per class, numbered by their total."""

    def __init__(self, p: Problem) -> None:
        tuples: list[tuple[int, ...]] = [()]
        for cls in p.classes:
            tuples = [
                (*t, n) for t in tuples for n in range(min(cls.count, p.max_stages - sum(t)) + 1)
            ]
        self.used = sorted(tuples, key=lambda t: (sum(t), t))
        self.index = {t: i for i, t in enumerate(self.used)}
        classes = len(p.classes)
        self.after = np.full((len(self.used), classes), -1, dtype=np.int64)
        """[S, C] the state after one more device of a class, -1 if there is none left."""
        for i, t in enumerate(self.used):
            for c in range(classes):
                more = (*t[:c], t[c] + 1, *t[c + 1 :])
                self.after[i, c] = self.index.get(more, -1)
        counts = np.array([c.count for c in p.classes])
        self.unused = counts - np.array(self.used)
        self.allowed = _allowed(p)
        required = [c for c, cls in enumerate(p.classes) if cls.pinned is not None]
        self.complete = np.array([all(t[c] for c in required) for t in self.used])
        """[S] whether every pinned device has its stage."""


def num_states(p: Problem) -> int:
    """Return the size of the space over all device orders."""
    ways = [1] + [0] * p.max_stages  # of using so many devices
    for cls in p.classes:
        ways = [sum(ways[max(0, t - cls.count) : t + 1]) for t in range(len(ways))]
    return sum(ways)


class ChainSpace(Space):
    """States of plans that use the classes in one sequence, each class's devices in a row.

    Classes may be used in part or left out. State 0 is the start; others are (position, used before
    of this class, stages so far), the last left at 0 where a plan may use every device.
    """

    def __init__(self, p: Problem, sequence: Sequence[int]) -> None:
        classes = len(p.classes)
        counts = [p.classes[c].count for c in sequence]
        limited = p.max_stages < min(len(p.cluster.devices), p.num_layers)
        step = int(limited)
        states = [
            (k, used, stages)
            for k, count in enumerate(counts)
            for used in range(count)
            for stages in _stages_so_far(sum(counts[:k]), used, p.max_stages if limited else None)
        ]
        number = {state: i + 1 for i, state in enumerate(states)}
        self.after = np.full((len(states) + 1, classes), -1, dtype=np.int64)
        self.unused = np.zeros((len(states) + 1, classes), dtype=np.int64)
        self.unused[0] = [cls.count for cls in p.classes]
        self.complete = np.ones(len(states) + 1, dtype=bool)
        pinned = [k for k, c in enumerate(sequence) if p.classes[c].pinned is not None]
        for i, (k, used, stages) in enumerate([(-1, 0, 0), *states]):
            onward = stages < p.max_stages
            blocked = min((q for q in pinned if q > k), default=len(sequence))
            self.complete[i] = blocked == len(sequence)
            if k >= 0:
                left = p.classes[sequence[k]].count - used - 1
                self.unused[i, sequence[k]] = left
                if left and onward:
                    self.after[i, sequence[k]] = number[k, used + 1, stages + step]
            for later in range(k + 1, min(blocked + 1, len(sequence))) if onward else ():
                self.after[i, sequence[later]] = number[later, 0, stages + step]
                self.unused[i, sequence[later]] = p.classes[sequence[later]].count
            if k >= 0:
                for later in range(k + 1, len(sequence)):
                    self.unused[i, sequence[later]] = p.classes[sequence[later]].count
            self.unused[i] = np.minimum(self.unused[i], p.max_stages - stages)
        self.used = [(0,) * classes] * (len(states) + 1)
        self.allowed = _allowed(p)


def _stages_so_far(before: int, used: int, most: int | None) -> range:
    """How many stages a plan may have with the device after `used` ones of a class.

    `before`: the devices of earlier classes, of which it has none to all. No limit: not counted.
    """
    return range(1) if most is None else range(used + 1, min(before + used + 1, most) + 1)


def _allowed(p: Problem) -> np.ndarray:
    """[C, L+1, L+1] whether the pins let a stage of a class hold layers [a, a')."""
    size = p.num_layers + 1
    table = np.zeros((len(p.classes), size, size), dtype=bool)
    upper = np.triu(np.ones((size, size), dtype=bool), 1)
    pinned = any(cls.pinned for cls in p.classes)
    for c in range(len(p.classes)):
        table[c] = upper
        if pinned:
            for a, b in zip(*np.nonzero(upper), strict=True):
                table[c, a, b] = p.allowed(c, int(a), int(b))
    return table


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Stage costs and completion bounds at one kappa."""

    p: Problem
    form: Form
    prices: Prices
    columns: Columns
    space: Space
    box: Box = EVERYWHERE

    @cached_property
    def weights(self) -> tuple[Floats, Floats]:
        """[C] weights of tp and td in a stage's cost."""
        prefill = 1.0 + self.prices.prefill
        return prefill, self.form.s_weight(self.prices.kappa) + self.prices.decode

    @cached_property
    def base(self) -> list[list[Floats]]:
        """[C][m] -> [K] priced time of each count vector, infinite beyond the box."""
        classes = range(len(self.p.classes))
        return [[self._priced(c, k) for k in self.columns.counts] for c in classes]

    def _priced(self, c: int, counts: NDArray[np.int64]) -> Floats:
        x, (wp, wd) = self.form.numbers, self.weights
        tp, td = counts @ x.prefill_s[0, c], counts @ x.decode_s[0, c]
        inside = (tp <= self.box.p_high) & (td <= self.box.d_high)
        return np.where(inside, wp[c] * tp + wd[c] * td, np.inf)

    @cached_property
    def ends(self) -> Floats:
        """[C, 2] priced time of embedding and head."""
        x, (wp, wd) = self.form.numbers, self.weights
        return wp[:, None] * x.ends_prefill_s + wd[:, None] * x.ends_decode_s

    @cached_property
    def hops(self) -> Floats:
        """[C, C] cost of a hop."""
        x = self.form.numbers
        if not self.form.hops_in_sums:
            return np.zeros_like(x.hop_prefill_s)
        return x.hop_prefill_s + self.form.s_weight(self.prices.kappa) * x.hop_decode_s

    @cached_property
    def stage(self) -> Floats:
        """[C, L+1, L+1] T: cheapest stage of layers [a, a'), infinite where nothing fits."""
        layers, classes = self.p.num_layers, len(self.p.classes)
        table = np.full((classes, layers + 1, layers + 1), np.inf)
        capacity, ends = self.form.numbers.capacity, self.ends
        theta = self.p.theta
        for m in range(1, self.columns.most + 1):
            sizes = self.columns.num_bytes[m]
            omega = priced(self.columns.least[m], theta)
            starts = np.arange(len(omega))
            for c in range(classes):
                fits = np.searchsorted(sizes, capacity[c], side="right")
                mid = int(fits[0, 0])
                if mid:
                    filled = omega[:, :mid] + self.base[c][m][:mid]
                    table[c, starts, starts + m] = filled.min(axis=1)
                head, tail = omega[0], omega[-1]
                base, whole = self.base[c][m], m == layers
                table[c, 0, m] = _least(head, base, int(fits[1, int(whole)])) + ends[c, 0]
                if whole:
                    table[c, 0, m] += ends[c, 1]
                else:
                    last = _least(tail, base, int(fits[0, 1])) + ends[c, 1]
                    if len(omega) > 1:
                        table[c, layers - m, layers] = last
        table[~self.space.allowed] = np.inf
        return table

    @cached_property
    def finish(self) -> Floats:
        """[S, C, L+1] B: cheapest way to finish after a stage of class c ends at a boundary."""
        space, layers, classes = self.space, self.p.num_layers, len(self.p.classes)
        table = np.full((len(space.used), classes, layers + 1), np.inf)
        table[space.complete, :, layers] = 0.0
        hops, stage = self.hops, self.stage
        for s in range(len(space.used) - 1, -1, -1):
            for c in range(classes):
                after = space.after[s, c]
                if after < 0:
                    continue
                enter = (stage[c] + table[after, c][None, :]).min(axis=1)
                table[s] = np.minimum(table[s], hops[:, c, None] + enter[None, :])
        return table

    @cached_property
    def remaining(self) -> tuple[Floats, Floats]:
        """[S] weights of P and D that the unused devices have not priced."""
        prefill, decode = self._unpriced
        return np.clip(prefill, 0.0, None), np.clip(decode, 0.0, None)

    @cached_property
    def overpriced(self) -> Floats:
        """[S] what prices beyond the weights cost at most, at the box's upper bounds; <= 0."""
        prefill, decode = self._unpriced
        total = np.zeros(len(prefill))
        for weight, high in ((prefill, self.box.p_high), (decode, self.box.d_high)):
            over = np.clip(weight, None, 0.0)
            total += over * high if np.isfinite(high) else 0.0
        return total

    @cached_property
    def _unpriced(self) -> tuple[Floats, Floats]:
        unused = self.space.unused
        prefill = self.form.a - unused @ self.prices.prefill
        decode = self.form.d_weight(self.prices.kappa) - unused @ self.prices.decode
        return prefill, decode

    @cached_property
    def value(self) -> float:
        """A lower bound of F over all plans of the pair."""
        space = self.space
        best = np.inf
        for c in range(len(self.p.classes)):
            after = space.after[0, c]
            if after >= 0:
                best = min(best, float((self.stage[c, 0] + self.finish[after, c]).min()))
        rest_p, rest_d = self.remaining
        floor = rest_p[0] * self.box.p_low + rest_d[0] * self.box.d_low
        return best + float(floor + self.overpriced[0])

    def greedy(self) -> list[tuple[int, int, int]]:
        """Return (class, start, end) of the stages of a plan that attains `value`."""
        space, layers = self.space, self.p.num_layers
        state, last, a = 0, -1, 0
        found: list[tuple[int, int, int]] = []
        while a < layers:
            best = (np.inf, -1, -1)
            for c in range(len(self.p.classes)):
                after = space.after[state, c]
                if after < 0:
                    continue
                hop = 0.0 if last < 0 else float(self.hops[last, c])
                costs = self.stage[c, a] + self.finish[after, c] + hop
                end = int(np.argmin(costs))
                best = min(best, (float(costs[end]), c, end))
            found.append((best[1], a, best[2]))
            state, last, a = int(space.after[state, best[1]]), best[1], best[2]
        return found

    def cheapest(self, c: int, start: int, end: int) -> tuple[int, ...]:
        """Return the choices of the stage that T prices."""
        m, layers = end - start, self.p.num_layers
        room = self.form.numbers.capacity[c, int(start == 0), int(end == layers)]
        fits = int(np.searchsorted(self.columns.num_bytes[m], room, side="right"))
        omega = priced(self.columns.least[m][start, :fits], self.p.theta)
        return self.columns.choices(start, m, int(np.argmin(omega + self.base[c][m][:fits])))


def _least(omega: Floats, base: Floats, fits: int) -> float:
    """Cheapest of the first `fits` columns, infinite if there is none."""
    return float((omega[:fits] + base[:fits]).min()) if fits else float("inf")
