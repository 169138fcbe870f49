"""Improves a plan by small changes until none helps: boundaries, precisions, devices, sizes.

Proves nothing; the better the plan, the less is left to prove.

A `Draft` is a plan as lists, `Scales` values drafts at one pair of micro-batch sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmpq.planner.evaluate.objective import make_form
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.exact.start.starts import Incumbent
from llmpq.planner.problem.outcome import BUDGET_ROUNDING, Assignment, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stage_memory import sort_of
from llmpq.planner.problem.work_clock import now_s, spend


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A plan as lists: classes of the stages, their boundaries, a choice of every layer."""

    order: tuple[int, ...]
    bounds: tuple[int, ...]
    choices: tuple[int, ...]

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages as solvers name them."""
        return tuple(
            Stage(cls=c, start=low, end=high, choices=self.choices[low:high])
            for c, low, high in zip(self.order, self.bounds, self.bounds[1:], strict=False)
        )


class Scales:
    """Weighs drafts at one pair of micro-batch sizes."""

    def __init__(self, p: Problem, eta: int, xi: int, budget: float | None) -> None:
        self.p, self.budget = p, budget
        self.form = make_form(p, eta, xi)
        x = self.form.numbers
        self.tp, self.td = x.prefill_s[0], x.decode_s[0]
        self.paces = x.held_prefill_s[0], x.held_decode_s[0]
        """[C, B] of prefill and decode, means over micro-batches: what P and D are made of."""
        self.tables = np.stack([self.tp, self.td, *self.paces])
        self.ends = np.stack(
            [x.ends_prefill_s, x.ends_decode_s, x.held_ends_prefill_s, x.held_ends_decode_s]
        )
        self.room = x.capacity
        self.sizes = p.all_layer_bytes[0]
        self.unit = np.eye(len(p.choices), dtype=np.int64)
        self.omega = np.where(p.open, p.omega, np.inf)
        self.rows = np.arange(p.num_layers)

    def counts(self, draft: Draft) -> np.ndarray:
        """[J, B] layers of each stage at each choice."""
        chosen = self.unit[np.array(draft.choices)]
        return np.asarray(np.add.reduceat(chosen, np.array(draft.bounds[:-1]), axis=0))

    def spare(self, draft: Draft, counts: np.ndarray) -> np.ndarray:
        """[J] bytes that each stage leaves free."""
        count = len(draft.order)
        first, last = np.zeros(count, dtype=int), np.zeros(count, dtype=int)
        first[0], last[-1] = 1, 1
        sorts = sort_of(self.p.packed, counts)
        room = self.room[np.array(draft.order), first, last, sorts]
        return np.asarray(room - counts @ self.sizes)

    def worth(self, draft: Draft) -> float:
        """Return the objective, infinite if a draft does not fit."""
        counts = self.counts(draft)
        spend(45)
        if (self.spare(draft, counts) < 0).any():
            return math.inf
        if self.p.is_restricted and not all(
            self.p.allowed(c, low, high)
            for c, low, high in zip(draft.order, draft.bounds, draft.bounds[1:], strict=False)
        ):
            return math.inf
        omega = float(self.omega[self.rows, list(draft.choices)].sum())
        if not math.isfinite(omega):
            return math.inf
        if self.budget is not None and omega > self.budget * (1 + BUDGET_ROUNDING / 4):
            return math.inf
        priced = omega if self.budget is None else self.budget
        return self._seconds(draft.order, counts) + self.p.theta * priced

    def _seconds(self, order: tuple[int, ...], counts: np.ndarray) -> float:
        stages = np.array(order)
        times = np.einsum("jb,xjb->xj", counts, self.tables[:, stages])
        times[:, 0] += self.ends[:, order[0], 0]
        times[:, -1] += self.ends[:, order[-1], 1]
        return float(self.form.seconds(stages, times))

    def squeezed(self, draft: Draft) -> Draft | None:
        """Lower precisions on stages that are too full, least omega a byte first."""
        spare = self.spare(draft, self.counts(draft))
        if (spare >= 0).all():
            return draft
        choices, last = np.array(draft.choices), len(draft.order) - 1
        for j in np.flatnonzero(spare < 0).tolist():
            low, high = draft.bounds[j], draft.bounds[j + 1]
            held, room = choices[low:high], self.room[draft.order[j], int(j == 0), int(j == last)]
            while (short := -self._spare_of(held, room)) > 0:
                saved = self.sizes[held][:, None] - self.sizes[None]
                spend(25, 8 * saved.size)
                had = np.nan_to_num(self.omega[np.arange(low, high), held], posinf=1e300)
                lost = self.omega[low:high] - had[:, None]
                rate = np.where(saved > 0, lost / np.maximum(saved, 1), np.inf)
                layer, b = np.unravel_index(int(np.argmin(rate)), rate.shape)
                if not np.isfinite(rate[layer, b]):
                    return None
                # As many layers at once as are needed, cheapest first.
                same = np.flatnonzero((held == held[layer]) & np.isfinite(rate[:, b]))
                needed = -(-short // int(saved[layer, b]))
                held[same[np.argsort(rate[same, b], kind="stable")][:needed]] = b
        return Draft(order=draft.order, bounds=draft.bounds, choices=tuple(choices.tolist()))

    def _spare_of(self, held: np.ndarray, room: np.ndarray) -> int:
        """Return the bytes that a stage with a choice of every layer leaves of `room` by sort."""
        counts = np.bincount(held, minlength=len(self.sizes))
        return int(room[sort_of(self.p.packed, counts)] - counts @ self.sizes)

    def within_budget(self, draft: Draft) -> Draft:
        """Raise precisions until the budget is kept, most omega a second first, where it fits."""
        choices = np.array(draft.choices)
        layers = np.diff(draft.bounds)
        stage = np.repeat(np.arange(len(layers)), layers)
        spare = self.spare(draft, self.counts(draft))
        price = self.tp + (self.form.ws + self.form.z) * self.td
        price = price[np.array(draft.order)[stage]]
        left = math.inf if self.budget is None else self.budget
        while float(self.omega[self.rows, choices].sum()) > left:
            gain = self.omega[self.rows, choices][:, None] - self.omega
            spend(25, 8 * gain.size)
            slower = np.maximum(price - price[self.rows, choices][:, None], 1e-12)
            larger = self.sizes[None] - self.sizes[choices][:, None]
            rate = np.where((gain > 0) & (larger <= spare[stage][:, None]), gain / slower, -np.inf)
            layer, b = np.unravel_index(int(np.argmax(rate)), rate.shape)
            if rate[layer, b] == -np.inf:
                return draft
            spare[stage[layer]] -= larger[layer, b]
            choices[layer] = b
        return Draft(order=draft.order, bounds=draft.bounds, choices=tuple(choices.tolist()))


SHIFTS = (1, 2, 4, 8)
"""Layers moved, or changed, at once."""
PACES = (0.995, 0.98, 0.95, 0.9, 0.8, 0.65, 1.005, 1.02, 1.05, 1.1, 1.25, 1.5)
"""Shares of the slowest stage's time that all stages are given together."""


