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
from llmpq.planner.exact.bounds.form import Box, Form
from llmpq.planner.exact.bounds.pair_columns import KeptPairs
from llmpq.planner.problem.problem import Floats, Problem

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


def stages_by_table(p: Problem, form: Form, weights: Weights, box: Box, kept: KeptPairs) -> Floats:
    """[C, L+1, L+1] T from every count vector."""
    layers, columns = p.num_layers, kept.columns
    table = np.full((len(p.classes), layers + 1, layers + 1), np.inf)
    if not columns.most:
        return table
    pair, ends = kept.at(form.numbers), ends_costs(form, weights)
    omega = columns.priced_omega(p.theta)
    inside = (pair.prefill_s <= box.p_high) & (pair.decode_s <= box.d_high)
    prices = np.array([priced_times(form, weights, c) for c in range(len(p.classes))])
    base = pair.priced(prices, inside & (pair.middle | pair.first | pair.last))
    middle = np.where(pair.middle, base, np.inf)
    for c, m in zip(*np.nonzero(np.isfinite(pair.least(middle))), strict=True):
        costs, here = omega[m + 1], pair.of_length(int(m))
        starts = np.arange(len(costs))
        table[c, starts, starts + m + 1] = (costs + middle[c, here]).min(axis=1)
    first = np.concatenate([of_length[0] for of_length in omega[1:]])
    table[:, 0, 1 : columns.most + 1] = pair.least(first + np.where(pair.first, base, np.inf))
    table[:, 0] += ends[:, 0, None]
    table[:, 0, layers] += ends[:, 1]
    for_last = [of_length[-1] for of_length in omega[1:]]
    if len(omega[1]) > 1:
        last = np.concatenate(for_last)
        found = pair.least(last + np.where(pair.last, base, np.inf)) + ends[:, 1, None]
        most = min(columns.most, layers - 1)
        table[:, layers - 1 - np.arange(most), layers] = found[:, :most]
    return table


def column_costs(
    form: Form, weights: Weights, box: Box, counts: NDArray[np.int64], c: int
) -> Floats:
    """[K] priced time of count vectors on a class, infinite beyond the box."""
    x = form.numbers
    tp, td = counts @ x.held_prefill_s[0, c], counts @ x.held_decode_s[0, c]
    inside = (tp <= box.p_high) & (td <= box.d_high)
    return np.where(inside, counts @ priced_times(form, weights, c), np.inf)
