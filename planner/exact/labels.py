"""Label setting: the exact optimum of one pair of micro-batch sizes.

A label is a partial plan of layers [0, a) in a state (first class, devices used, last class):

    P, D    slowest stage or hop so far
    S       decode times and hops so far
    cost    everything additive: sum tp + wS S + theta omega

A label is dropped when its completion bound (at any kappa) reaches the best plan, or when another
label of its state is at least as good for every completion: what the other has more of P and D is
charged at its full weight, in both linear forms of F (kappa = 0 and 1), since F is their maximum.

With a quality budget Q the search minimises time subject to sum omega <= Q: theta is then a
multiplier, time = F - theta omega, and a completion bound counts once it reaches best + theta Q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmpq.planner.evaluate.objective import weighed
from llmpq.planner.exact.bounds.columns import assigned
from llmpq.planner.exact.bounds.completion import Completion
from llmpq.planner.exact.column_generation import (
    WORTH_COMPARING,
    ColumnLimitReached,
    UsableColumns,
    generate_columns,
    useful,
)
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Floats, Problem
from llmpq.planner.problem.work_clock import now_s, spend

Key = tuple[int, int, int]
"""(first class, state, last class)."""


COVER_BLOCK = 512
"""Labels that others are compared with at a time, so that comparisons stay in cache."""


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """When to give up on a pair."""

    deadline: float
    max_labels: int = 3_000_000
    max_work: float = math.inf
    """Label-column pairs to look at."""


class LimitReached(Exception):
    """The pair needs more labels or time than allowed."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Labels of one state at one boundary."""

    p: Floats
    d: Floats
    s: Floats
    cost: Floats
    omega: Floats
    parent: np.ndarray
    stage: np.ndarray
    """[n, 4] class, start, layers, count vector of the last stage."""

    def pick(self, rows: np.ndarray) -> Labels:
        """Return some of the labels."""
        return Labels(
            p=self.p[rows],
            d=self.d[rows],
            s=self.s[rows],
            cost=self.cost[rows],
            omega=self.omega[rows],
            parent=self.parent[rows],
            stage=self.stage[rows],
        )


def _join(buckets: Sequence[Labels]) -> Labels:
    return Labels(
        p=np.concatenate([b.p for b in buckets]),
        d=np.concatenate([b.d for b in buckets]),
        s=np.concatenate([b.s for b in buckets]),
        cost=np.concatenate([b.cost for b in buckets]),
        omega=np.concatenate([b.omega for b in buckets]),
        parent=np.concatenate([b.parent for b in buckets]),
        stage=np.concatenate([b.stage for b in buckets]),
    )


