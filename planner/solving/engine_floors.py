"""Lower bounds of what engines take for their rows, of all engines that devices can make at once.

An engine's time is F (planner/evaluate/objective.py) of its devices. P and D are at least the mean
of all its stages' times, weighted by the devices' speeds, so F is at least a sum over layers, each
on the device and at the bits where it costs least; bytes above the memory of all its devices have a
price, as has a loss above the budget. Sizes of micro-batches are looked up one by one up to EXACT,
beyond at steps of GRID: a micro-batch takes no less than a smaller one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmpq.costs.cost_model import Phase
from llmpq.planner.costs.links import Floats
from llmpq.planner.evaluate.objective import BUDGET_ROUNDING, coefficients
from llmpq.planner.exact.bounds.relaxation import layer_groups
from llmpq.planner.problem.limits import MOST_WAVES
from llmpq.planner.problem.numbers import chunk_sizes, distinct_sizes, last_share, one_size
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import spend
from llmpq.planner.solving.count_vectors import Vector
from llmpq.precision import KVPrecision

EXACT, GRID = 24, 1.06
"""Micro-batch sizes that are looked up one by one; ratio of those beyond."""
ROUNDING = 1e-9
"""Relative rounding of a bound."""
PRICES = 5
"""Prices of memory, and of loss under a budget, that are tried beside zero."""
MANY = 400
"""Engines up to which bounds count memory."""


@dataclass(frozen=True, kw_only=True)
class _Phase:
    """Times of a phase at every number of micro-batches: a whole one's, and the mean of all."""

    layer_s: Floats
    """[S, C, B]"""
    held_s: Floats
    ends_s: Floats
    """[S, C, 2]"""
    held_ends_s: Floats
    counts: Floats
    """[S] micro-batches, times the chunks of a prompt."""


def engine_variants(p: Problem, kvs: Sequence[KVPrecision]) -> list[Problem]:
    """Return the job at every KV precision and usual prefill chunk that some engine may have.

    Smaller chunks, of engines that have no room for these, take no less time.
    """
    work, found = p.workload, []
    for kv in kvs or (p.kv,):
        own = p.with_changes(workload=work.model_copy(update={"kv": kv}))
        chunks: tuple[int, ...] = (own.chunk,)
        if kvs:
            chunks = chunk_sizes(1, work.prompt_len, window=own.spec.widest_window)
        found += [own.with_changes(chunk=chunk) for chunk in chunks]
    return found


def least_row_s(variants: Sequence[Problem], rows: int) -> Floats:
    """[C] the least time of a row of a job in all its layers and steps on a device of a class."""
    return np.asarray(np.min([_Variant(one).least_row_s(rows) for one in variants], axis=0))


