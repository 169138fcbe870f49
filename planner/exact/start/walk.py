"""Looks for good plans, a precision for each stage: descends, is kicked off, descends.

Such plans are few enough, and weighed by thousands (shapes.py), to find most of what is to be
found; what other mixes of precisions in a stage add is left to improve.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.start.improve import improved
from llmpq.planner.exact.start.neighbours import moved_layers, other_orders
from llmpq.planner.exact.start.shapes import Ints, Shapes, ShapeScales, shape_of
from llmpq.planner.exact.start.starts import Incumbent
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Floats

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
        end, now = deadline, time.perf_counter()
        deadline = now + WALK_SHARE * max(0.0, end - now)
        reached: list[tuple[float, Shapes, Pair]] = []
        for number, start in enumerate(starts):
            now, shape = time.perf_counter(), shape_of(start)
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
        while futile < most and time.perf_counter() < (deadline if self.incumbent.best else end):
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
            if best is None or best == pair or time.perf_counter() > deadline:
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
            while shape.cls.shape[1] > 1 and time.perf_counter() < deadline:
                moved = moved_layers(shape, self.chance)
                now, found = _best(scales, moved)
                if now is None or not found < worth * BETTER:
                    break
                shape, worth = now, found
            for cls, bits in self._orders(shape):
                if time.perf_counter() > deadline:
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
