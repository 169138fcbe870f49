"""Looks for good plans, a precision for each stage: descends, is kicked off, descends.

Such plans are few enough, and weighed by thousands (`ShapeScales`), to find most of what is to be
found; what other mixes of precisions in a stage add is left to improve.py.

Many plans at once, each stage of one precision: what they are worth, layers shared out.

Of equal length, as arrays [N, J]: thousands are valued in a few milliseconds. Where a stage has no
room for all of its layers at its precision, some or all of them have the next ones below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.evaluate.objective import make_form
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.bounds.space import allowed_stages
from llmpq.planner.exact.start.improve import improved
from llmpq.planner.exact.start.starts import Incumbent, distinct_orders, first_plans, other_methods
from llmpq.planner.problem.outcome import BUDGET_ROUNDING, Assignment, Stage
from llmpq.planner.problem.problem import Floats, Problem
from llmpq.planner.problem.stage_memory import sort_of
from llmpq.planner.problem.work_clock import now_s, spend

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
        """[2, C, B] means over micro-batches: what P and D are made of."""
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
        self.allowed = allowed_stages(p) if p.is_restricted else None

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
        spend(110, 120 * s.layers.size)
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
        times = _stage_times(self.once, self.ends, s, mix)
        held = times if self.even else _stage_times(self.held, self.held_ends, s, mix)
        return self.form.seconds(s.cls, np.concatenate([times, held]))

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
        spend(500, (8 * HALVINGS + 40 * len(PACES)) * once.size)
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


STEPS = (1, 2, 4, 8)
"""Layers moved at once."""
MOST_PAIRS = 300
"""Pairs of stages that are looked at: of more, some by chance."""
Order = tuple[Ints, Ints]
"""[n, J] classes and choices of stages."""


def moved_layers(s: Shapes, chance: np.random.Generator) -> Shapes:
    """Return the first of some plans with layers of any stage given to any other one."""
    count = s.cls.shape[1]
    pairs = _pairs(count, chance)
    step = np.repeat(np.array(STEPS), len(pairs))
    givers, takers = np.tile(pairs, (len(STEPS), 1)).T
    rows = np.repeat(s.layers[:1], len(step), axis=0)
    number = np.arange(len(rows))
    rows[number, givers] -= step
    rows[number, takers] += step
    some = (rows > 0).all(axis=1)
    size = (int(some.sum()), count)
    return Shapes(
        cls=np.broadcast_to(s.cls[0], size),
        bits=np.broadcast_to(s.bits[0], size),
        layers=rows[some],
    )


def _pairs(count: int, chance: np.random.Generator) -> Ints:
    """[n, 2] pairs of different stages."""
    pairs = np.argwhere(~np.eye(count, dtype=bool))
    return pairs if len(pairs) <= MOST_PAIRS else chance.choice(pairs, MOST_PAIRS, replace=False)


def other_orders(
    s: Shapes, counts: Ints, most: int, choices: Ints, chance: np.random.Generator
) -> Iterator[Order]:
    """Yield the orders beside a plan's: of as many stages, of one less, of one more."""
    cls, bits = s.cls[0], s.bits[0]
    unused = np.flatnonzero(np.bincount(cls, minlength=len(counts)) < counts)
    yield from _exchanged(cls, bits, chance)
    yield from _replaced(cls, bits, unused, choices)
    if len(cls) > 1:
        kept = ~np.eye(len(cls), dtype=bool)
        rows = np.array([np.flatnonzero(own) for own in kept])
        yield cls[rows], bits[rows]
    if len(cls) < most and len(unused):
        yield _inserted(cls, bits, unused, choices)


