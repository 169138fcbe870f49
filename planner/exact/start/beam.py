"""Good plans of many devices: the slowest stage is given, and stages are filled up to it.

With P and D given, a stage of a class has so many layers at most, and what a plan costs beside is a
sum over layers and hops. First every layer goes where it is cheapest, whatever the order (a few
microseconds a guess of pair, P and D); then a beam search puts the best guesses in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.costs.stage_memory import sort_of
from llmpq.planner.exact.bounds.form import make_form
from llmpq.planner.exact.bounds.pairs import PairTables
from llmpq.planner.problem.numbers import SizeNumbers
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Floats, Problem

PACES = 32
"""Times of the slowest stage that are guessed."""
SHORTEST_S = 1e-30
ABOUT = 1.1
"""Ratio of two times up to which either may turn out to be the longer one."""
SIZES = 12
"""Micro-batch sizes of a phase that are guessed."""
GUESSES = 24
"""Best guesses that are put in order."""
WIDTH = 48
"""Partial plans that a beam keeps."""
FINISHED = 4
"""Plans that a beam returns."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """What the slowest stage may take, in seconds, at a pair of sizes."""

    worth: float
    pair: tuple[int, int]
    p: float
    d: float
    waits: bool
    """Whether a token's way through all stages takes longer than the slowest one's round."""


def beam_plans(p: Problem, tables: PairTables, deadline: float) -> Iterator[Assignment]:
    """Yield plans that fill stages up to the best guesses; they may not fit."""
    guesses: list[Guess] = []
    for b in range(len(p.choices)):
        if p.open[:, b].all():
            guesses += _guesses(p, tables, b)
    for number, guess in enumerate(_chosen(guesses)):
        for strict in (False, True) if number < GUESSES // 2 else (False,):
            if time.perf_counter() > deadline:
                return
            yield from _Beam(p, guess, strict=strict).plans()


def _chosen(guesses: list[Guess]) -> list[Guess]:
    """Return the best guesses: half of them the best of all, half of other pairs."""
    ordered = sorted(set(guesses), key=lambda guess: guess.worth)
    found = ordered[: GUESSES // 2]
    pairs = {guess.pair for guess in found}
    for guess in ordered[GUESSES // 2 :]:
        if guess.pair not in pairs and len(found) < GUESSES:
            pairs.add(guess.pair)
            found.append(guess)
    return found


def _thinned(sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """Return positions of a few sizes, spread evenly."""
    return np.unique(np.linspace(0, len(sizes) - 1, SIZES).round().astype(np.int64))


def _roomy(p: Problem, b: int) -> NDArray[np.int64]:
    """[C] layers of one choice that a device between first and last has memory for."""
    counts = np.zeros(len(p.choices), dtype=np.int64)
    counts[b] = 1
    room = p.capacity(p.prefill_sizes[0], p.decode_sizes[0])[
        :, 0, 0, int(sort_of(p.packed, counts))
    ]
    return np.asarray(np.clip(room, 0, None) // int(p.all_layer_bytes[0, b]))


def _guesses(p: Problem, tables: PairTables, b: int) -> list[Guess]:
    """Return the best guesses of one precision, as if every hop were the quickest."""
    layers, counts = p.num_layers, np.array([cls.count for cls in p.classes])
    rows, columns = _thinned(p.prefill_sizes), _thinned(p.decode_sizes)
    # Nothing is decoded where one token is generated.
    tp = np.maximum(tables.held_prefill_s[rows, :, b], SHORTEST_S)
    td = np.maximum(tables.held_decode_s[columns, :, b], SHORTEST_S)
    ends_p = np.floor((tables.held_ends_prefill_s[rows].sum(axis=2) / tp).min(axis=1))[:, None]
    ends_d = np.floor((tables.held_ends_decode_s[columns].sum(axis=2) / td).min(axis=1))[None]
    roomy = np.minimum(_roomy(p, b), layers)
    slow_p, slow_d = _paces(tp, layers, counts), _paces(td, layers, counts)
    by_p = np.floor(slow_p[..., None] / tp[:, None] + 1e-9)[:, None]
    by_d = np.floor(slow_d[..., None] / td[:, None] + 1e-9)[None]
    found: list[Guess] = []
    omega = p.theta * float(p.omega[:, b].sum())
    for caps, ends in (
        (by_d + 0 * by_p, ends_d + 0 * ends_p),
        (by_p + 0 * by_d, ends_p + 0 * ends_d),
        (np.minimum(by_p, by_d), np.maximum(ends_p, ends_d)),
    ):
        # [E, X, T, C]; embedding and head as if they were so many layers.
        most = np.minimum(caps, roomy)
        for waits in (False, True):
            needed = layers + np.minimum(ends, layers)
            found += _filled(p, tables, (rows, columns), b, (most, needed), omega, waits)
    return found


def _paces(once: Floats, layers: int, counts: NDArray[np.int64]) -> Floats:
    """[n, T] times of the slowest stage worth guessing, by size; `once` [n, C]."""
    shared = layers / (counts / np.maximum(once, 1e-300)).sum(axis=1)
    whole = layers * once.min(axis=1)
    low, high = np.minimum(shared, whole), whole
    share = np.linspace(0, 1, PACES) ** 2
    return np.asarray(low[:, None] * (high / low)[:, None] ** share[None] * (1 + 1e-6))


def _filled(
    p: Problem,
    tables: PairTables,
    at: tuple[NDArray[np.int64], NDArray[np.int64]],
    b: int,
    layers: tuple[Floats, Floats],
    omega: float,
    waits: bool,
) -> list[Guess]:
    """Fill the cheapest devices first; `layers`: [E, X, T, C] of a device, [E, X] of all.

    `waits`: a token's way through all stages takes longer than the slowest one's round.
    """
    (rows, columns), (most, needed) = at, layers
    tp, td = tables.prefill_s[rows, :, b], tables.decode_s[columns, :, b]
    held_p, held_d = tables.held_prefill_s[rows, :, b], tables.held_decode_s[columns, :, b]
    a, (bd, ws, z, md) = (
        tables.a[rows],
        (t[columns] for t in (tables.bd, tables.ws, tables.z, tables.md)),
    )
    counts = np.minimum(np.array([cls.count for cls in p.classes]), p.max_stages)
    price = tp[:, None] + (ws + z * waits)[None, :, None] * td[None]
    order = np.argsort(price, axis=2)[:, :, None]
    ordered = np.broadcast_to(order, most.shape)
    room = np.take_along_axis(most * counts, ordered, axis=3)
    before = np.cumsum(room, axis=3) - room
    taken = np.empty_like(room)
    np.put_along_axis(taken, ordered, np.clip(needed[..., None, None] - before, 0, room), axis=3)
    used = taken > 0
    t_p, t_d = tp[:, None, None], td[None, :, None]
    stages = np.ceil(taken / np.maximum(most, 1)).sum(axis=3)
    slow_p = np.where(used, most * held_p[:, None, None], 0).max(axis=3)
    slow_d = np.where(used, most * held_d[None, :, None], 0).max(axis=3)
    hop_p, hop_d = (_quickest_hops(p, part) for part in tables.hops)
    sum_p = (taken * t_p).sum(axis=3) + hop_p[rows][:, None, None] * (stages - 1)
    sum_d = (taken * t_d).sum(axis=3) + hop_d[columns][None, :, None] * (stages - 1)
    a, (bd, ws, z, md) = a[:, None, None], (t[None, :, None] for t in (bd, ws, z, md))
    worth = a * slow_p + bd * slow_d + sum_p + ws * sum_d + z * np.maximum(md * slow_d, sum_d)
    # What the devices were chosen by must be about what comes of it.
    ratio = sum_d / np.maximum(md * slow_d, SHORTEST_S)
    other = (ratio < 1 / ABOUT) if waits else (ratio > ABOUT)
    worth = np.where(other, np.inf, worth)
    wrong = (taken.sum(axis=3) < needed[..., None]) | (stages > p.max_stages)
    worth = np.where(wrong | ~tables.open[np.ix_(rows, columns)][..., None], np.inf, worth)
    found, best = [], worth.argmin(axis=2)
    of_pairs = [(e, x, int(best[e, x])) for e, x in np.ndindex(*best.shape)]
    first = [np.unravel_index(k, worth.shape) for k in np.argsort(worth, axis=None)[:GUESSES]]
    for e, x, t in {*of_pairs, *((int(e), int(x), int(t)) for e, x, t in first)}:
        if np.isfinite(worth[e, x, t]):
            pair = p.prefill_sizes[rows[e]], p.decode_sizes[columns[x]]
            found.append(
                Guess(
                    worth=float(worth[e, x, t]) + omega,
                    pair=pair,
                    p=float(slow_p[e, x, t]),
                    d=float(slow_d[e, x, t]),
                    waits=waits,
                )
            )
    return found


def _quickest_hops(p: Problem, sizes: Sequence[SizeNumbers]) -> Floats:
    """[n] the quickest message between two devices, by size of the micro-batch."""
    ends = list(p.class_links.terms)
    return np.array([min((float(x.hop.total_s[k]) for k in ends), default=0.0) for x in sizes])


@dataclass(frozen=True, kw_only=True)
class _Partial:
    """Partial plans, [n]."""

    used: NDArray[np.int64]
    """[n, C]."""
    layers: NDArray[np.int64]
    last: NDArray[np.int64]
    cost: Floats
    stages: NDArray[np.int64]
    """[n, J, 3] class, choice, layers of each stage."""


class _Beam:
    """Puts stages in order at one guess.

    `strict`: embedding and head take of what the slowest stage may, else only of the decode time
    that counts in full.
    """

    def __init__(self, p: Problem, guess: Guess, *, strict: bool) -> None:
        self.p, self.guess, self.strict = p, guess, strict
        form = make_form(p, *guess.pair)
        x, self.form = form.numbers, form
        weight = form.ws + form.z * guess.waits
        omega = np.where(p.open.all(axis=0), p.theta * p.omega.mean(axis=0), np.inf)
        self.price = x.prefill_s[0] + weight * x.decode_s[0] + omega
        """[C, B] of a layer."""
        hops = x.hop_prefill.total_s + weight * x.hop_decode.total_s
        linked = np.zeros_like(hops, dtype=bool)
        for ends in p.class_links.terms:
            linked[ends] = True
        self.hops = np.where(linked, hops if form.hops_in_sums else 0.0, np.inf)
        self.most = np.array(
            [[self._most(x_first, x_last) for x_last in (0, 1)] for x_first in (0, 1)]
        )
        """[2, 2, C, B] layers of a stage: first or not, last or not."""
        self.counts = np.array([cls.count for cls in p.classes])

    def _most(self, first: int, last: int) -> NDArray[np.int64]:
        x, p = self.form.numbers, self.p
        sorts = [int(sort_of(p.packed, row)) for row in np.eye(len(p.choices), dtype=np.int64)]
        room = np.clip(x.capacity[:, first, last][:, sorts], 0, None) // p.all_layer_bytes[0]
        found = np.minimum(room, p.num_layers).astype(float)
        counted = (float(self.strict), float(self.strict or not self.guess.waits))
        for slow, table, ends, share in (
            (self.guess.p, x.held_prefill_s[0], x.held_ends_prefill_s, counted[0]),
            (self.guess.d, x.held_decode_s[0], x.held_ends_decode_s, counted[1]),
        ):
            left = slow - share * (first * ends[:, 0] + last * ends[:, 1])
            # A stage has a layer, whatever embedding and head take.
            whole = np.floor(left[:, None] / np.maximum(table, 1e-300) + 1e-9)
            found = np.minimum(found, np.maximum(whole, 1.0 if first or last else 0.0))
        return np.maximum(found, 0).astype(np.int64)

    def plans(self) -> Iterator[Assignment]:
        """Yield the cheapest whole plans."""
        p, classes = self.p, len(self.p.classes)
        now = _Partial(
            used=np.zeros((1, classes), dtype=np.int64),
            layers=np.zeros(1, dtype=np.int64),
            last=np.full(1, -1),
            cost=np.zeros(1),
            stages=np.zeros((1, 0, 3), dtype=np.int64),
        )
        whole: list[tuple[float, NDArray[np.int64]]] = []
        for depth in range(p.max_stages):
            now = self._longer(now, depth == 0)
            done = now.layers == p.num_layers
            whole += zip(now.cost[done].tolist(), now.stages[done], strict=True)
            rows = np.flatnonzero(~done)
            if not len(rows):
                break
            now = self._pick(now, self._best(now, rows))
        for _, stages in sorted(whole, key=lambda plan: plan[0])[:FINISHED]:
            yield self._assignment(stages)

    def _longer(self, now: _Partial, first: bool) -> _Partial:
        """Add one stage of every class and choice."""
        left = self.p.num_layers - now.layers
        middle, last = self.most[int(first), 0], self.most[int(first), 1]
        ends = left[:, None, None] <= last[None]
        size = np.where(
            ends, left[:, None, None], np.minimum(middle[None], left[:, None, None] - 1)
        )
        free = now.used < self.counts
        hop = np.where(now.last[:, None] >= 0, self.hops[now.last], 0.0)
        with np.errstate(invalid="ignore"):  # no layers at a price without end
            cost = now.cost[:, None, None] + size * self.price[None] + hop[:, :, None]
        cost = np.where(free[:, :, None] & (size > 0), cost, np.inf)
        row, c, b = np.nonzero(np.isfinite(cost))
        used = now.used[row]
        used[np.arange(len(row)), c] += 1
        size = size[row, c, b]
        stage = np.stack([c, b, size], axis=1)[:, None]
        return _Partial(
            used=used,
            layers=now.layers[row] + size,
            last=c,
            cost=cost[row, c, b],
            stages=np.concatenate([now.stages[row], stage], axis=1),
        )

    def _best(self, now: _Partial, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the most promising rows, one of equal layers, devices and last class."""
        layers = now.layers[rows]
        # What is left is as dear as what there is, on average, hops included.
        rate = float(np.median(now.cost[rows] / layers))
        order = np.argsort(now.cost[rows] - rate * layers, kind="stable")
        kept: list[int] = []
        seen: set[tuple[int, ...]] = set()
        for k in order:
            row = int(rows[k])
            key = (*now.used[row].tolist(), int(now.layers[row]), int(now.last[row]))
            if key not in seen:
                seen.add(key)
                kept.append(row)
                if len(kept) == WIDTH:
                    break
        return np.array(kept, dtype=np.int64)

    def _pick(self, now: _Partial, rows: NDArray[np.int64]) -> _Partial:
        return _Partial(
            used=now.used[rows],
            layers=now.layers[rows],
            last=now.last[rows],
            cost=now.cost[rows],
            stages=now.stages[rows],
        )

    def _assignment(self, stages: NDArray[np.int64]) -> Assignment:
        ends = np.cumsum(stages[:, 2])
        return Assignment(
            prefill_microbatch=self.guess.pair[0],
            decode_microbatch=self.guess.pair[1],
            stages=tuple(
                Stage(cls=int(c), start=int(end - m), end=int(end), choices=(int(b),) * int(m))
                for (c, b, m), end in zip(stages, ends, strict=True)
            ),
        )
