"""By how much all costs may be wrong with a plan within 5 % of the best: proven, and refuted.

Every entry of the cost table (planner/evaluate/cost_entries.py) may be wrong by a factor of its own
in [1 - x, 1 + x]. Let p be the plan, q any other, f factors, v_f a plan's objective with them. The
plan stays near the best at x if v_f(p) <= 1.05 v_f(q) for all f and q.

Refuted, by example: the search's best plan q where what p's slowest stages use is slower and all
else quicker; then the f that is worst for this pair, and the search again with it, until no new
plan comes; then of p's next slowest stages.

Proven, by the search's bound: of a box lo <= f <= hi and a term (`EntryTimes`) a f of p

    1.05 v_f(q) - a f >= 1.05 v_g(q) - a hi,    g = lo + (hi - lo) min(1, a / (1.05 c)),

where c is the most that any plan takes of an entry: linear in f, and true at lo and at hi. So no q
is much better in the box if none has v_g(q) below a hi / 1.05, which is one search. Where there is
such a q, the terms of p are looked at one by one, and boxes are cut in two.

All of it is work by the clock of searches (planner/problem/work_clock.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.costs.links import Floats
from llmpq.planner.evaluate.cost_entries import (
    CostEntries,
    EntryTimes,
    MostSeconds,
    loss_at_least_s,
)
from llmpq.planner.evaluate.objective import value
from llmpq.planner.exact.bounds.space import searched
from llmpq.planner.problem.cost_factors import CostFactors
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import counting, now_s, spend, spend_s
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import KvPrecisionSweep
from llmpq.plans.plan import Robustness

NEAR = 0.05
"""How far above the best a plan may be that is said to stay near it."""
MOST = 0.95
"""The largest share that is looked at."""
CLOSE = 1e-3
"""Both shares are as near as they are shown: one number."""
GAP, EXAMPLE_GAP = 1e-3, 0.03
"""Relative gap of searches for a proof, and for an example."""
OF_ONE = 0.2
"""Share of the work that a single search may have."""
OF_LIMIT, OF_SEARCH, LEAST_S = 0.05, 0.12, 0.12
"""Shares of the time limit, at most, and of the plan's own search, but not less than so many
seconds of work: about 15 % of a command's time."""
USEFUL_S = 0.03
"""Seconds of work below which no search is begun."""
OF_TABLES_S = 0.004
"""Seconds of a search that its clock does not count."""
OF_EXAMPLES = 0.4
"""Share of the work for examples; the rest is for proofs."""
FIRST = (0.3, MOST)
"""Shares by which costs of a plan are off where the first example is looked for."""
TURNS = 24
"""Steps of a game between factors and the slowest stages of a plan."""
EFFORTS = (1, 6, 40, 250)
"""Boxes of a proof at most: quick proofs first."""
SHY = 0.9
"""Share of the way to where a proof is expected to end that is tried."""
GROWTH = 1.4
"""How many times what is proven is tried next, by proofs of several boxes."""
COARSE = 0.1
"""Share of a refuted one within which a proof of one box looks for the largest that it shows."""


def bound_only(value_s: float, time_s: float, bound: float) -> float:
    """Return the share that follows from a bound of all plans alone; at least 0.

    The plan takes (1 + x) of its own time at most, any other (1 - x) of its at least.
    """
    most = (1 + NEAR) * bound
    return max(0.0, (most - value_s) / (most + time_s))


def work_limit_s(options: SolveOptions, spent_s: float) -> float:
    """Return the work of looking for both shares, by that of the searches for the plan."""
    return min(OF_LIMIT * options.time_limit_s, max(LEAST_S, OF_SEARCH * spent_s))


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """A plan that is much better with some factors within a share of 1."""

    share: float
    factors: Floats
    """[E]"""
    variant: int
    assignment: Assignment


@dataclass(frozen=True, kw_only=True, eq=False)
class _Box:
    """Factors between `low` and `high` [E], and terms of the plan, by rows of its times."""

    low: Floats
    high: Floats
    prefill: tuple[int, ...]
    decode: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Searched:
    """What a search says of a box: that no plan is much better in it, or a plan that may be."""

    ratio: float
    """Least value of a plan that is known, relative to what it must not be below."""
    holds: bool = False
    variant: int | None = None
    plan: Assignment | None = None


