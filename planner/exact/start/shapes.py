"""Many plans at once, each stage of one precision: what they are worth, layers shared out.

Of equal length, as arrays [N, J]: thousands are weighed in a few milliseconds (neighbours.py makes
them, walk.py looks for good ones among them). Where a stage has no room for all of its layers at
its precision, some or all of them have the next ones below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.costs.stage_memory import sort_of
from llmpq.planner.exact.bounds.form import make_form
from llmpq.planner.exact.space import allowed_stages
from llmpq.planner.problem.outcome import BUDGET_ROUNDING, Assignment, Stage
from llmpq.planner.problem.problem import Floats, Problem

Ints = NDArray[np.int64]
WIDER = (1.0, 1.03, 1.1, 1.3, 2.0)
"""Multiples of the shortest possible slowest stage that stages are filled up to."""
PACES = (
    *((wider, math.inf) for wider in WIDER),
    *((math.inf, wider) for wider in WIDER),
    *((wider, wider) for wider in WIDER[1:]),
    (math.inf, math.inf),
)
"""Of prefill and of decode."""
HALVINGS = 14
BEYOND = 10.0
"""How many times dearer omega beyond the budget is, and the seconds by its share of it."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Plans of J stages, [N, J] each: the class, the choice and the layers of every stage."""

    cls: Ints
    bits: Ints
    layers: Ints

    def __getitem__(self, rows: int | Ints) -> Shapes:
        return Shapes(
            cls=np.atleast_2d(self.cls[rows]),
            bits=np.atleast_2d(self.bits[rows]),
            layers=np.atleast_2d(self.layers[rows]),
        )


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What the stages of some shapes hold, [N, J]: two choices, and how many layers have either."""

    upper: Ints
    lower: Ints
    above: Ints
    below: Ints
    fits: NDArray[np.bool_]


def shape_of(a: Assignment) -> Shapes:
    """Return a plan with the most frequent choice of each stage in all of it."""
    bits = [max(set(s.choices), key=s.choices.count) for s in a.stages]
    return Shapes(
        cls=np.array([[s.cls for s in a.stages]]),
        bits=np.array([bits]),
        layers=np.array([[s.end - s.start for s in a.stages]]),
    )


class ShapeScales:
    """Weighs shapes at one pair of micro-batch sizes."""

    def __init__(self, p: Problem, pair: tuple[int, int], budget: float | None) -> None:
        self.p, self.budget = p, budget
        self.form = make_form(p, *pair)
        x = self.form.numbers
        self.once = np.stack([x.prefill_s[0], x.decode_s[0]])
        """[2, C, B]."""
        self.ends = np.stack([x.ends_prefill_s, x.ends_decode_s])
        self.held = np.stack([x.held_prefill_s[0], x.held_decode_s[0]])
        """[2, C, B] as the slowest stage goes by."""
        self.held_ends = np.stack([x.held_ends_prefill_s, x.held_ends_decode_s])
        self.even = np.array_equal(self.held, self.once)
        self.room = x.capacity
        self.sizes = p.all_layer_bytes[0]
        self.omega: Floats = np.zeros((len(p.choices), p.num_layers + 1))
        """[B, L+1] of the layers before; choices that some layer may not have are not met."""
        self.omega[:, 1:] = np.cumsum(p.omega, axis=0).T
        unit = np.eye(len(p.choices), dtype=np.int64)
        self.sorts = sort_of(p.packed, unit[:, None] + unit[None])
        """[B, B] of a stage of two choices."""
        self.next = self._next_below()
        closed = np.where(p.open.all(axis=0), 0, np.iinfo(np.int64).max // 2)
        self.smallest = int(np.argmin(self.sizes + closed))
        self.allowed = allowed_stages(p) if p.pins else None

    def _next_below(self) -> Ints:
        """[B] the largest of the smaller choices, itself where there is none."""
        found, open_to_all = np.arange(len(self.sizes)), self.p.open.all(axis=0)
        for b, size in enumerate(self.sizes):
            smaller = np.flatnonzero(open_to_all & (self.sizes < size))
            if len(smaller):
                largest = smaller[self.sizes[smaller] == self.sizes[smaller].max()]
                found[b] = largest[np.argmin(self.omega[largest, -1])]
        return found

    def mixed(self, s: Shapes) -> Mix:
        """Lower as many layers of each stage as its memory asks for."""
        upper, below = s.bits, np.zeros_like(s.layers)
        for _ in range(len(self.sizes)):
            lower = self.next[upper]
            short = s.layers * self.sizes[upper] > self._room(s.cls, upper, upper)
            saved = np.maximum(self.sizes[upper] - self.sizes[lower], 1)
            needed = s.layers * self.sizes[upper] - self._room(s.cls, upper, lower)
            below = np.where(short, np.maximum(-(-needed // saved), 1), 0)
            too_many = (below >= s.layers) & (lower != upper)
            if not too_many.any():
                break
            upper = np.where(too_many, lower, upper)
        lower = self.next[upper]
        fits = (below == 0) | ((below < s.layers) & (lower != upper))
        return Mix(
            upper=upper, lower=lower, above=s.layers - below, below=below, fits=fits.all(axis=1)
        )

    def stages(self, s: Shapes) -> tuple[Stage, ...]:
        """Return the first plan as solvers name it: layers that lose least are lowered."""
        mix, ends = self.mixed(s), np.cumsum(s.layers[0]).tolist()
        found = []
        for j, (c, end) in enumerate(zip(s.cls[0].tolist(), ends, strict=True)):
            start = end - int(s.layers[0, j])
            upper, lower = int(mix.upper[0, j]), int(mix.lower[0, j])
            lost = self.p.omega[start:end, lower] - self.p.omega[start:end, upper]
            choices = np.full(end - start, upper)
            choices[np.argsort(lost, kind="stable")[: int(mix.below[0, j])]] = lower
            found.append(Stage(cls=c, start=start, end=end, choices=tuple(choices.tolist())))
        return tuple(found)

    def worths(self, s: Shapes) -> Floats:
        """[N] the objective, infinite where a plan does not fit, more beyond the budget.

        Of stages of two choices it is an estimate: whichever layers have the lower one.
        """
        ends, mix = np.cumsum(s.layers, axis=1), self.mixed(s)
        wrong = (s.layers < 1).any(axis=1) | ~mix.fits
        ends = np.clip(ends, 0, self.p.num_layers)
        begun = np.concatenate([np.zeros((len(ends), 1), dtype=np.int64), ends[:, :-1]], axis=1)
        share = mix.below / np.maximum(s.layers, 1)
        of_upper, of_lower = (
            self.omega[bits, ends] - self.omega[bits, begun] for bits in (mix.upper, mix.lower)
        )
        omega = (of_upper + share * (of_lower - of_upper)).sum(axis=1)
        if self.allowed is not None:
            wrong |= ~self.allowed[s.cls, begun, ends].all(axis=1)
        seconds = self._seconds(s, mix)
        if self.budget is not None:
            excess = np.maximum(omega - self.budget * (1 + BUDGET_ROUNDING / 4), 0.0)
            seconds = seconds * (1 + BEYOND * excess / max(self.budget, 1e-300))
            omega = self.budget + BEYOND * excess
        return np.where(wrong, np.inf, seconds + self.p.theta * omega)

    def _room(self, cls: Ints, bits: Ints, others: Ints) -> Ints:
        """[N, J] bytes that each stage has for layers of two choices."""
        first, last = np.zeros(cls.shape[1], dtype=int), np.zeros(cls.shape[1], dtype=int)
        first[0], last[-1] = 1, 1
        return np.asarray(self.room[cls, first[None], last[None], self.sorts[bits, others]])

    def _most(self, cls: Ints, bits: Ints) -> Ints:
        """[N, J] layers that each stage has the memory for."""
        room = np.maximum(self._room(cls, bits, bits), 0)
        return np.asarray(np.minimum(room // self.sizes[bits], self.p.num_layers))

    def _seconds(self, s: Shapes, mix: Mix) -> Floats:
        x, form = self.form.numbers, self.form
        times = _stage_times(self.once, self.ends, s, mix)
        held = times if self.even else _stage_times(self.held, self.held_ends, s, mix)
        (slow_p, slow_d), (cost_p, once) = held.max(axis=2), times.sum(axis=2)
        back = np.zeros(len(s.cls))
        if s.cls.shape[1] > 1:
            links, ring = (s.cls[:, :-1], s.cls[:, 1:]), (s.cls[:, -1], s.cls[:, 0])
            slow_p = np.maximum(slow_p, x.hop_prefill.held_s[links].max(axis=1))
            slow_d = np.maximum(slow_d, x.hop_decode.held_s[links].max(axis=1))
            if form.first_back:
                slow_p = np.maximum(slow_p, x.back_prefill.held_s[ring])
            if form.back_bounds:
                slow_d = np.maximum(slow_d, x.back_decode.held_s[ring])
            if form.hops_in_sums:
                cost_p = cost_p + x.hop_prefill.total_s[links].sum(axis=1)
                once = once + x.hop_decode.total_s[links].sum(axis=1)
                back = x.back_decode.total_s[ring]
                if form.first_back:
                    cost_p = cost_p + x.back_prefill.total_s[ring]
        total = form.a * slow_p + cost_p + form.bd * slow_d + form.ws * once + form.back * back
        return np.asarray(total + form.z * np.maximum(form.md * slow_d, once + back))

    def shared(self, cls: Ints, bits: Ints) -> Shapes:
        """Share the layers out among stages, several ways each: [n, J] to some of [n x T, J].

        The slowest stage is given; what is then too much is taken from those where it is dearest.
        """
        roomy, wanted = self._most(cls, bits), self.p.num_layers
        if (self.next != np.arange(len(self.next))).any():
            least = np.full_like(bits, self.smallest)
            tight = (roomy.sum(axis=1) < wanted) | (roomy < 1).any(axis=1)
            roomy = np.where(tight[:, None], self._most(cls, least), roomy)
        fit = (roomy.sum(axis=1) >= wanted) & (roomy > 0).all(axis=1)
        fit &= cls.shape[1] <= wanted
        cls, bits, roomy = cls[fit], bits[fit], roomy[fit]
        once = np.maximum(self.held[:, cls, bits], 1e-300)
        ends = np.zeros_like(once)
        ends[:, :, 0] += self.held_ends[:, cls[:, 0], 0]
        ends[:, :, -1] += self.held_ends[:, cls[:, -1], 1]

        def filled(slowest: Floats) -> Floats:
            """[2, ..., n, J] layers of each stage that take so long."""
            most = np.floor((slowest[..., None] - ends) / once + 1e-9)
            return np.clip(most, 1, roomy)

        low = np.zeros(once.shape[:2])
        high = (ends + once * roomy).max(axis=2)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            enough = filled(middle).sum(axis=2) >= wanted
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        price = once[0] + (self.form.ws + self.form.z) * once[1]
        dearest = np.argsort(-price, axis=1, kind="stable")
        found = []
        for paces in PACES:
            most = filled(high * np.array(paces)[:, None] * (1 + 1e-9)).min(axis=0)
            found.append(_without_excess(most.astype(np.int64), dearest, wanted))
        rows = [np.flatnonzero(layers.sum(axis=1) == wanted) for layers in found]
        return Shapes(
            cls=np.concatenate([cls[own] for own in rows]),
            bits=np.concatenate([bits[own] for own in rows]),
            layers=np.concatenate([found[k][own] for k, own in enumerate(rows)]),
        )


def _stage_times(layers: Floats, ends: Floats, s: Shapes, mix: Mix) -> Floats:
    """[2, N, J] of prefill and decode: `layers` [2, C, B], `ends` [2, C, 2]."""
    times: Floats = layers[:, s.cls, mix.upper] * mix.above
    times += layers[:, s.cls, mix.lower] * mix.below
    times[:, :, 0] += ends[:, s.cls[:, 0], 0]
    times[:, :, -1] += ends[:, s.cls[:, -1], 1]
    return times


def _without_excess(most: Ints, dearest: Ints, wanted: int) -> Ints:
    """Take layers beyond `wanted` from the dearest stages, one layer each excepted."""
    spare = np.take_along_axis(most, dearest, axis=1) - 1
    excess = np.maximum(most.sum(axis=1) - wanted, 0)[:, None]
    taken = np.clip(excess - (np.cumsum(spare, axis=1) - spare), 0, spare)
    less = np.empty_like(most)
    np.put_along_axis(less, dearest, taken, axis=1)
    return most - less
