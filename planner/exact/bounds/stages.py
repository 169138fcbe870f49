"""T: the cheapest stage of any class over any range of layers, at given weights of time.

    T[c, a, e] <= min over count vectors that fit of  wp tp + wd td + theta omega  (+ ends)

From the table of columns, where there is one, it is that minimum. Else memory is priced: at rho
seconds a byte every layer takes its cheapest choice by itself, so sums over ranges are differences
of prefix sums, and the best of a few rho is nearly the minimum:

    T = max_rho  G_rho[e] - G_rho[a] - rho capacity
    G_rho[e] = sum_{i<e} min_b cost_ib + rho bytes_b
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.costs.stage_memory import DENSE, MIXED, NEVER, PACKED, choices_of
from llmpq.planner.exact.bounds.columns import Columns, priced
from llmpq.planner.exact.bounds.form import Box, Form
from llmpq.planner.formulation.problem import Floats, Problem

RHOS = 10
"""Prices of memory tried beside zero and the relaxation's."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a second of tp and of td costs on each class."""

    prefill: Floats
    """[C] of what the slowest stage goes by, beside one second a second."""
    decode: Floats
    """[C] likewise, beside what all decode times cost."""
    every_decode: float
    """What a second of any decode time costs, a hop's too."""


@dataclass(frozen=True, kw_only=True)
class PricedLayers:
    """Prefix sums of the cheapest choices of one class at several prices of memory."""

    rhos: Floats
    """[R]."""
    sums: Floats
    """[R, L+1]."""


def layer_costs(p: Problem, form: Form, weights: Weights, c: int) -> Floats:
    """[L, B] priced cost of a layer on a class, infinite where it may not have a choice."""
    return np.asarray(priced_times(form, weights, c)[None] + p.priced_omega)


def priced_times(form: Form, weights: Weights, c: int) -> Floats:
    """[B] priced time of a layer on a class."""
    x = form.numbers
    prefill = x.prefill_s[0, c] + weights.prefill[c] * x.held_prefill_s[0, c]
    decode = weights.every_decode * x.decode_s[0, c] + weights.decode[c] * x.held_decode_s[0, c]
    return np.asarray(prefill + decode)


def ends_costs(form: Form, weights: Weights) -> Floats:
    """[C, 2] priced time of embedding and head."""
    x = form.numbers
    prefill = x.ends_prefill_s + weights.prefill[:, None] * x.held_ends_prefill_s
    decode = weights.every_decode * x.ends_decode_s
    return np.asarray(prefill + decode + weights.decode[:, None] * x.held_ends_decode_s)


def priced_layers(
    p: Problem, costs: Floats, choices: NDArray[np.bool_], rho: float
) -> PricedLayers:
    """Return prefix sums over some choices, `rho` among the prices of memory."""
    sizes = p.all_layer_bytes[0][choices].astype(float)
    costs = costs[:, choices]
    rhos = np.unique([0.0, rho, *_turning_points(costs, sizes)])
    cheapest = np.array([(costs + r * sizes).min(axis=1) for r in rhos])
    sums = np.concatenate([np.zeros((len(rhos), 1)), np.cumsum(cheapest, axis=1)], axis=1)
    return PricedLayers(rhos=rhos, sums=sums)


def _turning_points(costs: Floats, sizes: Floats) -> Floats:
    """Return prices of memory spread over those at which some layer changes its choice."""
    found: list[Floats] = []
    for b in range(len(sizes)):
        smaller = sizes < sizes[b]
        if smaller.any():
            with np.errstate(invalid="ignore"):
                gain = (costs[:, smaller] - costs[:, b, None]) / (sizes[b] - sizes[smaller])
            found.append(gain[np.isfinite(gain) & (gain > 0)])
    turns = np.concatenate(found) if found else np.zeros(0)
    return np.quantile(turns, np.linspace(0, 1, RHOS)) if len(turns) else turns


