"""Plans' times as sums over the entries of the cost table: what a wrong entry does to them.

An entry is one device kind's time of a layer at some bits, or of the embedding or the head, of
prompts or of tokens; or a link between two classes of devices. Each may be wrong by a factor of its
own, the same wherever a plan uses it, at every micro-batch size. With factors f a plan takes

    loss + fixed f + max_i prefill_i f + max_j decode_j f

seconds of the objective (planner/evaluate/objective.py): what counts once for each stage, the
slowest stage's prompts, and the slowest stage's tokens or a token's way.

E: entries of all variants of a job (KV precisions, prefill chunks).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.costs.cost_model import LatencyEntry, Phase
from llmpq.planner.costs.links import Floats, Hops
from llmpq.planner.evaluate.objective import Form, make_form, sum_omega
from llmpq.planner.problem.cost_factors import CostFactors
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import spend

Ints = NDArray[np.int64]
PHASES = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, kw_only=True, eq=False)
class EntryTimes:
    """A plan's objective as a function of factors on entries, in seconds."""

    loss_s: float
    """What its quality loss is worth."""
    fixed: Floats
    """[E]"""
    prefill: Floats
    """[I, E]"""
    decode: Floats
    """[J, E]"""

    def value(self, factors: Floats) -> float:
        """Return the objective with factors [E]."""
        return float(self.values(factors[None])[0])

    def values(self, factors: Floats) -> Floats:
        """[n] the objective with each of n factors [n, E]."""
        slowest = (factors @ self.prefill.T).max(axis=1) + (factors @ self.decode.T).max(axis=1)
        return np.asarray(self.loss_s + factors @ self.fixed + slowest)