def improved(
    incumbent: Incumbent, tables: PairTables, start: Assignment, deadline: float
) -> Assignment:
    """Return the best plan that small changes lead to; offers it to the incumbent."""
    p = incumbent.p
    draft = Draft(
        order=tuple(s.cls for s in start.stages),
        bounds=(0, *(s.end for s in start.stages)),
        choices=start.choices,
    )
    pair = (start.prefill_microbatch, start.decode_microbatch)
    draft, pair, worth = _settled(incumbent, tables, draft, pair, deadline)
    # At sizes beside its own another plan may be better, to which no small change leads.
    for near in _beside(p, pair):
        if now_s() > deadline:
            break
        other = _settled(incumbent, tables, draft, near, deadline)
        if other[2] < worth * (1 - 1e-9):
            draft, pair, worth = other
    result = Assignment(
        prefill_microbatch=pair[0], decode_microbatch=pair[1], stages=draft.stages()
    )
    incumbent.offer(result)
    return result


def _settled(
    incumbent: Incumbent,
    tables: PairTables,
    draft: Draft,
    pair: tuple[int, int],
    deadline: float,
) -> tuple[Draft, tuple[int, int], float]:
    """Return what small changes lead to, the pair that suits it best, and its worth."""
    worth = math.inf
    while True:
        scales = Scales(incumbent.p, *pair, budget=incumbent.budget)
        draft, found = _descend(scales, draft, deadline)
        if not found < worth * (1 - 1e-9):
            break
        worth = found
        best = tables.best_pair(draft.stages(), math.inf)
        if best is None or best == pair or now_s() > deadline:
            break
        pair = best
    return draft, pair, worth