def stages_by_price(p: Problem, form: Form, weights: Weights, box: Box, rho: Floats) -> Floats:
    """[C, L+1, L+1] T with memory priced; `rho` [C] are the relaxation's prices."""
    layers, capacity = p.num_layers, form.numbers.capacity
    ends = ends_costs(form, weights)
    table = np.full((len(p.classes), layers + 1, layers + 1), np.inf)
    for c in range(len(p.classes)):
        costs = layer_costs(p, form, weights, c)
        for sort in (DENSE, PACKED, MIXED):
            choices = choices_of(p.choices, sort)
            if capacity[c, 0, 0, sort] == NEVER or not choices.any():
                continue
            made = priced_layers(p, costs, choices, float(rho[c]))
            least = _least_times(p, form, c, choices, box)
            room = capacity[c, :, :, sort]
            found = _ranges(made, room, int(p.all_layer_bytes[0][choices].min()), least)
            table[c] = np.minimum(table[c], found)
        table[c, 0] += ends[c, 0]
        table[c, :, layers] += ends[c, 1]
    return table


def _least_times(p: Problem, form: Form, c: int, choices: NDArray[np.bool_], box: Box) -> int:
    """Return the most layers of which a stage stays within the box at its quickest choices."""
    x, most = form.numbers, p.num_layers
    for table, high in ((x.held_prefill_s, box.p_high), (x.held_decode_s, box.d_high)):
        once = float(table[0, c, choices].min())
        if np.isfinite(high) and once > 0:
            most = min(most, int(high / once * (1 + 1e-9)))
    return most


def _ranges(made: PricedLayers, room: NDArray[np.int64], smallest: int, most: int) -> Floats:
    """[L+1, L+1] the largest bound over the prices, infinite where nothing fits."""
    size = made.sums.shape[1]
    layers = size - 1
    left = np.full((size, size), float(room[0, 0]))
    left[0, :], left[:, layers] = float(room[1, 0]), float(room[0, 1])
    left[0, layers] = float(room[1, 1])
    span = np.arange(size)[None, :] - np.arange(size)[:, None]
    table = np.full((size, size), -np.inf)
    for rho, sums in zip(made.rhos, made.sums, strict=True):
        with np.errstate(invalid="ignore"):
            bound = sums[None, :] - sums[:, None] - rho * left
        np.fmax(table, bound, out=table)
    # Prefix sums beyond a layer that has no choice are infinite, and their differences no numbers.
    closed = np.cumsum(np.isinf(np.diff(made.sums[0], prepend=0.0)))
    table[closed[None, :] > closed[:, None]] = np.inf
    table[(span < 1) | (span * smallest > left) | (span > most)] = np.inf
    return table


def stages_by_table(p: Problem, form: Form, weights: Weights, box: Box, columns: Columns) -> Floats:
    """[C, L+1, L+1] T from every count vector."""
    layers, x = p.num_layers, form.numbers
    ends = ends_costs(form, weights)
    table = np.full((len(p.classes), layers + 1, layers + 1), np.inf)
    for m in range(1, columns.most + 1):
        omega = priced(columns.least[m], p.theta)
        starts = np.arange(len(omega))
        for c in range(len(p.classes)):
            base = column_costs(form, weights, box, columns.counts[m], c)
            room = x.capacity[c]
            fits = columns.fitting(m, room[0, 0])
            if fits.any():
                table[c, starts, starts + m] = (omega[:, fits] + base[fits]).min(axis=1)
            last = int(m == layers)
            fits = columns.fitting(m, room[1, last])
            table[c, 0, m] = _least(omega[0], base, fits) + ends[c, 0] + last * ends[c, 1]
            if not last and len(omega) > 1:
                fits = columns.fitting(m, room[0, 1])
                table[c, layers - m, layers] = _least(omega[-1], base, fits) + ends[c, 1]
    return table


def column_costs(
    form: Form, weights: Weights, box: Box, counts: NDArray[np.int64], c: int
) -> Floats:
    """[K] priced time of count vectors on a class, infinite beyond the box."""
    x = form.numbers
    tp, td = counts @ x.held_prefill_s[0, c], counts @ x.held_decode_s[0, c]
    inside = (tp <= box.p_high) & (td <= box.d_high)
    return np.where(inside, counts @ priced_times(form, weights, c), np.inf)


def _least(omega: Floats, base: Floats, fits: NDArray[np.bool_]) -> float:
    """Cheapest of the columns that fit, infinite if there is none."""
    return float((omega[fits] + base[fits]).min()) if fits.any() else float("inf")
