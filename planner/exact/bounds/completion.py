"""Lower bounds on finishing a partial plan, for one pair, one kappa and its prices.

F, P, D, the times tp and td of a stage, and A, wS: planner/evaluate/objective.py. A pair is of
micro-batch sizes, a box bounds P and D (plan_cases.py), prices are of relaxation.py.

With prices lambda, mu a stage costs tp + wS' td + lambda tp' + mu td' + theta omega, whatever else
the plan does (tp', td': means over micro-batches), and the cheapest way to finish from every
state is a dynamic program over

    state s (devices used of each class), last class c, layer boundary a

    B[s, c, a] = min over c', a' of  hop(c, c') + T[c', a, a'] + B[s + c', c', a']

As P is at least any stage so far, F >= cost + (A - rem lambda) P + (D's weight - rem mu) D + B,
where rem sums the prices of the devices still unused. Where states are too many to list, s is left
out of the program and a device of class c costs a rent r_c instead:

    B[s, c, a] >= B_r[c, a] - sum_c r_c unused_c(s)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.evaluate.objective import Form
from llmpq.planner.exact.bounds.columns import (
    Columns,
    KeptPairs,
    Weights,
    assigned,
    column_costs,
    layer_costs,
    priced,
    stages_by_price,
    stages_by_table,
)
from llmpq.planner.exact.bounds.plan_cases import EVERYWHERE, Box, Islands, most_priced
from llmpq.planner.exact.bounds.relaxation import Prices
from llmpq.planner.exact.bounds.space import Space
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Floats, Problem
from llmpq.planner.problem.work_clock import spend

RENT_STEPS = 25
"""Steps of the search for rents."""
FEW_ENTRIES = 20_000
"""Entries (classes x layers x states) of a program up to which each step computes all classes at
once; in larger ones it computes a class at a time, and only where its stages can end."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What the prices of the devices unused in a state leave of the weights of P and D."""

    p: float
    d: float
    over: float
    """What prices beyond the weights cost at most, at the box's upper bounds; <= 0."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Stage costs and completion bounds at one kappa."""

    p: Problem
    form: Form
    prices: Prices
    kept: KeptPairs | None
    """The table of columns, None where it would be too large."""
    space: Space
    box: Box = EVERYWHERE
    islands: Islands | None = None
    aim: float = math.inf
    """A value that the bound had better reach: what steps towards good rents go by."""
    _rests: dict[int, Rest] = field(default_factory=dict)

    @property
    def columns(self) -> Columns | None:
        """The table of columns, if there is one."""
        return None if self.kept is None else self.kept.columns

    @cached_property
    def weights(self) -> Weights:
        """What time costs in a stage."""
        s_weight = self.form.s_weight(self.prices.kappa)
        return Weights(
            prefill=self.prices.prefill, decode=self.prices.decode, every_decode=s_weight
        )

    @cached_property
    def hops(self) -> Floats:
        """[C, C] cost of a hop."""
        x, box = self.form.numbers, self.box
        cost = np.zeros_like(x.hop_prefill.total_s)
        if self.form.hops_in_sums:
            cost = x.hop_prefill.total_s + self.weights.every_decode * x.hop_decode.total_s
        barred = (x.hop_prefill.held_s > box.p_high) | (x.hop_decode.held_s > box.d_high)
        if box.island is not None and self.islands is not None:
            barred = barred | self.islands.crosses
        return np.asarray(np.where(barred, np.inf, cost))

    @cached_property
    def stage(self) -> Floats:
        """[C, L+1, L+1] T: cheapest stage of layers [a, a'), infinite where nothing fits."""
        if self.kept is not None:
            table = stages_by_table(self.p, self.form, self.weights, self.box, self.kept)
            spend(60, 8 * len(table) * len(self.kept.columns.lengths))
        else:
            rho = self.prices.memory
            table = stages_by_price(self.p, self.form, self.weights, self.box, rho)
            spend(200 * len(table), 60 * table.size)
        table[~self.space.allowed] = np.inf
        if self.box.island is not None and self.islands is not None:
            table[self.islands.counts[self.box.island] == 0] = np.inf
        return table

    @cached_property
    def after(self) -> NDArray[np.int64]:
        """[S, C] the state after one more device; the one beyond the last cannot go on.

        Where states are not listed there is one, which every device leaves as it is.
        """
        classes = len(self.p.classes)
        if not self.space.listed:
            return np.zeros((1, classes), dtype=np.int64)
        table = self.space.next_states
        return np.where(table < 0, len(table), table)

    @cached_property
    def rents(self) -> Floats:
        """[C] what a device costs where states are not listed, zero where they are.

        Steps along what the cheapest plan uses beyond the devices that there are.
        """
        classes = len(self.p.classes)
        best, rents = -math.inf, np.zeros(classes)
        if self.space.listed:
            return rents
        counts, chosen, step = self.space.unused(0), rents, 1.0
        for _ in range(RENT_STEPS):
            table, enter = self._program(rents)
            value = float(enter[0, :, 0].min() - most_priced(rents, counts, self.most))
            if not math.isfinite(value):
                return rents
            if value > best:
                best, chosen = value, rents
            else:
                step /= 1.5
            used = self._walk_uses(table, rents)
            over = used - counts
            length = float(over @ over)
            if not length or not (over > 0).any():
                break
            aim = self.aim if math.isfinite(self.aim) else value + 0.02 * abs(value)
            rents = np.clip(
                rents + step * max(aim - value, 1e-3 * abs(value)) / length * over, 0, None
            )
        return chosen

    def _program(self, rents: Floats) -> tuple[Floats, Floats]:
        """Return B [S+1, C, L+1] and the cheapest next stage of each class [S, C, L], no hop."""
        layers, after = self.p.num_layers, self.after
        states, classes = after.shape
        spend(8 * layers, classes * layers * states * (layers / 2 + classes))
        # States are the last axis here: what is least of a few lengths is found for all at once.
        table = np.full((classes, layers + 1, states + 1), np.inf)
        table[:, layers, :states] = self._ended[None]
        enter = np.full((classes, layers, states), np.inf)
        onward = np.empty((classes, layers + 1, states))
        hops, each, next_state = self.hops[:, :, None], np.arange(classes)[:, None], after.T
        stage = self.stage + rents[:, None, None]
        few = classes * layers * states <= FEW_ENTRIES
        ends, some = _ends(stage), np.asarray(np.isfinite(stage).any(axis=2))
        for a in range(layers, -1, -1):
            if a < layers:
                if few:
                    ahead = onward[:, a + 1 :] + stage[:, a, a + 1 :, None]
                    np.minimum.reduce(ahead, axis=1, out=enter[:, a])
                for c in () if few else np.flatnonzero(some[:, a]).tolist():
                    near = slice(*ends[c][a])
                    ahead = onward[c, near] + stage[c, a, near, None]
                    np.minimum.reduce(ahead, axis=0, out=enter[c, a])
                table[:, a, :states] = (hops + enter[:, a]).min(axis=1)
            if not self.space.listed:
                table[:, a, states] = table[:, a, 0]
            onward[:, a] = table[each, a, next_state]
        return np.ascontiguousarray(table.transpose(2, 0, 1)), enter.transpose(2, 0, 1)

    @property
    def most(self) -> int:
        """Largest number of stages."""
        return self.p.max_stages if self.box.most is None else self.box.most

    @cached_property
    def _ended(self) -> Floats:
        """[S] zero where a plan may end in a state, infinite with too few or many stages."""
        if not self.space.listed:
            return np.zeros(1)
        stages = np.array([sum(used) for used in self.space.used])
        within = (stages >= self.box.fewest) & (stages <= self.most)
        return np.where(within, 0.0, np.inf)

    def _left(self, state: int) -> int:
        """Return how many stages may follow a state."""
        return max(0, self.most - sum(self.space.used[state]))

    @cached_property
    def _tables(self) -> tuple[Floats, Floats]:
        return self._program(self.rents)

    def _walk_uses(self, table: Floats, rents: Floats) -> NDArray[np.int64]:
        """[C] devices that the cheapest plan uses where states are not listed."""
        used = np.zeros(len(rents), dtype=np.int64)
        a, last = 0, -1
        while a < self.p.num_layers:
            costs = self.stage[:, a] + rents[:, None] + table[0]
            if last >= 0:
                costs = costs + self.hops[last][:, None]
            last, a = (int(k) for k in np.unravel_index(int(np.argmin(costs)), costs.shape))
            used[last] += 1
        return used

    def finish(self, state: int, last: int) -> Floats:
        """[L+1] the cheapest way to finish after a stage of class `last` in a state."""
        table = self._tables[0]
        if self.space.listed:
            return np.asarray(table[state, last])
        rent = most_priced(self.rents, self.space.unused(state), self._left(state))
        return np.asarray(table[0, last] - rent)

    def rest(self, state: int) -> Rest:
        """Return the weights of P and D that the unused devices have not priced."""
        if state not in self._rests:
            unused, left, box = self._unused(state), self._left(state), self.box
            weight = self.form.d_weight(self.prices.kappa)
            p = self.form.a - most_priced(self.prices.prefill, unused, left)
            d = weight - most_priced(self.prices.decode, unused, left)
            over = sum(
                weight * high
                for weight, high in ((p, box.p_high), (d, box.d_high))
                if weight < 0 and math.isfinite(high)
            )
            self._rests[state] = Rest(p=max(p, 0.0), d=max(d, 0.0), over=over)
        return self._rests[state]

    def _unused(self, state: int) -> NDArray[np.int64]:
        """[C] unused devices that stages to come may use at most."""
        unused = self.space.unused(state)
        if self.box.island is None or self.islands is None:
            return unused
        here = self.islands.counts[self.box.island] - np.array(self.space.used[state])
        return np.minimum(unused, np.maximum(here, 0))

    @cached_property
    def constant(self) -> float:
        """What every plan of the box costs beside its stages and hops."""
        rest = self.rest(0)
        rent = most_priced(self.rents, self.space.unused(0), self.most)
        return rest.p * self.box.p_low + rest.d * self.box.d_low + rest.over - rent

    @cached_property
    def value(self) -> float:
        """A lower bound of F over all plans of the pair in the box."""
        return float((self._tables[1][0, :, 0]).min()) + self.constant

    @cached_property
    def through(self) -> Floats:
        """[C, L, L+1] the least that all else costs in a plan with a stage of layers [a, a')."""
        layers, after, hops = self.p.num_layers, self.after, self.hops
        states, classes = after.shape
        table, _ = self._tables
        rents = self.rents
        spend(10 * layers * classes, 3 * classes * layers * states * (layers / 2 + classes))
        if self.space.listed and classes * layers * states <= FEW_ENTRIES:
            return self._through_few()
        arrive = np.full((states + 1, classes, layers + 1), np.inf)
        found = np.full((classes, layers, layers + 1), np.inf)
        for a in range(layers):
            if a == 0:
                enter = np.full((states, classes), np.inf)
                enter[0] = 0.0
            else:
                enter = (arrive[:states, :, a, None] + hops[None]).min(axis=1)
            for c in range(classes):
                ahead = self.stage[c, a, a + 1 :] + rents[c]
                near = np.flatnonzero(np.isfinite(ahead)) + a + 1
                from_here = np.flatnonzero(np.isfinite(enter[:, c]))
                if not len(near) or not len(from_here):
                    continue
                at = np.ix_(after[from_here, c], np.array([c]), near)
                cost = enter[from_here, c, None] + rents[c]
                found[c, a, near] = (cost + table[at][:, 0]).min(axis=0)
                onward = cost + self.stage[c, a, near]
                rows = after[from_here, c]
                if self.space.listed:
                    arrive[at] = np.minimum(arrive[at], onward[:, None, :])
                else:
                    arrive[rows[0], c, near] = np.minimum(arrive[rows[0], c, near], onward[0])
        return found

    def _through_few(self) -> Floats:
        """[C, L, L+1] `through`, all classes at once; states are listed."""
        layers, after, stage = self.p.num_layers, self.after, self.stage
        states, classes = after.shape
        each = np.arange(classes)
        onward = self._tables[0][after, each]  # [S, C, L+1]
        arrive = np.full((states + 1, classes, layers + 1), np.inf)
        found = np.full((classes, layers, layers + 1), np.inf)
        enter = np.full((states, classes), np.inf)
        enter[0] = 0.0
        for a in range(layers):
            if a:
                enter = (arrive[:states, :, a, None] + self.hops[None]).min(axis=1)
            near, ahead = slice(a + 1, None), stage[:, a, a + 1 :]
            rest = (enter[:, :, None] + onward[:, :, near]).min(axis=0)
            found[:, a, near] = np.where(np.isfinite(ahead), rest, np.inf)
            # States that go on by a device of a class go on to different ones.
            at = after, each[None], near
            arrive[at] = np.minimum(arrive[at], enter[:, :, None] + ahead[None])
        return found

    def greedy(self) -> list[tuple[int, int, int]]:
        """Return (class, start, end) of the stages of a plan that attains `value`.

        Where states are not listed, of one that uses no device twice; empty if it is a dead end.
        """
        layers = self.p.num_layers
        state, last, a = 0, -1, 0
        found: list[tuple[int, int, int]] = []
        while a < layers:
            best = (math.inf, -1, -1, -1)
            for c in range(len(self.p.classes)):
                after = self.space.after(state, c)
                if after < 0:
                    continue
                hop = 0.0 if last < 0 else float(self.hops[last, c])
                costs = self.stage[c, a] + self.finish(after, c) + hop + self.rents[c]
                end = int(np.argmin(costs))
                best = min(best, (float(costs[end]), c, end, after))
            if not math.isfinite(best[0]):
                return []
            found.append((best[1], a, best[2]))
            state, last, a = best[3], best[1], best[2]
        return found