class EngineFloors:
    """Bounds of engines given as count vectors."""

    def __init__(
        self,
        p: Problem,
        vectors: Sequence[Vector],
        kvs: Sequence[KVPrecision],
        budget: float | None,
    ) -> None:
        self.p, self.budget = p, budget
        self.counts = np.array(vectors, dtype=float)
        """[V, C]"""
        self._index = {v: k for k, v in enumerate(vectors)}
        priced = p if budget is None else p.with_changes(theta=1.0)
        self._variants = [_Variant(one) for one in engine_variants(priced, kvs)]
        self._with_memory = len(vectors) <= MANY
        self._tables: dict[tuple[int, int], Floats] = {}
        """[V] by rows and waves."""

    def floor(self, v: Vector, rows: int) -> float:
        """Return a lower bound of an engine's value for rows, in any number of waves."""
        return min(self.in_waves(v, rows, wave) for wave in range(1, min(MOST_WAVES, rows) + 1))

    def in_waves(self, v: Vector, rows: int, waves: int) -> float:
        """Return a lower bound of an engine's value for rows in so many waves."""
        if (rows, waves) not in self._tables:
            each = [self._of(one, rows, waves) for one in self._variants]
            self._tables[rows, waves] = np.min(each, axis=0) * (1 - ROUNDING)
        return float(self._tables[rows, waves][self._index[v]])

    def of_all(self) -> float:
        """Return a lower bound of every topology: each row where and in sizes as it is quickest."""
        rows = self.p.workload.batch
        each = np.min([one.least_row_s(rows) for one in self._variants], axis=0)
        counts = np.array([cls.count for cls in self.p.classes])
        return float(rows / (counts / np.maximum(each, 1e-30)).sum()) * (1 - ROUNDING)

    def _of(self, one: _Variant, rows: int, waves: int) -> Floats:
        """[V] bounds of a variant in so many waves of equal rows."""
        own, batch = one.p, -(-rows // waves)
        costs, ends = self._costs(one, batch, waves)
        groups, sizes = one.groups, one.layer_bytes(batch)
        room = self.counts @ one.room
        cheapest = costs.min(axis=1)  # [V, B]
        spend(100, 60 * costs.size)
        prices = (0.0, *(_slopes(cheapest, sizes) if self._with_memory else ()))
        losses, budget = (1.0,), 0.0
        if self.budget is not None:
            budget = self.budget * (1 + BUDGET_ROUNDING)
            losses = (0.0, *one.loss_prices(costs, self.counts))
        best = np.full(len(costs), -np.inf)
        for price in prices:
            for loss in losses:
                priced = cheapest + price * sizes
                total = ends - price * room - loss * budget
                for row, count in zip(groups.omega, groups.sizes, strict=True):
                    own_loss = np.where(
                        np.isinf(row), np.inf, loss * np.where(np.isinf(row), 0, row)
                    )
                    total = total + count * (priced + own_loss).min(axis=1)
                best = np.maximum(best, total)
        if self._with_memory:
            best = np.where(own.num_layers * sizes.min() > room, np.inf, best)
        return best

    def _costs(self, one: _Variant, batch: int, waves: int) -> tuple[Floats, Floats]:
        """[V, C, B] the least cost of a layer, infinite on devices an engine lacks; [V] ends."""
        n = one.p.workload.gen_len
        lacks = np.where(self.counts > 0, 0.0, np.inf)[:, :, None]
        costs: Floats = lacks
        ends = np.zeros(len(self.counts))
        for phase in (Phase.PREFILL, Phase.DECODE):
            if phase is Phase.DECODE and n < 2:
                continue
            own = one.phase(phase, batch)
            quick = own.held_s[len(own.held_s) // 2].min(axis=1)
            speeds = self.counts / np.maximum(quick, 1e-30)
            share = 1 / np.maximum(quick, 1e-30) / speeds.sum(axis=1, keepdims=True)  # [V, C]
            ways = []
            for kappa in (1.0,) if phase is Phase.PREFILL else (1.0, 0.0):
                slow, once = [], []
                for count in own.counts.astype(int).tolist():
                    c = coefficients("makespan", mp=count, md=count, n=n)
                    first = phase is Phase.PREFILL
                    slow.append(c.a if first else c.d_weight(kappa))
                    once.append(1.0 if first else c.s_weight(kappa))
                weight = np.array(slow)[None, :, None, None] * share[:, None, :, None]
                spend(20, 3 * weight.size * own.layer_s.shape[2])
                each = np.array(once)[:, None, None]
                layer = each * own.layer_s + weight * own.held_s + lacks[:, None]
                of_ends = each * own.ends_s + weight * own.held_ends_s + lacks[:, None]
                ways.append((layer, of_ends.min(axis=2).sum(axis=2)))
            layer, end = ways[0]
            if len(ways) > 1:
                other, other_end = ways[1]
                totals = [
                    one.p.num_layers * table.min(axis=(2, 3)) + ends_s for table, ends_s in ways
                ]
                better = totals[1] > totals[0]
                layer = np.where(better[:, :, None, None], other, layer)
                end = np.where(better, other_end, end)
            costs = costs + waves * layer.min(axis=1)
            ends = ends + waves * end.min(axis=1)
        return costs, ends


class _Variant:
    """Times and sizes of a job at one KV precision and prefill chunk."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self._sizes: dict[tuple[Phase, int], tuple[Floats, Floats]] = {}
        self._phases: dict[tuple[Phase, int], _Phase] = {}
        self._bytes: dict[int, Floats] = {}
        grid = list(range(1, min(EXACT, p.workload.batch) + 1))
        while grid[-1] < p.workload.batch:
            grid.append(min(p.workload.batch, max(grid[-1] + 1, int(grid[-1] * GRID))))
        self._grid = grid
        self.groups = layer_groups(p)
        """Theta times omega, where a budget prices it omega itself."""

    @cached_property
    def room(self) -> Floats:
        """[C] the most bytes that a device of a class has for layers."""
        least = self.p.with_job(batch=1).capacity(1, 1)
        return np.clip(least, 0, None).max(axis=(1, 2, 3)).astype(float)

    def layer_bytes(self, batch: int) -> Floats:
        """[B] the fewest bytes of a layer with the KV of so many rows."""
        if batch not in self._bytes:
            self._bytes[batch] = (
                self.p.with_job(batch=batch).all_layer_bytes.min(axis=0).astype(float)
            )
        return self._bytes[batch]

    def _at(self, phase: Phase, size: int) -> tuple[Floats, Floats]:
        """[C, B] and [C, 2] of a micro-batch of the largest size looked up that is not larger."""
        size = self._grid[bisect_right(self._grid, size) - 1]
        if (phase, size) not in self._sizes:
            layer_s, ends_s = one_size(self.p, phase, size)
            self._sizes[phase, size] = layer_s.min(axis=0), ends_s
        return self._sizes[phase, size]

    def phase(self, phase: Phase, batch: int) -> _Phase:
        """Return a phase's times at all numbers of micro-batches of a batch."""
        if (phase, batch) not in self._phases:
            self._phases[phase, batch] = self._phase(phase, batch)
        return self._phases[phase, batch]

    def _phase(self, phase: Phase, batch: int) -> _Phase:
        prefill = phase is Phase.PREFILL
        chunks = self.p.chunks_of_prompt if prefill else 1
        passes = chunks if prefill else self.p.workload.gen_len - 1
        rows: list[tuple[Floats, ...]] = []
        counts = []
        for size in distinct_sizes(batch):
            count, rest = -(-batch // size), batch % size
            whole = self._at(phase, size)
            share = last_share(count, passes) if rest else 0.0
            last = self._at(phase, rest) if rest else whole
            held = [w + share * (x - w) for w, x in zip(whole, last, strict=True)]
            rows.append((*whole, *held))
            counts.append(count * chunks)
        layer, ends, held_layer, held_ends = (np.array(table) for table in zip(*rows, strict=True))
        return _Phase(
            layer_s=layer,
            held_s=held_layer,
            ends_s=ends,
            held_ends_s=held_ends,
            counts=np.array(counts, dtype=float),
        )

    def loss_prices(self, costs: Floats, counts: Floats) -> Floats:
        """Return prices of a unit of omega at which layers change their choice."""
        of_all = costs[int(counts.sum(axis=1).argmax())].min(axis=0)
        rows = self.p.omega
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = of_all[:, None] - of_all[None, :]
            slopes = gain[None] / (rows[:, None, :] - rows[:, :, None])
        return _spread(slopes)

    def least_row_s(self, rows: int) -> Floats:
        """[C] the least time of a row on a device of a class, all layers and steps of it."""
        work, total = self.p.workload, np.zeros(())
        ends = [*(size - 1 for size in self._grid[1:]), rows]
        for phase, passes in (
            (Phase.PREFILL, self.p.chunks_of_prompt),
            (Phase.DECODE, work.gen_len - 1),
        ):
            if passes:
                each = [
                    self._at(phase, size)[0] / end
                    for size, end in zip(self._grid, ends, strict=True)
                ]
                total = total + passes * np.min(each, axis=0)
        return np.asarray(total.min(axis=1) * self.p.num_layers)


def _slopes(costs: Floats, sizes: Floats) -> Floats:
    """Return seconds a byte at which a layer changes its choice, costs [V, B]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = costs[:, :, None] - costs[:, None, :]
        slopes = gain / (sizes[None, None, :] - sizes[None, :, None])
    return _spread(slopes)


def _spread(slopes: Floats) -> Floats:
    """Return a few of the positive, finite slopes, spread over all."""
    kept = slopes[np.isfinite(slopes) & (slopes > 0)]
    if not len(kept):
        return np.zeros(0)
    return np.unique(np.quantile(kept, np.linspace(0.1, 1.0, PRICES)))