class RobustnessSearch:
    """The shares of one plan."""

    def __init__(
        self,
        variants: Sequence[Problem],
        variant: int,
        a: Assignment,
        options: SolveOptions,
        *,
        work_s: float,
        bound: float | None,
    ) -> None:
        """`variants`: the job at all that it was planned at, `a` a plan of one of them.

        `bound`: of all plans as costs are measured.
        """
        self.options = replace(options, prefer=None, method="exact", known=None)
        self.begin_s, self.work_s = now_s(), work_s
        self.variants = [
            p if options.budget is None else p.with_changes(theta=0.0) for p in variants
        ]
        self.entries = CostEntries(self.variants)
        self.variant, self.plan = variant, a
        self.own = self.entries.times(variant, a)
        self.loss_s = [loss_at_least_s(p) for p in self.variants]
        ones = np.ones(len(self.entries))
        own_value = self.own.value(ones)
        time_s = own_value - self.own.loss_s
        self.proven = 0.0 if bound is None else bound_only(own_value, time_s, bound)
        self.example: Example | None = None
        self.most = [MostSeconds(self.entries, k) for k in range(len(self.variants))]
        self.known = [(variant, a, self.own)]
        """Plans that a search found, or its own."""

    @property
    def refuted(self) -> float | None:
        """The share at which a better plan is known."""
        return None if self.example is None else self.example.share

    def run(self) -> None:
        """Look for examples, then for proofs between what is proven and refuted."""
        self._look_for_examples(self.begin_s + OF_EXAMPLES * self.work_s)
        for pieces in EFFORTS:
            self._bisect(pieces)

    def _bisect(self, pieces: int) -> None:
        """Raise what is proven by proofs of so many boxes at most."""
        tried, of_tried, of_proven = MOST, 0.0, 0.0
        while self._left_s() > 0:
            tried = tried if self.refuted is None else min(tried, self.refuted)
            if tried - self.proven <= max(CLOSE, COARSE * tried / pieces):
                return
            where = 1 / 2
            if of_tried and of_proven > of_tried:  # where a line is at 1, and a little less
                where = SHY * (of_proven - 1) / (of_proven - of_tried)
            x = self.proven + max(where, 1 - SHY) * (tried - self.proven)
            if pieces > 1 and not of_tried:  # each try is long: from below
                x = min(x, max(CLOSE, GROWTH * self.proven))
            holds, ratio = self.prove(x, pieces)
            if holds:
                self.proven, of_proven = x, max(ratio, 1.0)
            else:
                tried, of_tried = x, min(max(ratio, CLOSE), 1.0)

    def _left_s(self) -> float:
        return self.begin_s + self.work_s - now_s()

    def _look_for_examples(self, deadline_s: float) -> None:
        """Search with factors that are bad for the plan, then with the worst for what was found."""
        waiting = self._bad_factors()
        factors = next(waiting, None)
        while factors is not None and now_s() < deadline_s:
            before = self.refuted
            found = self._best(factors, self.own.value(factors) / (1 + NEAR), deadline_s)
            if found is not None:
                self._learn(*found)
            if self.example is not None and self.refuted != before:
                factors = self.example.factors
            else:
                factors = next(waiting, None)

    def _bad_factors(self) -> Iterator[Floats]:
        """Yield factors: what a term of the plan has most of is slower, all else quicker.

        Terms of the slowest stages first, at a share of `FIRST`, then at that of the example.
        """
        own, spans = self.own, (self.own.prefill, self.own.decode)
        most = own.fixed + own.prefill.max(axis=0) + own.decode.max(axis=0)
        slowest = [np.argsort(-rows.sum(axis=1), kind="stable") for rows in spans]
        pairs = sorted(product(*map(range, map(len, slowest))), key=sum)
        terms = [
            own.fixed + own.prefill[slowest[0][i]] + own.decode[slowest[1][j]] for i, j in pairs
        ]
        for x in FIRST:
            if self.refuted is None:
                yield np.where(terms[0] > most / 2, 1 + x, 1 - x)
        for term in terms[1:]:
            x = self.refuted or MOST
            yield np.where(term > most / 2, 1 + x, 1 - x)

    def _best(
        self, factors: Floats, below: float, deadline_s: float
    ) -> tuple[int, Assignment] | None:
        """Return the best plan of all variants with factors, if one is `below` a value.

        Else one that the search came upon, which may be with other factors.
        """
        problems = [self.entries.factored(k, factors) for k in range(len(self.variants))]
        sweep = self._sweep(problems, deadline_s, EXAMPLE_GAP, below)
        return None if sweep.best is None else (sweep.best[0], sweep.best[1].assignment)

    def _sweep(
        self,
        problems: Sequence[Problem],
        deadline_s: float,
        gap: float,
        ceiling: float,
        enough: float = -math.inf,
    ) -> KvPrecisionSweep:
        """Search all variants, a share of the work for it at most."""
        limit_s = min(OF_ONE * self.work_s, max(0.0, deadline_s - now_s()))
        options = replace(self.options, time_limit_s=limit_s, gap=gap)
        sweep = KvPrecisionSweep(problems, options, ceiling=ceiling, enough=enough)
        sweep.solve_all()
        spend_s(OF_TABLES_S * len(problems))
        return sweep

    def _learn(self, variant: int, a: Assignment) -> EntryTimes:
        """Make a plan the example where it is better by more than `NEAR` at a smaller share."""
        for other, plan, times in self.known:
            if (other, plan) == (variant, a):
                return times
        times = self.entries.times(variant, a)
        self.known.append((variant, a, times))
        x = MOST if self.refuted is None else self.refuted
        while x > self.proven:
            way = (self.worst(times, x) - 1) / x
            if self._above(times, 1 + x * way) <= 0:
                break
            least = self._least_share(times, way, x)
            self.example = Example(share=x, factors=1 + x * way, variant=variant, assignment=a)
            if least > x * (1 - CLOSE / 10):
                break
            x = least
        return times

    def _least_share(self, other: EntryTimes, way: Floats, x: float) -> float:
        """Return the least share along a way to factors at which another plan is better."""
        low, high = self.proven, x
        while high - low > CLOSE / 20:
            shares = np.linspace(low, high, 12)[1:-1]
            above = self._above_each(other, 1 + shares[:, None] * way) > 0
            first = int(np.argmax(above)) if above.any() else len(shares)
            low, high = (
                float(shares[first - 1]) if first else low,
                float(shares[first]) if first < len(shares) else high,
            )
        return high

    def _above(self, other: EntryTimes, factors: Floats) -> float:
        """Return by how much the plan is above `NEAR` of another, with factors [E]."""
        return float(self._above_each(other, factors[None])[0])

    def _above_each(self, other: EntryTimes, factors: Floats) -> Floats:
        spend(20)
        return self.own.values(factors) - (1 + NEAR) * other.values(factors)

    def worst(self, other: EntryTimes, x: float) -> Floats:
        """Return factors within a share x that are good for another plan, bad for this one.

        For each term of the plan a game: factors against the slowest stages of the other, whose
        means over all turns are tried as well. Of plans whose times are sums the first turn is
        the worst there is.
        """
        own, rows = self.own, (other.prefill, other.decode)
        size = len(self.entries)
        box = self._active(self._whole(x))
        prefill, decode = own.prefill[list(box.prefill)], own.decode[list(box.decode)]
        terms = own.fixed + (prefill[:, None] + decode[None]).reshape(-1, size)
        slowest = [np.tile(row.mean(axis=0), (len(terms), 1)) for row in rows]
        best, above, mean = np.ones(size), -np.inf, np.zeros(terms.shape)
        for turn in range(1 if all(len(row) == 1 for row in rows) else TURNS):
            taken = other.fixed + slowest[0] + slowest[1]
            factors = 1 + x * np.where(terms > (1 + NEAR) * taken, 1.0, -1.0)
            mean += (factors - mean) / (turn + 1)
            for tried in (factors, mean):
                gained = self._above_each(other, tried)
                at = int(np.argmax(gained))
                if gained[at] > above:
                    best, above = tried[at].copy(), float(gained[at])
            slowest = [
                before + (row[np.argmax(mean @ row.T, axis=1)] - before) / (turn + 2)
                for before, row in zip(slowest, rows, strict=True)
            ]
        return best

    def _whole(self, x: float) -> _Box:
        """Return the box of all factors within a share, and of all of the plan's terms."""
        size = len(self.entries)
        return _Box(
            low=np.full(size, 1 - x),
            high=np.full(size, 1 + x),
            prefill=tuple(range(len(self.own.prefill))),
            decode=tuple(range(len(self.own.decode))),
        )

    def prove(self, x: float, pieces: int) -> tuple[bool, float]:
        """Whether it is proven that the plan stays near the best at a share x.

        With so many boxes at most; plans that the proof comes upon are looked at as examples. Also
        the least value of a plan in the whole box, relative to what it must not be below.
        """
        boxes, deadline_s = [self._whole(x)], self.begin_s + self.work_s
        ratio = 0.0
        while boxes:
            if now_s() >= deadline_s or len(boxes) > pieces:
                return False, ratio
            box = self._active(boxes.pop())
            found = self._search(box, deadline_s)
            ratio = ratio or found.ratio
            if found.holds:
                pieces -= 1
                continue
            if found.variant is None or found.plan is None:
                return False, ratio
            times = self._learn(found.variant, found.plan)
            if self.refuted is not None and self.refuted <= x:
                return False, ratio
            cut = self._cut(box, times)
            if not cut:
                return False, ratio
            boxes += cut
        return True, ratio

    def _active(self, box: _Box) -> _Box:
        """Return a box without terms that are smaller than another all over it."""

        def kept(rows: Floats, own: tuple[int, ...]) -> tuple[int, ...]:
            found: list[int] = []
            for i in own:
                others = [k for k in own if k in found or k > i]
                more = rows[others] - rows[i]
                least = np.where(more > 0, more * box.low, more * box.high).sum(axis=1)
                if not (least >= 0).any():
                    found.append(i)
            return tuple(found)

        return replace(
            box,
            prefill=kept(self.own.prefill, box.prefill),
            decode=kept(self.own.decode, box.decode),
        )

    def _terms(self, box: _Box) -> tuple[Floats, float]:
        """Return what every term of a box takes of each entry at least, and its most seconds."""
        prefill, decode = self.own.prefill[list(box.prefill)], self.own.decode[list(box.decode)]
        least = self.own.fixed + prefill.min(axis=0) + decode.min(axis=0)
        highest = (prefill @ box.high).max() + (decode @ box.high).max()
        return least, float(self.own.loss_s + self.own.fixed @ box.high + highest)

    def _search(self, box: _Box, deadline_s: float) -> _Searched:
        """Search a box for a plan that is much better there, as far as its bound says."""
        least, highest = self._terms(box)
        below = highest / (1 + NEAR)
        relaxed = [self._relaxed(k, box, least, below) for k in range(len(self.variants))]
        values = [
            times.value(self.entries.at_sizes(variant, a, relaxed[variant]))
            for variant, a, times in self.known
        ]
        at = int(np.argmin(values))
        if values[at] < below:
            variant, a, _ = self.known[at]
            return _Searched(ratio=values[at] / below, variant=variant, plan=a)
        problems = [
            p.with_changes(factors=own) for p, own in zip(self.variants, relaxed, strict=True)
        ]
        sweep = self._sweep(problems, deadline_s, GAP, below * (1 + 2 * GAP), below)
        best = values[at] if sweep.best is None else min(values[at], sweep.best[1].value)
        if sweep.best is not None and best < below:
            variant, a = sweep.best[0], sweep.best[1].assignment
            return _Searched(ratio=best / below, variant=variant, plan=a)
        holds = all(bound >= below for bound in sweep.bounds.values())
        return _Searched(ratio=best / below, holds=holds)

    def _relaxed(self, variant: int, box: _Box, least: Floats, below: float) -> CostFactors:
        """Return factors g of a box (the module's docstring) on the times of a variant."""
        most, wide = self.most[variant], box.high - box.low
        # A plan that takes more of an entry is above `below` for that alone.
        spare_s = max(0.0, below - self.loss_s[variant])
        cap = spare_s / np.maximum(box.low, 1e-9)

        def factors(at: NDArray[np.int64], c: Floats) -> Floats:
            of = (1 + NEAR) * np.minimum(c, cap[at])
            share = np.divide(least[at], of, out=np.ones_like(of), where=of > 0)
            return np.asarray(box.low[at] + wide[at] * np.minimum(1.0, share))

        layers, ends = self.entries.of_layers[variant], self.entries.of_ends[variant]
        every, links = self.entries.sizes(variant), self.entries.of_links
        spend(16 * len(every))
        return CostFactors(
            layer={at: factors(layers[at[0]], most.of_layers(*at)) for at in every},
            ends={at: factors(ends[at[0]], most.of_ends(*at)) for at in every},
            links=factors(links, cap[links]),
        )

    def _cut(self, box: _Box, other: EntryTimes) -> list[_Box]:
        """Return a box in parts by what loses most: terms one by one, or halves of an entry."""
        least, _ = self._terms(box)
        wide, middle = box.high - box.low, (box.low + box.high) / 2
        taken = other.fixed.copy()
        for rows in (other.prefill, other.decode):
            taken += rows[int(np.argmax(rows @ middle))]
        # What min (1.05 taken - least) f is above its bound of a plan that takes no more of it.
        lost = np.minimum(least, (1 + NEAR) * taken) * wide
        e = int(np.argmax(lost))
        spread = {
            name: float(np.ptp(getattr(self.own, name)[list(own)], axis=0) @ wide)
            for name, own in (("prefill", box.prefill), ("decode", box.decode))
        }
        if spread["prefill"] > max(lost[e], spread["decode"]):
            return [replace(box, prefill=(i,)) for i in box.prefill]
        if spread["decode"] > lost[e]:
            return [replace(box, decode=(j,)) for j in box.decode]
        if lost[e] <= 0:
            return []
        halves = []
        for name in ("low", "high"):
            side = getattr(box, name).copy()
            side[e] = middle[e]
            halves.append(replace(box, **{name: side}))
        return halves