class CostEntries:
    """The entries that plans of a job may use, numbered; `variants` have the same devices."""

    def __init__(self, variants: Sequence[Problem]) -> None:
        self.variants = variants
        self._number: dict[Hashable, int] = {}
        self.of_layers: list[dict[Phase, Ints]] = []
        """[C, B] by variant and phase."""
        self.of_ends: list[dict[Phase, Ints]] = []
        """[C, 2]: embedding, head."""
        for p in variants:
            firsts, work = [cls.first for cls in p.classes], p.workload
            layers, ends = {}, {}
            for phase in PHASES:
                parts = ("embedding", "head")
                layers[phase] = np.array(
                    [
                        [self._of(p.costs.entry(d, "layer", phase, work, b)) for b in p.choices]
                        for d in firsts
                    ]
                )
                ends[phase] = np.array(
                    [
                        [self._of(p.costs.entry(d, part, phase, work)) for part in parts]  # type: ignore[arg-type]
                        for d in firsts
                    ]
                )
            self.of_layers.append(layers)
            self.of_ends.append(ends)
        classes = range(len(variants[0].classes))
        self.of_links: Ints = np.array(
            [[self._at(("link", min(a, b), max(a, b))) for b in classes] for a in classes]
        )
        """[C, C]"""

    def __len__(self) -> int:
        return len(self._number)

    def _of(self, entry: LatencyEntry) -> int:
        own = entry.part, entry.phase, entry.precision, entry.kv, entry.dtype
        return self._at((entry.device_kind, *own))

    def _at(self, key: Hashable) -> int:
        return self._number.setdefault(key, len(self._number))

    def sizes(self, variant: int) -> list[tuple[Phase, int]]:
        """Return the micro-batch sizes of a variant, by phase."""
        p = self.variants[variant]
        prefill = [(Phase.PREFILL, size) for size in p.prefill_sizes]
        return prefill + [(Phase.DECODE, size) for size in p.decode_sizes]

    def factored(self, variant: int, factors: Floats) -> Problem:
        """Return a variant with factors [E] on its times."""
        layers, ends = self.of_layers[variant], self.of_ends[variant]
        own = CostFactors(
            layer={at: factors[layers[at[0]]] for at in self.sizes(variant)},
            ends={at: factors[ends[at[0]]] for at in self.sizes(variant)},
            links=factors[self.of_links],
        )
        return self.variants[variant].with_changes(factors=own)

    def at_sizes(self, variant: int, a: Assignment, own: CostFactors) -> Floats:
        """[E] the factors at a plan's micro-batch sizes."""
        found = np.ones(len(self))
        sizes = (a.prefill_microbatch, a.decode_microbatch)
        for phase, size in zip(PHASES, sizes, strict=True):
            found[self.of_layers[variant][phase]] = own.layer[phase, size]
            found[self.of_ends[variant][phase]] = own.ends[phase, size]
        found[self.of_links] = own.links
        return found

    def times(self, variant: int, a: Assignment) -> EntryTimes:
        """Return a plan's times by entry."""
        p = self.variants[variant]
        spend(60 + 8 * len(a.stages), 4.0 * len(self) * (len(a.stages) + p.num_layers))
        form = make_form(p, a.prefill_microbatch, a.decode_microbatch)
        pre, dec = (_Ring.of(self, variant, form, a, phase) for phase in PHASES)
        once, back = dec.total.sum(axis=0), dec.back
        slow_p = pre.slowest(form.first_back)
        slow_d = dec.slowest(form.back_bounds)
        way = once + back
        fixed = pre.total.sum(axis=0) + pre.back * form.first_back
        fixed = fixed + form.ws * once + form.back * back
        full = [(form.bd + form.z * form.md) * slow_d]
        waits = [form.bd * slow_d + form.z * way] if form.z else []
        return EntryTimes(
            loss_s=p.theta * sum_omega(p, a),
            fixed=fixed,
            prefill=np.unique(form.a * slow_p, axis=0),
            decode=np.unique(np.concatenate([*full, *waits]), axis=0),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ring:
    """A pipeline's stages and messages in one phase, by entry."""

    total: Floats
    """[2J - 1, E] stages, then messages."""
    held: Floats
    """[2J - 1, E]"""
    back: Floats
    """[E] the way back; zero for one stage."""
    back_held: Floats

    @classmethod
    def of(
        cls, entries: CostEntries, variant: int, form: Form, a: Assignment, phase: Phase
    ) -> _Ring:
        x, size = form.numbers, len(entries)
        first = phase is Phase.PREFILL
        layers = (x.prefill_s, x.held_prefill_s) if first else (x.decode_s, x.held_decode_s)
        ends = (
            (x.ends_prefill_s, x.held_ends_prefill_s)
            if first
            else (x.ends_decode_s, x.held_ends_decode_s)
        )
        hop, way = (x.hop_prefill, x.back_prefill) if first else (x.hop_decode, x.back_decode)
        found = []
        for of_layers, of_ends in zip(layers, ends, strict=True):
            rows = np.zeros((len(a.stages), size))
            for row, stage in zip(rows, a.stages, strict=True):
                _add_layers(row, entries.of_layers[variant][phase], of_layers, stage)
            for position, end in ((0, 0), (-1, 1)):
                c = a.stages[position].cls
                rows[position, entries.of_ends[variant][phase][c, end]] += of_ends[c, end]
            found.append(rows)
        order = [stage.cls for stage in a.stages]
        links = list(zip(order, order[1:], strict=False))
        ring = [(order[-1], order[0])] if links else []

        def messages(hops: Hops, of: Sequence[tuple[int, int]], name: str) -> Floats:
            rows = np.zeros((len(of), size))
            for row, pair in zip(rows, of, strict=True):
                row[entries.of_links[pair]] = getattr(hops, name)[pair]
            return rows

        return cls(
            total=np.concatenate([found[0], messages(hop, links, "total_s")]),
            held=np.concatenate([found[1], messages(hop, links, "held_s")]),
            back=messages(way, ring, "total_s").sum(axis=0),
            back_held=messages(way, ring, "held_s").sum(axis=0),
        )

    def slowest(self, returns: bool) -> Floats:
        """[I, E] what the slowest is the largest of; `returns`: the way back counts."""
        return np.concatenate([self.held, self.back_held[None]]) if returns else self.held


def _add_layers(row: Floats, of: Ints, seconds: Floats, stage: Stage) -> None:
    """Add a stage's layers: `of` [C, B] their entries, `seconds` [L, C, B]."""
    for i, b in zip(range(stage.start, stage.end), stage.choices, strict=True):
        row[of[stage.cls, b]] += seconds[i, stage.cls, b]


class MostSeconds:
    """What any plan of a variant may take of an entry at most, at each micro-batch size."""

    def __init__(self, entries: CostEntries, variant: int) -> None:
        self.entries, self.variant, self.p = entries, variant, entries.variants[variant]

    @cached_property
    def layers(self) -> tuple[Floats, Floats]:
        """[C, B] layers of a choice on one device, and on all devices of a kind, at most."""
        p = self.p
        etas, xis = p.prefill_sizes, p.decode_sizes
        pairs = [(eta, xi) for eta in {etas[0], etas[-1]} for xi in {xis[0], xis[-1]}]
        if len(etas) * len(xis) <= MOST_PAIRS:
            pairs = [(eta, xi) for eta in etas for xi in xis]
        room = np.max([p.capacity(*pair).max(axis=(1, 2, 3)) for pair in pairs], axis=0)
        sizes = np.where(p.open, p.all_layer_bytes, np.inf).min(axis=0)
        one = np.minimum(np.floor(np.maximum(room, 0)[:, None] / sizes), p.open.sum(axis=0))
        counts = np.array([cls.count for cls in p.classes], dtype=float)
        kinds = [cls.first.profile_kind for cls in p.classes]
        same = np.array([[a == b for a in kinds] for b in kinds])
        of_kind = same @ (counts[:, None] * one)
        return np.where(same[:, :, None], one[None], 0).max(axis=1), np.minimum(
            of_kind, p.open.sum(axis=0)
        )

    def of_layers(self, phase: Phase, size: int) -> Floats:
        """[C, B] seconds of a layer's entry."""
        x, same = self.p.size_numbers(phase, size), self.entries.of_layers[self.variant][phase]
        seconds = np.maximum(x.layer_s, x.held_layer_s).max(axis=0)
        return self._weighed(phase, size, *self.layers) * _of_same(same, seconds)

    def of_ends(self, phase: Phase, size: int) -> Floats:
        """[C, 2] seconds of an embedding's entry, and of a head's."""
        x, same = self.p.size_numbers(phase, size), self.entries.of_ends[self.variant][phase]
        once = np.ones(same.shape)
        seconds = np.maximum(x.ends_s, x.held_ends_s)
        return self._weighed(phase, size, once, once) * _of_same(same, seconds)

    def _weighed(self, phase: Phase, size: int, one: Floats, everywhere: Floats) -> Floats:
        """Return how often the objective counts what is so often on one device, and on all."""
        if phase is Phase.PREFILL:
            w = make_form(self.p, size, self.p.decode_sizes[0])
            return np.asarray(w.a * one + everywhere)
        w = make_form(self.p, self.p.prefill_sizes[0], size)
        full = (w.bd + w.z * w.md) * one + w.ws * everywhere
        return np.maximum(full, w.bd * one + (w.ws + w.z) * everywhere)


def _of_same(entries: Ints, seconds: Floats) -> Floats:
    """Return the most seconds of any device that has the same entry."""
    return np.array([[seconds[entries == e].max() for e in row] for row in entries])


MOST_PAIRS = 64
"""Pairs of micro-batch sizes up to which the memory of all is looked at; of more, the extremes."""


def loss_at_least_s(p: Problem) -> float:
    """Return what the quality loss of any plan is worth at least."""
    least = float(p.priced_omega.min(axis=1).sum())
    return least if math.isfinite(least) else 0.0
