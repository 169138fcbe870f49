"""The class relaxation: a small linear program whose duals price every device's time.

Contiguity is dropped and the devices of a class are merged, so the program is valid for every
device order, with or without devices left out:

    min A P + Bd D + sum (tp + wS td + theta omega) y + Z z
    sum_cb y[l,c,b] = 1                                   each layer once
    sum_lb bytes y + ends <= count_c capacity_c           memory of a class
    sum_lb tp y + ends <= count_c P   (lambda_c)          prefill
    sum_lb td y + ends <= count_c D   (mu_c)              decode
    z >= md D,  z >= S                (kappa)             decode period

y fractional; e_c, h_c say which class has the embedding and the head.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from llmpq.planner.exact.form import EVERYWHERE, Box, Form
from llmpq.planner.problem import Floats, Problem


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


class ClassRelaxation:
    """Builds the program once; solves it for any pair and, if given, a fixed kappa."""

    def __init__(self, p: Problem) -> None:
        import highspy

        self.p = p
        self.highspy = highspy
        self.solver = highspy.Highs()
        self.solver.setOptionValue("output_flag", False)
        self.solver.setOptionValue("threads", 1)
        self.solver.setOptionValue("presolve", "off")
        self.basis: object | None = None
        layers, classes, choices = p.num_layers, len(p.classes), len(p.choices)
        self.shape = (layers, classes, choices)
        self.counts = np.array([min(c.count, p.max_stages) for c in p.classes], dtype=float)

    def solve(self, form: Form, kappa: float | None = None, box: Box = EVERYWHERE) -> Prices:
        """Return the prices of a pair within a box; value is infinite if no plan fits."""
        solver, kinds = self.solver, self.highspy.HighsModelStatus
        solver.passModel(self._program(form, kappa, box))
        if self.basis is not None:
            solver.setBasis(self.basis)
        solver.run()
        status = solver.getModelStatus()
        classes = len(self.p.classes)
        zero = np.zeros(classes)
        if status == kinds.kInfeasible:
            return Prices(value=math.inf, kappa=1.0, prefill=zero, decode=zero)
        if status != kinds.kOptimal:  # multipliers of zero are always valid
            return Prices(value=-math.inf, kappa=1.0, prefill=zero, decode=zero)
        self.basis = solver.getBasis()
        duals = np.array(solver.getSolution().row_dual)
        first = self.p.num_layers + classes
        prefill = np.clip(duals[first : first + classes], 0, None)
        decode = np.clip(duals[first + classes : first + 2 * classes], 0, None)
        if kappa is None:
            share = float(np.clip(duals[first + 2 * classes], 0, None))
            kappa = min(1.0, share / form.z) if form.z else 1.0
        return Prices(
            value=solver.getInfo().objective_function_value,
            kappa=kappa,
            prefill=_scaled(prefill, self.counts, form.a, box.p_high),
            decode=_scaled(decode, self.counts, form.d_weight(kappa), box.d_high),
        )

    def _program(self, form: Form, kappa: float | None, box: Box) -> object:
        """Columns: y[l,c,b], e[c], h[c], P, D, z. Rows: layers, memory, prefill, decode, period."""
        x, p = form.numbers, self.p
        layers, classes, choices = self.shape
        ny = layers * classes * choices
        width = ny + 2 * classes + 3
        fixed = 1.0 if kappa is None and not form.z else kappa
        s_weight = form.ws if fixed is None else form.s_weight(fixed)
        d_weight = form.bd if fixed is None else form.d_weight(fixed)
        cost = np.empty(width)
        y_cost = x.prefill_s + s_weight * x.decode_s + p.theta * p.omega[:, None, :]
        cost[:ny] = y_cost.ravel()
        ends = x.ends_prefill_s + s_weight * x.ends_decode_s
        cost[ny : ny + classes], cost[ny + classes : ny + 2 * classes] = ends[:, 0], ends[:, 1]
        cost[-3:] = form.a, d_weight, form.z if fixed is None else 0.0
        index, value, start, lower, upper = self._rows(form, ny, width)
        lp = self.highspy.HighsLp()
        lp.num_col_, lp.num_row_ = width, len(start) - 1
        lp.col_cost_ = cost
        low, high = np.zeros(width), np.full(width, np.inf)
        high[:ny] = np.where(p.open[:, None, :], np.inf, 0.0).repeat(classes, axis=1).ravel()
        low[-3:-1], high[-3:-1] = (box.p_low, box.d_low), (box.p_high, box.d_high)
        lp.col_lower_, lp.col_upper_ = low, high
        lp.row_lower_, lp.row_upper_ = lower, upper
        lp.a_matrix_.format_ = self.highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = start, index, value
        return lp

    def _rows(self, form: Form, ny: int, width: int) -> tuple[np.ndarray, ...]:
        x = form.numbers
        layers, classes, choices = self.shape
        y = np.arange(ny).reshape(self.shape)
        index: list[np.ndarray] = [y[i].ravel() for i in range(layers)]
        value: list[np.ndarray] = [np.ones(classes * choices)] * layers
        lower, upper = [1.0] * layers, [1.0] * layers
        gib = float(2**30)
        # What the first and the last stage have less than another one; negative where a stage
        # without an inbox, or without outputs on their way, has more.
        mid = np.clip(x.capacity[:, 0, 0], 0, None)
        first = mid - x.capacity[:, 1, 0]
        last = mid - np.maximum(x.capacity[:, 0, 1], x.capacity[:, 1, 1] + first)
        slow_p, slow_d, period = width - 3, width - 2, width - 1
        for c in range(classes):
            ends = np.array([ny + c, ny + classes + c])
            index.append(np.concatenate([y[:, c].ravel(), ends]))
            value.append(np.concatenate([x.layer_bytes.ravel(), [first[c], last[c]]]) / gib)
            lower.append(-np.inf)
            upper.append(self.counts[c] * int(mid[c]) / gib)
        for times, table, slow in (
            (x.prefill_s, x.ends_prefill_s, slow_p),
            (x.decode_s, x.ends_decode_s, slow_d),
        ):
            for c in range(classes):
                ends = np.array([ny + c, ny + classes + c, slow])
                index.append(np.concatenate([y[:, c].ravel(), ends]))
                value.append(np.concatenate([-times[:, c].ravel(), -table[c], [self.counts[c]]]))
                lower.append(0.0)
                upper.append(np.inf)
        index.append(np.array([period, slow_d]))
        value.append(np.array([1.0, -float(form.md)]))
        ends = np.arange(ny, ny + 2 * classes)
        index.append(np.concatenate([y.ravel(), ends, [period]]))
        value.append(np.concatenate([-x.decode_s.ravel(), -x.ends_decode_s.T.ravel(), [1.0]]))
        for which in (0, 1):
            cols = np.arange(ny + which * classes, ny + (which + 1) * classes)
            index.append(cols)
            value.append(np.ones(classes))
        lower += [0.0, 0.0, 1.0, 1.0]
        upper += [np.inf, np.inf, 1.0, 1.0]
        start = np.cumsum([0] + [len(part) for part in index])
        return (
            np.concatenate(index),
            np.concatenate(value),
            start,
            np.array(lower),
            np.array(upper),
        )


def quick_bound(p: Problem, form: Form, box: Box = EVERYWHERE) -> float:
    """Return a lower bound of F over all plans of a pair within a box, without a program.

    Every layer is priced by itself, whatever fits. The slowest of J stages takes a J-th of their
    sum at least, or what the box says. Taken at kappa = 0 and 1.
    """
    best = -math.inf
    for kappa in (0.0, 1.0):
        d_weight = form.d_weight(kappa)
        for share in (1.0 / p.max_stages,) if box is EVERYWHERE else (1.0 / p.max_stages, 0.0):
            wp, wd = 1.0 + share * form.a, form.s_weight(kappa) + share * d_weight
            floor = 0.0 if share else form.a * box.p_low + d_weight * box.d_low
            best = max(best, _layers_alone(p, form, wp, wd) + floor)
    return best - 1e-7 * abs(best)


def relaxed_or_quick(
    relaxation: ClassRelaxation, form: Form, deadline: float, box: Box = EVERYWHERE
) -> float:
    """Return the relaxation's bound of a pair, its quick bound once the deadline has passed."""
    if time.perf_counter() > deadline:
        return quick_bound(relaxation.p, form, box)
    value = relaxation.solve(form, box=box).value
    return value - 1e-7 * abs(value) if math.isfinite(value) else value


def _layers_alone(p: Problem, form: Form, wp: float, wd: float) -> float:
    """Return the sum of the least cost of every layer, embedding and head at weights of time."""
    x = form.numbers
    layer = (wp * x.prefill_s + wd * x.decode_s).min(axis=1) + p.priced_omega
    ends = (wp * x.ends_prefill_s + wd * x.ends_decode_s).min(axis=0)
    return float(layer.min(axis=1).sum() + ends.sum())


def _scaled(prices: Floats, counts: Floats, most: float, high: float) -> Floats:
    """Scale so that sum count * price <= most, which makes any prices valid.

    Not needed where the slowest stage has an upper bound: what is over is paid at that bound.
    """
    if math.isfinite(high):
        return prices
    total = float(prices @ counts)
    return prices * min(1.0, most / total) if total > 0 else prices