def _exchanged(cls: Ints, bits: Ints, chance: np.random.Generator) -> Iterator[Order]:
    """Exchange two stages, put one elsewhere, begin elsewhere, go the other way round."""
    count = len(cls)
    rows = []
    for j, k in _pairs(count, chance).tolist():
        order = list(range(count))
        order.insert(k, order.pop(j))
        rows.append(order)
        if j < k:
            swapped = list(range(count))
            swapped[j], swapped[k] = k, j
            rows.append(swapped)
    rows += [list(np.roll(np.arange(count), k)) for k in range(1, count)]
    rows.append(list(range(count))[::-1])
    wanted = np.unique(np.array(rows), axis=0)
    pair = cls[wanted] * (int(bits.max()) + 1) + bits[wanted]
    _, different = np.unique(pair, axis=0, return_index=True)
    chosen = wanted[different]
    yield cls[chosen], bits[chosen]


def _replaced(cls: Ints, bits: Ints, unused: Ints, choices: Ints) -> Iterator[Order]:
    """Take another device for a stage, another choice for one, or for all of one choice."""
    found = []
    for j in range(len(cls)):
        for c in unused:
            if c != cls[j]:
                found.append((_with(cls, j, c), bits))
        for b in choices:
            if b != bits[j]:
                found.append((cls, _with(bits, j, b)))
    for old in np.unique(bits):
        found += [(cls, np.where(bits == old, b, bits)) for b in choices if b != old]
    if found:
        yield np.array([own for own, _ in found]), np.array([own for _, own in found])


def _inserted(cls: Ints, bits: Ints, unused: Ints, choices: Ints) -> Order:
    """Add an unused device anywhere, of a choice that a stage beside it has, or of any."""
    found = [
        (np.insert(cls, j, c), np.insert(bits, j, b))
        for j in range(len(cls) + 1)
        for c in unused
        for b in (set(bits.tolist()) if len(set(bits.tolist())) > 1 else choices)
    ]
    return np.array([own for own, _ in found]), np.array([own for _, own in found])


def _with(row: Ints, j: int, value: int) -> Ints:
    changed = row.copy()
    changed[j] = value
    return changed


MOST = 250
"""Orders that are looked at together: of more, some by chance."""
NEAR = 12
"""Pairs of sizes, best first, that a plan may be tried at when it is kicked."""
FUTILE = 4
"""Kicks in a row, for each stage a plan may have, after which a walk to nothing better ends."""
PATIENT = 100
"""The same where nothing else is left to do."""
WALK_SHARE = 0.7
"""Share of the time until small changes of the best plan."""
BETTER = 1 - 1e-10
Pair = tuple[int, int]