def _ends(stage: Floats) -> list[list[tuple[int, int]]]:
    """[C][L+1] the least and one beyond the most of the ends that stages [C, L+1, L+1] may have."""
    finite = np.isfinite(stage)
    low = finite.argmax(axis=2)
    high = stage.shape[2] - finite[:, :, ::-1].argmax(axis=2)
    return [list(zip(*both, strict=True)) for both in zip(low.tolist(), high.tolist(), strict=True)]


def greedy_plan(bound: Completion) -> Assignment | None:
    """Return the plan that a completion's bound is made of, None if it is a dead end."""
    p, numbers = bound.p, bound.form.numbers
    found = bound.greedy()
    if not found:
        return None
    stages = tuple(
        Stage(cls=c, start=a, end=e, choices=_filled(bound, c, a, e)) for c, a, e in found
    )
    assert stages[-1].end == p.num_layers
    return Assignment(prefill_microbatch=numbers.eta, decode_microbatch=numbers.xi, stages=stages)


def _filled(bound: Completion, c: int, a: int, e: int) -> tuple[int, ...]:
    """Return choices of a stage near the cheapest that fits: what does not fit is repaired."""
    p, columns, m = bound.p, bound.columns, e - a
    if columns is not None:
        room = bound.form.numbers.capacity[c, int(a == 0), int(e == p.num_layers)]
        fits = columns.fitting(m, room)
        cost = column_costs(bound.form, bound.weights, bound.box, columns.counts[m], c)
        cost = np.where(fits, cost + priced(columns.least[m][a], p.theta), np.inf)
        return assigned(p.open_omega[a:e], columns.counts[m][int(np.argmin(cost))])
    cost = layer_costs(p, bound.form, bound.weights, c)[a:e]
    return tuple(int(b) for b in cost.argmin(axis=1))