class LabelSearch:
    """Finds the best plan of a pair below a value, or proves that there is none."""

    def __init__(
        self,
        p: Problem,
        bounds: Sequence[Completion],
        limits: SearchLimits,
        budget: float | None = None,
    ) -> None:
        self.p = p
        self.bounds = bounds
        self.limits = limits
        self.budget = budget
        self.form, self.space = bounds[0].form, bounds[0].space
        self.cells: list[dict[Key, list[Labels]]] = [{} for _ in range(p.num_layers)]
        self.settled: list[Labels] = []
        self.offsets: list[int] = [0]
        self.count = 0
        self.work = 0
        self.best: tuple[float, int, np.ndarray] | None = None

    def run(self, below: float) -> Assignment | None:
        """Return the best plan with F < below, None if there is none."""
        self.below = below
        if not min(bound.value for bound in self.bounds) < math.inf:
            return None
        try:
            self.columns = generate_columns(self.bounds[0], below, self._late)
        except ColumnLimitReached:
            raise LimitReached from None
        start = Labels(
            p=np.full(1, self.bounds[0].box.p_low),
            d=np.full(1, self.bounds[0].box.d_low),
            s=np.zeros(1),
            cost=np.zeros(1),
            omega=np.zeros(1),
            parent=np.array([-1]),
            stage=np.zeros((1, 4), dtype=np.int64),
        )
        self._expand_all(0, {(-1, 0, -1): (start, 0)})
        for a in range(1, self.p.num_layers):
            ready: dict[Key, tuple[Labels, int]] = {}
            for key, buckets in sorted(self.cells[a].items()):
                bucket = self._prune(_join(buckets), key, a)
                if len(bucket.p):
                    ready[key] = (bucket, self._record(bucket))
            self.cells[a] = {}
            if ready:
                self._expand_all(a, ready)
        return self.found()

    def found(self) -> Assignment | None:
        """Return the best plan so far."""
        return None if self.best is None else self._assignment()

    def _late(self) -> bool:
        return now_s() > self.limits.deadline

    def _prune(self, bucket: Labels, key: Key, a: int) -> Labels:
        """Drop labels that the best plan found since has made useless, and dominated ones."""
        lower = self._bound(bucket, key[1], key[2], a)
        live = np.flatnonzero(lower < self.below)
        bucket = bucket.pick(live)
        return bucket.pick(self._undominated(bucket))

    def _record(self, bucket: Labels) -> int:
        offset = self.count
        self.settled.append(bucket)
        self.count += len(bucket.p)
        self.offsets.append(self.count)
        if self.count > self.limits.max_labels or self._late():
            raise LimitReached
        return offset

    def _bound(self, b: Labels, state: int, last: int, a: int) -> Floats:
        """Largest completion bound over the kappas."""
        lower = np.full(len(b.p), -np.inf)
        for bound in self.bounds:
            rest = bound.rest(state)
            extra = bound.form.s_weight(bound.prices.kappa) - self.form.ws
            value = b.cost + extra * b.s + rest.p * b.p + rest.d * b.d
            value += bound.finish(state, last)[a] + rest.over
            np.maximum(lower, value, out=lower)
        return lower

    def _expand_all(self, a: int, ready: dict[Key, tuple[Labels, int]]) -> None:
        """Extend every label at a boundary by one stage of every class."""
        if self._late():
            raise LimitReached
        for c in range(len(self.p.classes)):
            columns = self.columns.by_start.get((c, a))
            reach = self._reach(c, ready) if columns is not None else None
            if columns is None or reach is None:
                continue
            columns = columns.pick(columns.cost <= reach[a + columns.layers])
            if not len(columns.layers):
                continue
            if sum(len(bucket.p) for bucket, _ in ready.values()) >= WORTH_COMPARING:
                columns = useful(columns)
            for key, (bucket, offset) in ready.items():
                after = self.space.after(key[1], c)
                if after >= 0:
                    self._expand(a, c, key, after, bucket, offset, columns)

    def _reach(self, c: int, ready: dict[Key, tuple[Labels, int]]) -> Floats | None:
        """[L+1] how much a stage of class c that ends there may cost, priced, over all labels."""
        bound = self.bounds[0]
        extra = bound.form.s_weight(bound.prices.kappa) - self.form.ws
        reach = np.full(self.p.num_layers + 1, -np.inf)
        for (_, state, last), (b, _) in ready.items():
            after = self.space.after(state, c)
            if after < 0:
                continue
            # P and D so far are priced by what is left after this stage.
            rest = bound.rest(state)
            done = b.cost + extra * b.s + rest.p * b.p + rest.d * b.d + rest.over
            hop = float(bound.hops[last, c]) if last >= 0 else 0.0
            # Below may be infinite, and so is the way on from a boundary that cannot be finished.
            onward = bound.finish(after, c)
            room = np.where(np.isfinite(onward), self.below - float(done.min()) - hop, -np.inf)
            onward = np.where(np.isfinite(onward), onward, 0.0)
            np.maximum(reach, room - onward, out=reach)
        return None if not np.any(reach > -np.inf) else reach

    def _expand(
        self,
        a: int,
        c: int,
        key: Key,
        after: int,
        bucket: Labels,
        offset: int,
        columns: UsableColumns,
    ) -> None:
        """Combine labels and columns; store what may still beat the best plan."""
        first, _, last = key
        x, form, layers = self.form.numbers, self.form, self.p.num_layers
        m, tp, td, omega = columns.layers, columns.tp, columns.td, columns.omega
        held_p, held_d = columns.held_p, columns.held_d
        way_p, way_d = (x.hop_prefill, x.hop_decode) if last >= 0 else (None, None)
        hop_p, busy_p = (way_p.total_s[last, c], way_p.held_s[last, c]) if way_p else (0.0, 0.0)
        hop_d, busy_d = (way_d.total_s[last, c], way_d.held_s[last, c]) if way_d else (0.0, 0.0)
        in_sums = 1.0 if form.hops_in_sums else 0.0
        self.work += len(bucket.p) * len(m) * len(self.bounds)
        spend(40, 15 * len(bucket.p) * len(m) * (1 + len(self.bounds)))
        if self.work > self.limits.max_work:
            raise LimitReached
        chunk = max(1, 400_000 // len(m))
        for low in range(0, len(bucket.p), chunk):
            rows = slice(low, low + chunk)
            p = np.maximum(np.maximum(bucket.p[rows], busy_p)[:, None], held_p[None, :])
            d = np.maximum(np.maximum(bucket.d[rows], busy_d)[:, None], held_d[None, :])
            s = (bucket.s[rows] + in_sums * hop_d)[:, None] + td[None, :]
            cost = (bucket.cost[rows] + in_sums * (hop_p + form.ws * hop_d))[:, None]
            cost = cost + (tp + form.ws * td + self.p.theta * omega)[None, :]
            lower = np.full(cost.shape, -np.inf)
            for bound in self.bounds:
                rest = bound.rest(after)
                extra = form.s_weight(bound.prices.kappa) - form.ws
                value = cost + extra * s + rest.p * p + rest.d * d
                value += bound.finish(after, c)[a + m][None, :] + rest.over
                np.maximum(lower, value, out=lower)
            label, which = np.nonzero(lower < self.below)
            if not len(label):
                continue
            made = Labels(
                p=p[label, which],
                d=d[label, which],
                s=s[label, which],
                cost=cost[label, which],
                omega=bucket.omega[low + label] + omega[which],
                parent=offset + low + label,
                stage=np.stack(
                    [
                        np.full(len(label), c),
                        np.full(len(label), a),
                        m[which],
                        columns.vector[which],
                    ],
                    axis=1,
                ),
            )
            self._store(made, (first if first >= 0 else c, after, c), a + m[which], layers)

    def _store(self, made: Labels, key: Key, ends: np.ndarray, layers: int) -> None:
        """Put labels into the cells of their boundary; whole plans are valued at once."""
        for end in np.flatnonzero(np.bincount(ends)):
            part = made.pick(np.flatnonzero(ends == end))
            if end == layers:
                self._finish(part, key)
            else:
                self.cells[int(end)].setdefault(key, []).append(part)

    def _finish(self, b: Labels, key: Key) -> None:
        """Value whole plans by F itself; keep the best."""
        first, _, last = key
        x, form = self.form.numbers, self.form
        # A single stage sends nothing back. The cost has wS S in it already.
        several, ring = b.stage[:, 1] > 0, (last, first)
        back_d = several * x.back_decode.total_s[ring]
        p, d, tp = b.p, b.d, b.cost - form.ws * b.s
        if form.first_back:
            p = np.maximum(p, several * x.back_prefill.held_s[ring])
            tp = tp + several * x.back_prefill.total_s[ring]
        if form.back_bounds:
            d = np.maximum(d, several * x.back_decode.held_s[ring])
        prefill, decode = weighed(form, slow_p=p, slow_d=d, tp=tp, td=b.s, back_d=back_d)
        value = prefill + decode
        if self.budget is not None:
            # Worth is time + theta Q, so that it compares with completion bounds.
            worth = value + self.p.theta * (self.budget - b.omega)
            value = np.where(b.omega <= self.budget, worth, np.inf)
        best = int(np.argmin(value))
        if value[best] < self.below:
            self.below = float(value[best])
            self.best = (self.below, int(b.parent[best]), b.stage[best])

    def _undominated(self, b: Labels) -> np.ndarray:
        """Indices of labels that no other label of the state makes useless."""
        form = self.form
        order = np.lexsort((b.s, b.cost))
        if len(order) < 2:
            return order
        time_only = b.cost if self.budget is None else b.cost - self.p.theta * b.omega
        spent = np.zeros(len(order)) if self.budget is None else b.omega
        low = np.stack([b.p, b.d, time_only, time_only + form.z * b.s, spent], axis=1)[order]
        weights = (form.bd + form.z * form.md, form.bd)
        kept = np.empty((0, 5))
        rows: list[np.ndarray] = []
        block = 256
        for start in range(0, len(low), block):
            part = low[start : start + block]
            spend(60, 16 * len(part) * (len(kept) + len(part)))
            alive = ~_dominated(part, kept, form.a, weights, strict=False)
            index = np.flatnonzero(alive)
            part = part[index]
            inner = ~_dominated(part, part, form.a, weights, strict=True)
            index, part = index[inner], part[inner]
            kept = np.concatenate([kept, part])
            rows.append(order[start + index])
        return np.concatenate(rows)

    def _assignment(self) -> Assignment:
        """Walk the parents of the best plan."""
        assert self.best is not None
        _, parent, stage = self.best
        stages: list[Stage] = []
        while True:
            c, a, m, column = (int(v) for v in stage)
            choices = assigned(self.p.open_omega[a : a + m], self.columns.vectors[column])
            stages.append(Stage(cls=c, start=a, end=a + m, choices=choices))
            if a == 0:
                break
            where = int(np.searchsorted(self.offsets, parent, side="right")) - 1
            bucket = self.settled[where]
            row = parent - self.offsets[where]
            parent, stage = int(bucket.parent[row]), bucket.stage[row]
        numbers = self.form.numbers
        return Assignment(
            prefill_microbatch=numbers.eta,
            decode_microbatch=numbers.xi,
            stages=tuple(reversed(stages)),
        )


def _dominated(
    part: Floats, by: Floats, a: float, weights: tuple[float, float], *, strict: bool
) -> np.ndarray:
    """[n] whether a row of `by` is as good as each row of `part` for every completion.

    Rows are P, D, cost at kappa = 1, cost at kappa = 0, omega that a budget counts. `strict`: the
    same rows are compared with themselves; of equal ones the first stays.
    """
    found = np.zeros(len(part), dtype=bool)
    if strict:
        covered = _covered(part, part, a, weights)
        number = np.arange(len(part))
        covered &= ~(covered.T & (number[:, None] <= number[None, :]))
        found |= covered.any(axis=1)
        return found
    left = np.arange(len(part))
    for start in range(0, len(by), COVER_BLOCK):
        if not len(left):
            break
        covered = _covered(part[left], by[start : start + COVER_BLOCK], a, weights)
        some = covered.any(axis=1)
        found[left[some]] = True
        left = left[~some]
    return found


def _covered(part: Floats, by: Floats, a: float, weights: tuple[float, float]) -> np.ndarray:
    """[n, m] whether each row of `by` is as good as each row of `part` for every completion."""
    worse_p = by[None, :, 0] - part[:, None, 0]
    np.maximum(worse_p, 0.0, out=worse_p)
    worse_p *= a
    worse_d = by[None, :, 1] - part[:, None, 1]
    np.maximum(worse_d, 0.0, out=worse_d)
    covered = by[None, :, 4] <= part[:, None, 4]
    for cost, weight in ((2, weights[0]), (3, weights[1])):
        total = by[None, :, cost] - part[:, None, cost]
        total += worse_p
        total += weight * worse_d
        covered &= total <= 0
    return covered