def _beside(p: Problem, pair: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs with the next smaller or larger size of one phase."""
    for k, sizes in ((1, p.decode_sizes), (0, p.prefill_sizes)):
        at = sizes.index(pair[k])
        for near in (at - 1, at + 1):
            if 0 <= near < len(sizes):
                found = (pair[0], sizes[near]) if k else (sizes[near], pair[1])
                if found in p.pairs:
                    yield found


def _descend(scales: Scales, draft: Draft, deadline: float) -> tuple[Draft, float]:
    """Take every change that helps, until none does."""
    squeezed = scales.squeezed(draft)
    draft = scales.within_budget(draft if squeezed is None else squeezed)
    worth = scales.worth(draft)
    better = True
    while better and now_s() < deadline:
        better = False
        for moves in (
            _shifts,
            _rebalanced,
            _requantised,
            _retimed,
            _other_devices,
            _widened,
            _moved,
            _passed,
            _turned,
        ):
            changed = True
            while changed and now_s() < deadline:
                changed = False
                for candidate in moves(scales, draft):
                    found = scales.worth(candidate)
                    if found == math.inf:
                        smaller = scales.squeezed(candidate)
                        if smaller is None:
                            continue
                        candidate, found = smaller, scales.worth(smaller)
                    if found < worth * (1 - 1e-10):
                        draft, worth = candidate, found
                        changed = better = True
                        break
                    if now_s() > deadline:
                        return draft, worth
    return draft, worth


def _shifts(scales: Scales, d: Draft) -> Iterator[Draft]:
    """Move boundaries; layers keep their choice, or take the one of where they go."""
    for j in range(1, len(d.order)):
        for step in (s * sign for s in SHIFTS for sign in (1, -1)):
            to = d.bounds[j] + step
            if not d.bounds[j - 1] < to < d.bounds[j + 1]:
                continue
            bounds = (*d.bounds[:j], to, *d.bounds[j + 1 :])
            yield Draft(order=d.order, bounds=bounds, choices=d.choices)
            low, high = sorted((d.bounds[j], to))
            next_to = d.choices[low - 1] if step > 0 else d.choices[high]
            choices = (*d.choices[:low], *(next_to,) * (high - low), *d.choices[high:])
            yield Draft(order=d.order, bounds=bounds, choices=choices)


def _moved(scales: Scales, d: Draft) -> Iterator[Draft]:
    """Put a stage elsewhere in the order, with as many layers as it has."""
    count, sizes = len(d.order), np.diff(d.bounds).tolist()
    for j in range(count):
        for k in range(count):
            if abs(j - k) < 2:
                continue
            order, held = list(d.order), list(sizes)
            order.insert(k, order.pop(j))
            held.insert(k, held.pop(j))
            bounds = (0, *itertools.accumulate(held))
            yield Draft(order=tuple(order), bounds=bounds, choices=d.choices)


def _turned(scales: Scales, d: Draft) -> Iterator[Draft]:
    """Begin the ring of stages elsewhere, the other way round too, and exchange two stages."""
    held = [d.choices[low:high] for low, high in itertools.pairwise(d.bounds)]
    stages, count = list(zip(d.order, held, strict=True)), len(held)
    orders = [stages[j:] + stages[:j] for j in range(1, count)]
    orders += [order[::-1] for order in (stages, *orders)]
    for j, k in itertools.combinations(range(count), 2):
        if len(held[j]) != len(held[k]):
            swapped = list(stages)
            swapped[j], swapped[k] = swapped[k], swapped[j]
            orders.append(swapped)
    for order in orders if count > 1 else ():
        bounds = (0, *itertools.accumulate(len(own) for _, own in order))
        mixes = tuple(itertools.chain.from_iterable(own for _, own in order))
        yield Draft(order=tuple(c for c, _ in order), bounds=bounds, choices=mixes)


def _passed(scales: Scales, d: Draft) -> Iterator[Draft]:
    """Give layers of one stage to another that is not beside it; those between are moved along.

    From a slowest stage, or one of few layers.
    """
    count, counts = len(d.order), scales.counts(d)
    held = [d.choices[low:high] for low, high in itertools.pairwise(d.bounds)]
    slow = [(counts * table[list(d.order)]).sum(axis=1) for table in scales.paces[::-1]]
    givers = {int(np.argmax(slow[0])), int(np.argmax(slow[1])), int(np.argmin(counts.sum(axis=1)))}
    for j in sorted(givers):
        for k in (*range(j - 1), *range(j + 2, count)):
            for step in (s for s in SHIFTS if s < len(held[j])):
                sizes = [len(own) for own in held]
                sizes[j], sizes[k] = sizes[j] - step, sizes[k] + step
                bounds = (0, *itertools.accumulate(sizes))
                yield Draft(order=d.order, bounds=bounds, choices=d.choices)
                if len(set(d.choices)) > 1:
                    # Every stage keeps its mix, and so do the layers that go.
                    mixes = list(held)
                    mixes[k] = (*mixes[k], *mixes[j][len(mixes[j]) - step :])
                    mixes[j] = mixes[j][: len(mixes[j]) - step]
                    kept = tuple(itertools.chain.from_iterable(mixes))
                    yield Draft(order=d.order, bounds=bounds, choices=kept)


def _rebalanced(scales: Scales, d: Draft) -> Iterator[Draft]:
    """Share the layers out anew so that no stage takes longer than a share of the slowest one.

    Every stage keeps its mix of precisions, so layers are as long as they are there on average.
    """
    counts, order = scales.counts(d), list(d.order)
    held = counts.sum(axis=1)
    once = [(counts * table[order]).sum(axis=1) / held for table in scales.paces]
    slowest = [float((held * times).max()) for times in once]
    room = held + scales.spare(d, counts) // ((counts @ scales.sizes) / held)
    for phase in (0, 1):
        for share in (1.0, 0.99, 0.97, 0.94, 0.9, 0.85, 0.75, 0.6):
            allowed = slowest[phase] * share
            most = np.minimum(room, np.floor(allowed / np.maximum(once[phase], 1e-300) + 1e-9))
            other = slowest[1 - phase] * (1 + (1 - share))
            fine = np.floor(other / np.maximum(once[1 - phase], 1e-300) + 1e-9)
            most = np.maximum(np.minimum(most, fine), 1).astype(np.int64)
            if most.sum() < scales.p.num_layers:
                continue
            layers = np.minimum(held, most)
            while layers.sum() < scales.p.num_layers:
                fullness = np.where(layers < most, (layers + 1) / most, np.inf)
                layers[int(np.argmin(fullness))] += 1
            bounds = (0, *(int(end) for end in np.cumsum(layers)))
            if bounds != d.bounds:
                yield Draft(order=d.order, bounds=bounds, choices=d.choices)


def _requantised(scales: Scales, d: Draft) -> Iterator[Draft]:
    """Change the layers of a stage that lose, or gain, most omega for it."""
    for low, high in zip(d.bounds, d.bounds[1:], strict=False):
        held = np.array(d.choices[low:high])
        for old in np.flatnonzero(np.bincount(held)):
            layers = low + np.flatnonzero(held == old)
            for b in range(len(scales.unit)):
                opened = layers[np.isfinite(scales.omega[layers, b])]
                if b == old or not len(opened):
                    continue
                gain = scales.omega[opened, b] - scales.omega[opened, old]
                by_gain = opened[np.argsort(gain, kind="stable")]
                for size in {*SHIFTS, len(by_gain)}:
                    if size <= len(by_gain):
                        choices = np.array(d.choices)
                        choices[by_gain[:size]] = b
                        yield Draft(order=d.order, bounds=d.bounds, choices=tuple(choices.tolist()))


def _retimed(scales: Scales, d: Draft) -> Iterator[Draft]:
    """Give every stage at once a little less time, or more, and what precision that leaves.

    Where stages are about equally slow changing one of them does not change the slowest.
    """
    counts = scales.counts(d)
    for table in scales.paces[::-1]:
        slowest = float((counts * table[list(d.order)]).sum(axis=1).max())
        for share in PACES:
            candidate = _at_pace(scales, d, table, slowest * share)
            if candidate is not None:
                yield candidate


def _at_pace(scales: Scales, d: Draft, table: np.ndarray, most_s: float) -> Draft | None:
    """Change precisions so that no stage takes longer; spend what is left on the most omega.

    None if a stage is longer at any precision. Memory is looked at afterwards.
    """
    choices = np.array(d.choices)
    for c, low, high in zip(d.order, d.bounds, d.bounds[1:], strict=False):
        held, times = choices[low:high], table[c]
        omega = scales.omega[low:high]
        spent = float(times[held].sum())
        for _ in range(2 * (high - low)):
            rows = np.arange(high - low)
            spend(18, 8 * omega.size)
            slower = times[None] - times[held][:, None]
            lost = omega - omega[rows, held][:, None]
            if spent > most_s:
                rate = np.where(slower < 0, lost / np.minimum(slower, -1e-300), -np.inf)
                rate = np.where(np.isfinite(rate), rate, -np.inf)
                # The least omega a second: the largest of what are negative rates.
                layer, b = np.unravel_index(int(np.argmax(rate)), rate.shape)
                if rate[layer, b] == -np.inf:
                    return None
            else:
                gains = (lost < 0) & (spent + slower <= most_s)
                if not gains.any():
                    break
                rate = np.where(gains, lost / np.maximum(slower, 1e-300), np.inf)
                layer, b = np.unravel_index(int(np.argmin(rate)), rate.shape)
            spent += float(slower[layer, b])
            held[layer] = b
        if spent > most_s * (1 + 1e-9):
            return None
    return Draft(order=d.order, bounds=d.bounds, choices=tuple(choices.tolist()))


def _other_devices(scales: Scales, d: Draft) -> Iterator[Draft]:
    """Leave a device out, take another one in its place or beside it, exchange two."""
    p, count = scales.p, len(d.order)
    used = np.bincount(d.order, minlength=len(p.classes))
    unused = [c for c, cls in enumerate(p.classes) if used[c] < cls.count]
    for j in range(count):
        for c in unused:
            if c != d.order[j]:
                order = (*d.order[:j], c, *d.order[j + 1 :])
                yield Draft(order=order, bounds=d.bounds, choices=d.choices)
    for j in range(count if count > 1 else 0):
        order = (*d.order[:j], *d.order[j + 1 :])
        for bounds in _without(d, j):
            yield Draft(order=order, bounds=bounds, choices=d.choices)
    if count < p.max_stages:
        yield from _inserted(d, unused)
    for j in range(count):
        for k in range(j + 1, count):
            if d.order[j] != d.order[k]:
                swapped = list(d.order)
                swapped[j], swapped[k] = swapped[k], swapped[j]
                yield Draft(order=tuple(swapped), bounds=d.bounds, choices=d.choices)


def _widened(scales: Scales, d: Draft) -> Iterator[Draft]:
    """Add an unused device where its messages are quickest, and share the layers out anew."""
    p, used = scales.p, np.bincount(d.order, minlength=len(scales.p.classes))
    if len(d.order) >= p.max_stages:
        return
    hop = scales.form.numbers.hop_decode.total_s
    for c in (c for c, cls in enumerate(p.classes) if used[c] < cls.count):
        ways = [
            sum(float(hop[a, b]) for a, b in itertools.pairwise((*d.order[:j], c, *d.order[j:])))
            for j in range(len(d.order) + 1)
        ]
        for j in np.argsort(ways, kind="stable")[:2]:
            order = (*d.order[:j], c, *d.order[j:])
            # Its first layer comes from the stage before it, or behind it.
            cut = d.bounds[j] - 1 if j > 0 else 1
            bounds = (*d.bounds[:j], cut, *d.bounds[j:]) if j > 0 else (0, 1, *d.bounds[1:])
            if all(low < high for low, high in itertools.pairwise(bounds)):
                wider = Draft(order=order, bounds=bounds, choices=d.choices)
                yield from _rebalanced(scales, wider)


def _without(d: Draft, j: int) -> Iterator[tuple[int, ...]]:
    """Yield boundaries without stage j: its layers go before it, behind it, or both ways."""
    low, high = d.bounds[j], d.bounds[j + 1]
    if j == 0:
        yield (0, *d.bounds[2:])
    elif j == len(d.order) - 1:
        yield (*d.bounds[:j], d.bounds[-1])
    else:
        for cut in sorted({low, (low + high) // 2, high}):
            yield (*d.bounds[:j], cut, *d.bounds[j + 2 :])


def _inserted(d: Draft, unused: list[int]) -> Iterator[Draft]:
    """Put an unused device before or after a stage, with a part of its layers."""
    for j, (low, high) in enumerate(zip(d.bounds, d.bounds[1:], strict=False)):
        for size in sorted({1, (high - low) // 4, (high - low) // 2}):
            if not 0 < size < high - low:
                continue
            for c in unused:
                before = (*d.order[:j], c, *d.order[j:])
                bounds = (*d.bounds[: j + 1], low + size, *d.bounds[j + 1 :])
                yield Draft(order=before, bounds=bounds, choices=d.choices)
                after = (*d.order[: j + 1], c, *d.order[j + 1 :])
                bounds = (*d.bounds[: j + 1], high - size, *d.bounds[j + 1 :])
                yield Draft(order=after, bounds=bounds, choices=d.choices)
