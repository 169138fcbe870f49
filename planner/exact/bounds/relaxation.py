"""The class relaxation: a small linear program whose duals price time, memory and every pair.

Contiguity is dropped and the devices of a class are merged, so the program is valid for every
device order, with or without devices left out:

    min A P + Bd D + sum (tp + wS td + theta omega) y + Z z
    sum_cb y[g,c,b] = n_g                                 each layer once
    sum_gb bytes y + ends <= count_c capacity_c  (rho_c)  memory of a class
    sum_gb tp' y + ends <= count_c P   (lambda_c)         prefill, ': mean over micro-batches
    sum_gb td' y + ends <= count_c D   (mu_c)             decode
    sum_gb y <= count_c m_c                               whole layers: m_c fit box and memory
    sum_gcb tp' y + ends <= most P,  likewise D           no more stages than a box has
    z >= md D,  z >= S + hops         (kappa)             decode period

y fractional; e_c, h_c say which class has the embedding and the head. Layers of about equal omega
share a group g, at the least omega of any of them. By weak duality the multipliers of one pair of
micro-batch sizes, scaled to another pair's weights, bound every pair (pairs.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.evaluate.objective import Form
from llmpq.planner.exact.bounds.plan_cases import EVERYWHERE, Box, find_islands, most_priced
from llmpq.planner.ilp.milp import make_highs
from llmpq.planner.problem.numbers import PairNumbers
from llmpq.planner.problem.problem import Floats, Problem
from llmpq.planner.problem.work_clock import spend

MAX_GROUPS = 20
"""Groups of layers in the program."""
MOST_KEPT = 64
"""Pairs whose rows are kept."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Multipliers of the coupling constraints, scaled to be dual feasible."""

    value: float
    """Optimum of the relaxation: a lower bound of F over all plans of the pair."""
    kappa: float
    prefill: Floats
    """[C] lambda: seconds of F per second of a device's prefill time."""
    decode: Floats
    """[C] mu."""
    memory: Floats
    """[C] rho: seconds of F per byte."""
    omega: float = 1.0
    """Seconds of F per unit of theta times omega, where a budget caps it."""


@dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """Layers of about equal omega: `omega` is priced, infinite where no layer may have a choice."""

    omega: Floats
    """[G, B]."""
    sizes: Floats
    """[G] number of layers."""


def layer_groups(p: Problem) -> LayerGroups:
    """Return the layers grouped, each group at its least omega."""
    rows, sizes = np.unique(p.priced_omega, axis=0, return_counts=True)
    if len(rows) <= MAX_GROUPS:
        return LayerGroups(omega=rows, sizes=sizes.astype(float))
    closed = np.isinf(rows)
    order = np.lexsort(
        (np.where(closed, 0.0, rows).sum(axis=1), closed @ (1 << np.arange(rows.shape[1])))
    )
    cuts = np.array_split(order, MAX_GROUPS)
    return LayerGroups(
        omega=np.array([rows[part].min(axis=0) for part in cuts]),
        sizes=np.array([float(sizes[part].sum()) for part in cuts]),
    )


@dataclass(frozen=True, kw_only=True)
class ClassMemory:
    """[..., C] bytes of one device of a class; what a first and a last stage have less of them."""

    middle: Floats
    first: Floats
    last: Floats


def class_memory(capacity: NDArray[np.int64]) -> ClassMemory:
    """Return a class's memory from `Problem.capacity`, at the roomiest sort of weights.

    `first` and `last` are negative where a stage without an inbox, or without outputs on their way,
    has more.
    """
    room = capacity.max(axis=-1)
    middle = np.clip(room[..., 0, 0], 0, None)
    first = middle - room[..., 1, 0]
    last = middle - np.maximum(room[..., 0, 1], room[..., 1, 1] + first)
    return ClassMemory(
        middle=middle.astype(float), first=first.astype(float), last=last.astype(float)
    )