class Walk:
    """A walk from plan to plan; every plan that is better is offered to the incumbent."""

    def __init__(self, incumbent: Incumbent, tables: PairTables) -> None:
        self.incumbent, self.tables = incumbent, tables
        p = incumbent.p
        self.choices = np.flatnonzero(p.open.all(axis=0))
        self.counts = np.array([cls.count for cls in p.classes])
        self.scales: dict[Pair, ShapeScales] = {}

    def from_each(
        self, starts: Sequence[Assignment], deadline: float, futile_kicks: int = FUTILE
    ) -> None:
        """Improve each start in turn, go on from the best of what they lead to.

        It ends early after `futile_kicks` for each stage a plan may have.
        In the end small changes mix the precisions of the best, which may be beyond the budget.
        """
        if not len(self.choices):
            return
        end, now = deadline, now_s()
        deadline = now + WALK_SHARE * max(0.0, end - now)
        reached: list[tuple[float, Shapes, Pair]] = []
        for number, start in enumerate(starts):
            now, shape = now_s(), shape_of(start)
            if now > deadline:
                break
            if np.isin(shape.bits, self.choices).all():
                pair = (start.prefill_microbatch, start.decode_microbatch)
                share = (deadline - now) / (len(starts) - number)
                reached.append(self._settled(shape, pair, now + share))
        for shape in () if reached else self._wholes():
            reached.append(self._settled(shape, self._roomiest, deadline))
        reached = [found for found in reached if math.isfinite(found[0])]
        if not reached:
            return
        worth, shape, pair = min(reached, key=lambda found: found[0])
        futile, most = 0, futile_kicks * self.incumbent.p.max_stages
        while futile < most and now_s() < (deadline if self.incumbent.best else end):
            found = self._settled(*self._kicked(shape, pair), end)
            futile = 0 if found[0] < worth * BETTER else futile + 1
            if found[0] <= worth:
                worth, shape, pair = found
        improved(self.incumbent, self.tables, self._plan(shape, pair), end)

    def from_best(self, deadline: float) -> None:
        """Go on from the best plan for as long as there is time: nothing else is left to do."""
        if self.incumbent.best is not None:
            self.from_each([self.incumbent.best], deadline, PATIENT)

    @property
    def _roomiest(self) -> Pair:
        return self.incumbent.p.pairs[0]

    def _wholes(self) -> Iterator[Shapes]:
        """Yield plans of all devices, where nothing simpler fits."""
        p = self.incumbent.p
        order = [c for c, cls in enumerate(p.classes) for _ in cls.devices][: p.max_stages]
        for b in self.choices:
            cls = np.array([order])
            shared = self._at(self._roomiest).shared(cls, np.full_like(cls, b))
            now, worth = _best(self._at(self._roomiest), shared)
            if now is not None and math.isfinite(worth):
                yield now

    @cached_property
    def chance(self) -> np.random.Generator:
        """Numbers by chance, the same in every search."""
        return np.random.default_rng(0)

    def _at(self, pair: Pair) -> ShapeScales:
        if pair not in self.scales:
            self.scales[pair] = ShapeScales(self.incumbent.p, pair, self.incumbent.budget)
        return self.scales[pair]

    def _settled(self, shape: Shapes, pair: Pair, deadline: float) -> tuple[float, Shapes, Pair]:
        """Return what changes lead to, at the pair of sizes that suits it best."""
        worth = math.inf
        while True:
            shape, found = self._descended(shape, pair, deadline)
            if not found < worth * BETTER:
                break
            worth = found
            best = self.tables.best_pair(self._at(pair).stages(shape), math.inf)
            if best is None or best == pair or now_s() > deadline:
                break
            pair = best
        if worth < self.incumbent.value:
            self.incumbent.offer(self._plan(shape, pair))
        return worth, shape, pair

    def _descended(self, shape: Shapes, pair: Pair, deadline: float) -> tuple[Shapes, float]:
        """Take the best change of each sort while one helps."""
        scales = self._at(pair)
        worth = float(scales.worths(shape)[0])
        better = True
        while better:
            better = False
            while shape.cls.shape[1] > 1 and now_s() < deadline:
                moved = moved_layers(shape, self.chance)
                now, found = _best(scales, moved)
                if now is None or not found < worth * BETTER:
                    break
                shape, worth = now, found
            for cls, bits in self._orders(shape):
                if now_s() > deadline:
                    return shape, worth
                now, found = _best(scales, scales.shared(cls, bits))
                if cls.shape[1] == shape.cls.shape[1]:
                    same = Shapes(
                        cls=cls, bits=bits, layers=np.broadcast_to(shape.layers, cls.shape)
                    )
                    as_long, worth_so = _best(scales, same)
                    if worth_so < found:
                        now, found = as_long, worth_so
                if now is not None and found < worth * BETTER:
                    shape, worth, better = now, found, True
                    break
        return shape, worth

    def _plan(self, shape: Shapes, pair: Pair) -> Assignment:
        stages = self._at(pair).stages(shape)
        return Assignment(prefill_microbatch=pair[0], decode_microbatch=pair[1], stages=stages)

    def _orders(self, shape: Shapes) -> Iterator[tuple[Ints, Ints]]:
        """Yield orders beside a plan's, as many at once as are weighed quickly."""
        most = self.incumbent.p.max_stages
        for cls, bits in other_orders(shape, self.counts, most, self.choices, self.chance):
            if len(cls) > MOST:
                rows = self.chance.choice(len(cls), MOST, replace=False)
                cls, bits = cls[rows], bits[rows]
            yield cls, bits

    def _kicked(self, shape: Shapes, pair: Pair) -> tuple[Shapes, Pair]:
        """Return another plan not far off: some stages fewer or more, at other sizes."""
        p, chance = self.incumbent.p, self.chance
        cls, bits = shape.cls[0].tolist(), shape.bits[0].tolist()
        for _ in range(int(chance.integers(1, 4))):
            unused = np.flatnonzero(np.bincount(cls, minlength=len(self.counts)) < self.counts)
            what = int(chance.integers(4))
            at = int(chance.integers(len(cls)))
            if what == 0 and len(cls) > 1:
                del cls[at], bits[at]
            elif what == 1 and len(unused) and len(cls) < p.max_stages:
                cls.insert(at, int(chance.choice(unused)))
                bits.insert(at, bits[at])
            elif what == 2:
                other = int(chance.integers(len(cls)))
                cls[at], cls[other] = cls[other], cls[at]
                bits[at], bits[other] = bits[other], bits[at]
            else:
                pair = self._near(shape, pair)
        scales = self._at(pair)
        shared = scales.shared(np.array([cls]), np.array([bits]))
        now, _ = _best(scales, shared) if len(shared.cls) else (None, math.inf)
        return (shape if now is None else now), pair

    def _near(self, shape: Shapes, pair: Pair) -> Pair:
        """Return one of the pairs that suit a plan best, whatever fits."""
        p, tables = self.incumbent.p, self.tables
        values: Floats = np.where(tables.open, tables.values(self._at(pair).stages(shape)), np.inf)
        best = np.argsort(values, axis=None)[:NEAR]
        row, column = np.unravel_index(int(self.chance.choice(best)), values.shape)
        found = p.prefill_sizes[row], p.decode_sizes[column]
        return found if tables.open[row, column] else pair