def robustness(
    variants: Sequence[Problem],
    variant: int,
    a: Assignment,
    options: SolveOptions,
    *,
    work_s: float,
    bound: float | None,
) -> Robustness:
    """Return the shares of a plan within so much work; what the bound alone says without any."""
    with counting(options.ends_at):
        p = variants[variant]
        if work_s < USEFUL_S or not _is_searched(p):
            own = p if options.budget is None else p.with_changes(theta=0.0)
            worth = value(own, a)
            time_s = value(own.with_changes(theta=0.0), a)
            return Robustness(near=NEAR, proven=bound_only(worth, time_s, bound or 0.0))
        search = RobustnessSearch(variants, variant, a, options, work_s=work_s, bound=bound)
        search.run()
    example = search.example
    if example is None:
        return Robustness(near=NEAR, proven=search.proven)
    return Robustness(
        near=NEAR,
        proven=search.proven,
        refuted=example.share,
        better=in_one_line(variants[example.variant], example.assignment),
    )


def _is_searched(p: Problem) -> bool:
    """Whether the search is of this problem itself, and of layers that are alike."""
    alike = p.numbers(*p.pairs[0]).uniform
    return p.objective == "makespan" and alike and searched(p)[0] is p


def in_one_line(p: Problem, a: Assignment) -> str:
    """Return a plan in words: bits by stage and device, micro-batches, the KV cache."""
    left = [list(cls.devices) for cls in p.classes]
    stages = []
    for stage in a.stages:
        device = left[stage.cls].pop(0)
        runs = [(p.choices[b].value, len(list(run))) for b, run in groupby(stage.choices)]
        bits = " + ".join(f"{n} x {name}" for name, n in runs)
        stages.append(f"{device.name}: {bits}")
    return (
        f"{', '.join(stages)}; micro-batches {a.prefill_microbatch}, {a.decode_microbatch}; "
        f"{p.kv.value}"
    )