def whole_layers(p: Problem, capacity: NDArray[np.int64]) -> NDArray[np.int64]:
    """[C, 2, 2] layers that one device has memory for, as first stage or not, last or not."""
    smallest = max(1, int(p.all_layer_bytes[0].min()))
    return np.asarray(np.minimum(np.clip(capacity.max(axis=-1), 0, None) // smallest, p.num_layers))


@dataclass(frozen=True, kw_only=True)
class PairRows:
    """Rows of the program that differ from box to box in one limit at most."""

    index: NDArray[np.int64]
    value: Floats
    lengths: list[int]
    """Entries of each row."""
    lower: list[float]
    upper: list[float]
    period: int
    """The row whose lower limit is what the box's hops take."""


class ClassRelaxation:
    """Solves the program for any pair and, if given, a fixed kappa.

    With a budget, theta times omega is no cost but at most so much: its price is a multiplier, too.
    """

    def __init__(self, p: Problem, budget: float | None = None) -> None:
        import highspy

        self.p, self.budget = p, budget
        self.highspy = highspy
        self.solver = make_highs()
        self.solver.setOptionValue("presolve", "off")
        self.basis: object | None = None
        self.groups = layer_groups(p)
        self.shape = (len(self.groups.sizes), len(p.classes), len(p.choices))
        self.everywhere = np.array([min(c.count, p.max_stages) for c in p.classes], dtype=float)
        self.islands = find_islands(p)
        self._budget_row = 0
        self._kept: dict[tuple[int, int, bytes], tuple[PairNumbers, PairRows]] = {}
        """Rows of the pairs asked of last; numbers beside them, so that no others have their id."""

    def counts(self, box: Box) -> Floats:
        """[C] devices that the plans of a box may use."""
        if box.island is None or self.islands is None:
            return self.everywhere
        return np.minimum(self.islands.counts[box.island], self.everywhere)

    def _few(self, box: Box) -> bool:
        """Whether a box has fewer stages than its plans have devices."""
        most = self.p.max_stages if box.most is None else box.most
        return most < self.counts(box).sum()

    def solve(self, form: Form, kappa: float | None = None, box: Box = EVERYWHERE) -> Prices:
        """Return the prices of a pair within a box; value is infinite if no plan fits."""
        solver, kinds = self.solver, self.highspy.HighsModelStatus
        solver.passModel(self._program(form, kappa, box))
        if self.basis is not None:
            solver.setBasis(self.basis)
        solver.run()
        spend(200 + 8 * solver.getInfo().simplex_iteration_count)
        status = solver.getModelStatus()
        groups, classes, _ = self.shape
        zero = np.zeros(classes)
        none = Prices(value=-math.inf, kappa=1.0, prefill=zero, decode=zero, memory=zero)
        if status == kinds.kInfeasible:
            return Prices(value=math.inf, kappa=1.0, prefill=zero, decode=zero, memory=zero)
        if status != kinds.kOptimal:  # multipliers of zero are always valid
            return none
        counts = self.counts(box)
        self.basis = solver.getBasis()
        duals = np.array(solver.getSolution().row_dual)
        memory, prefill, decode = np.split(duals[groups : groups + 3 * classes], 3)
        if self._few(box):
            prefill, decode = prefill + max(duals[-2], 0.0), decode + max(duals[-1], 0.0)
        most = self.p.max_stages if box.most is None else box.most
        if kappa is None:
            share = float(np.clip(duals[groups + 3 * classes], 0, None))
            kappa = min(1.0, share / form.z) if form.z else 1.0
        return Prices(
            value=solver.getInfo().objective_function_value,
            kappa=kappa,
            prefill=_scaled(np.clip(prefill, 0, None), counts, most, form.a, box.p_high),
            decode=_scaled(
                np.clip(decode, 0, None), counts, most, form.d_weight(kappa), box.d_high
            ),
            memory=np.clip(-memory, 0, None) / 2**30,
            omega=1.0 if self.budget is None else max(0.0, -float(duals[self._budget_row])),
        )

    def bound(self, form: Form, box: Box = EVERYWHERE) -> float:
        """Return the optimum less the solver's own tolerance."""
        value = self.solve(form, box=box).value
        return value - 1e-7 * abs(value) if math.isfinite(value) else value

    def _program(self, form: Form, kappa: float | None, box: Box) -> object:
        """Columns: y[g,c,b], e[c], h[c], P, D, z. Rows: layers, memory, prefill, decode, period."""
        x = form.numbers
        groups, classes, choices = self.shape
        ny = groups * classes * choices
        width = ny + 2 * classes + 3
        fixed = 1.0 if kappa is None and not form.z else kappa
        s_weight = form.ws if fixed is None else form.s_weight(fixed)
        d_weight = form.bd if fixed is None else form.d_weight(fixed)
        cost = np.empty(width)
        shut = np.isinf(self.groups.omega)
        time = x.prefill_s[0] + s_weight * x.decode_s[0]
        loss = np.where(shut | (self.budget is not None), 0.0, self.groups.omega)
        y_cost = time[None] + loss[:, None, :]
        cost[:ny] = y_cost.ravel()
        ends = x.ends_prefill_s + s_weight * x.ends_decode_s
        cost[ny : ny + classes], cost[ny + classes : ny + 2 * classes] = ends[:, 0], ends[:, 1]
        cost[-3:] = form.a, d_weight, form.z if fixed is None else 0.0
        counts = self.counts(box)
        index, value, start, lower, upper = self._rows(form, box, ny, width)
        lp: Any = self.highspy.HighsLp()
        lp.num_col_, lp.num_row_ = width, len(start) - 1
        lp.col_cost_ = cost
        lp.offset_ = box.hops_prefill_s + s_weight * box.hops_decode_s
        low, high = np.zeros(width), np.full(width, np.inf)
        barred = shut[:, None, :] | (counts == 0)[None, :, None]
        high[:ny] = np.where(barred, 0.0, np.inf).ravel()
        high[ny:-3] = np.tile(np.where(counts == 0, 0.0, np.inf), 2)
        low[-3:-1], high[-3:-1] = (box.p_low, box.d_low), (box.p_high, box.d_high)
        lp.col_lower_, lp.col_upper_ = low, high
        lp.row_lower_, lp.row_upper_ = lower, upper
        lp.a_matrix_.format_ = self.highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = start, index, value
        return lp

    def _rows(self, form: Form, box: Box, ny: int, width: int) -> tuple[np.ndarray, ...]:
        """Return index, value and start of all rows, and their lower and upper limits."""
        x, counts = form.numbers, self.counts(box)
        key = id(x), int(form.md), counts.tobytes()
        if key not in self._kept:
            if len(self._kept) == MOST_KEPT:
                self._kept.clear()
            self._kept[key] = x, self._rows_of_pair(form, counts, ny, width)
        pair = self._kept[key][1]
        capped = self._rows_at_most(form, box, np.arange(ny).reshape(self.shape), len(pair.lower))
        few = self._rows_of_few(form, box, width)
        more = [(k, v) for k, v, _ in capped] + few
        lower = [*pair.lower, *[-np.inf] * len(capped), *[0.0] * len(few)]
        lower[pair.period] = box.hops_decode_s
        upper = [*pair.upper, *(most for _, _, most in capped), *[np.inf] * len(few)]
        start = np.cumsum([0, *pair.lengths, *(len(k) for k, _ in more)])
        index = np.concatenate([pair.index, *(k for k, _ in more)])
        value = np.concatenate([pair.value, *(v for _, v in more)])
        return index, value, start, np.array(lower), np.array(upper)

    def _rows_of_pair(self, form: Form, counts: Floats, ny: int, width: int) -> PairRows:
        """Return the rows that every box of as many devices of each class has."""
        x = form.numbers
        groups, classes, choices = self.shape
        y = np.arange(ny).reshape(self.shape)
        index: list[np.ndarray] = [y[g].ravel() for g in range(groups)]
        value: list[np.ndarray] = [np.ones(classes * choices)] * groups
        lower, upper = list(self.groups.sizes), list(self.groups.sizes)
        gib = float(2**30)
        memory = class_memory(x.capacity)
        slow_p, slow_d, period = width - 3, width - 2, width - 1

        def every_layer(table: Floats) -> Floats:
            """Repeat what holds for one layer for every group."""
            return np.broadcast_to(table, (groups, *table.shape)).ravel()

        for c in range(classes):
            ends = np.array([ny + c, ny + classes + c])
            index.append(np.concatenate([y[:, c].ravel(), ends]))
            less = np.array([memory.first[c], memory.last[c]])
            sizes = every_layer(x.layer_bytes[0].astype(float))
            value.append(np.concatenate([sizes, less]) / gib)
            lower.append(-np.inf)
            upper.append(counts[c] * memory.middle[c] / gib)
        for times, table, slow in (
            (x.held_prefill_s[0], x.held_ends_prefill_s, slow_p),
            (x.held_decode_s[0], x.held_ends_decode_s, slow_d),
        ):
            for c in range(classes):
                ends = np.array([ny + c, ny + classes + c, slow])
                index.append(np.concatenate([y[:, c].ravel(), ends]))
                held = counts[c : c + 1]
                value.append(np.concatenate([-every_layer(times[c]), -table[c], held]))
                lower.append(0.0)
                upper.append(np.inf)
        index.append(np.array([period, slow_d]))
        value.append(np.array([1.0, -float(form.md)]))
        ends = np.arange(ny, ny + 2 * classes)
        index.append(np.concatenate([y.ravel(), ends, [period]]))
        in_sum = (-every_layer(x.decode_s[0]), -x.ends_decode_s.T.ravel(), np.ones(1))
        value.append(np.concatenate(in_sum))
        for which in (0, 1):
            index.append(np.arange(ny + which * classes, ny + (which + 1) * classes))
            value.append(np.ones(classes))
        lower += [0.0, 0.0, 1.0, 1.0]
        upper += [np.inf, np.inf, 1.0, 1.0]
        return PairRows(
            index=np.concatenate(index),
            value=np.concatenate(value),
            lengths=[len(part) for part in index],
            lower=lower,
            upper=upper,
            period=len(lower) - 3,
        )

    def _most_layers(self, form: Form, box: Box) -> list[int]:
        """[C] whole layers that one stage of a class may have: by time within a box, by memory."""
        roomy = whole_layers(self.p, form.numbers.capacity).max(axis=(1, 2))
        return [min(*both) for both in zip(most_layers(form, box), roomy.tolist(), strict=True)]

    def _rows_at_most(
        self, form: Form, box: Box, y: NDArray[np.int64], before: int
    ) -> list[tuple[NDArray[np.int64], Floats, float]]:
        """Return rows with an upper limit: whole layers of a class, and the budget if there is one.

        `before`: the number of rows before them.
        """
        groups, _, choices = self.shape
        found: list[tuple[NDArray[np.int64], Floats, float]] = []
        for c, most in enumerate(self._most_layers(form, box)):
            if most < self.p.num_layers:
                ones = np.ones(groups * choices)
                found.append((y[:, c].ravel(), ones, float(self.counts(box)[c] * most)))
        if self.budget is not None:
            self._budget_row = before + len(found)
            loss = np.where(np.isinf(self.groups.omega), 0.0, self.groups.omega)
            every = np.broadcast_to(loss[:, None, :], self.shape).ravel()
            found.append((y.ravel(), every, self.budget))
        return found

    def _rows_of_few(self, form: Form, box: Box, width: int) -> list[tuple[Floats, Floats]]:
        """Return the last two rows: all stages together take `most` times the slowest at most.

        Their multipliers belong to every class.
        """
        if not self._few(box):
            return []
        x, groups = form.numbers, self.shape[0]
        most = np.full(1, float(self.p.max_stages if box.most is None else box.most))
        found = []
        for times, table, slow in (
            (x.held_prefill_s[0], x.held_ends_prefill_s, width - 3),
            (x.held_decode_s[0], x.held_ends_decode_s, width - 2),
        ):
            layers = np.broadcast_to(times, (groups, *times.shape)).ravel()
            where = np.append(np.arange(width - 3), slow)
            found.append((where, np.concatenate([-layers, -table.T.ravel(), most])))
        return found


def most_layers(form: Form, box: Box) -> list[int]:
    """Return how many layers of the quickest choices a stage of each class may have in a box."""
    x, most = form.numbers, np.full(len(form.numbers.prefill_s[0]), np.inf)
    for table, high in ((x.held_prefill_s[0], box.p_high), (x.held_decode_s[0], box.d_high)):
        once = np.maximum(table.min(axis=1), 1e-300)
        most = np.minimum(most, np.floor(high / once * (1 + 1e-9)))
    return [int(min(layers, len(x.prefill_s))) for layers in most]


def _scaled(prices: Floats, counts: Floats, most: int, weight: float, high: float) -> Floats:
    """Scale so that the prices of `most` devices are the weight at most: then any are valid.

    Not needed where the slowest stage has an upper bound: what is over is paid at that bound.
    """
    if math.isfinite(high):
        return prices
    total = most_priced(prices, counts, most)
    return prices * min(1.0, weight / total) if total > 0 else prices