def _best(scales: ShapeScales, shapes: Shapes) -> tuple[Shapes | None, float]:
    if not len(shapes.cls):
        return None, math.inf
    worths = scales.worths(shapes)
    row = int(np.argmin(worths))
    return shapes[row], float(worths[row])


IMPROVE_SHARE = 0.4
"""Share of what is left of the time for the improvement of each of a few plans."""
STARTS = 4
"""Plans of the simple methods that are improved, each of another order."""
EACH_WALK_SHARE = 0.6
"""Share of what is left of the time for a walk among plans of one precision a stage."""


def begin(walk: Walk, known: Assignment | None, limit: float) -> None:
    """Offer simple plans and a known one, improved, to the walk's incumbent.

    It takes until `limit`, a time of `time.perf_counter`.
    """
    incumbent, tables = walk.incumbent, walk.tables
    p, now = incumbent.p, now_s()
    found: list[tuple[float, Assignment]] = []

    def keep(plans: Iterator[Assignment], until: float) -> None:
        for plan in plans:
            incumbent.offer(plan)
            found.append((incumbent.worth(plan), plan))
            if now_s() > until and incumbent.best is not None:
                return

    if known is not None:  # it may not fit: it is of another precision of KV
        share = (limit - now) * IMPROVE_SHARE / 2
        improved(incumbent, tables, known, now + share)
        found.append((math.inf, known))
    keep(first_plans(p, tables), (now + limit) / 2)
    now = now_s()
    walk.from_each(distinct_orders(found, STARTS), now + (limit - now) * EACH_WALK_SHARE)
    now = now_s()
    keep(other_methods(p, now + (limit - now) / 4), limit)
    now = now_s()
    walk.from_each(distinct_orders(found, STARTS), now + (limit - now) * EACH_WALK_SHARE)
    for plan in (*filter(None, [incumbent.best]), *distinct_orders(found, STARTS)):
        now = now_s()
        improved(incumbent, tables, plan, now + (limit - now) * IMPROVE_SHARE)
    keep(other_methods(p, limit), limit)
    if incumbent.best is not None:
        improved(incumbent, tables, incumbent.best, limit)
