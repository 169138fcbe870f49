"""What an engine takes for its rows: proven lower bounds at once, plans by the exact search.

An engine that has no memory for all its rows at once runs them in waves, one after the other, each
of as many rows. Prices are kept: engines of alike devices are solved once.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from llmpq.cost_model import Phase
from llmpq.errors import DoesNotFitError
from llmpq.planner.costs.links import Floats
from llmpq.planner.evaluate.objective import sum_omega
from llmpq.planner.exact.bounds.pairs import quick_bound
from llmpq.planner.problem.microbatch import chunk_sizes
from llmpq.planner.problem.outcome import Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.count_vectors import CountVectors, Vector
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import Solved, best_plan, variants_with_room
from llmpq.precision import KVPrecision

MOST_WAVES = 4
"""Waves in which an engine may run its rows."""
GRID, MOST_SIZES = 1.1, 40
"""Ratio of the batches at which times of layers are looked up, larger where they were too many."""
ROUNDING = 1e-9
"""Relative rounding of a bound."""


@dataclass(frozen=True, kw_only=True)
class EnginePrice:
    """The best plan of an engine for its rows, as far as it is known."""

    value: float
    """Seconds, plus theta times the sum of omega; infinite where no plan was found."""
    bound: float
    """No plan has a lower value."""
    waves: int = 1
    solved: Solved | None = None
    """Of one wave."""
    ceiling: float = math.inf
    """Value below which plans were looked for."""

    @property
    def omega(self) -> float:
        """Quality loss of the plan."""
        assert self.solved is not None
        return sum_omega(self.solved.problem, self.solved.outcome.assignment)


class EnginePrices:
    """Prices of the engines of a problem."""

    def __init__(
        self,
        p: Problem,
        vectors: CountVectors,
        options: SolveOptions,
        *,
        deadline_s: float = math.inf,
        engine_s: float = math.inf,
    ) -> None:
        """`deadline_s`: when to stop, by `time.process_time`; `engine_s`: seconds of one solve."""
        self.p = p if options.budget is None else p.with_changes(theta=0.0)
        self.vectors, self.options = vectors, replace(options, prefer=None)
        self._deadline_s, self._engine_s = deadline_s, engine_s
        self.known: dict[Vector, dict[int, EnginePrice]] = {}
        """By rows, of canonical vectors."""
        self._floors: dict[tuple[Vector, int], float] = {}
        self.num_solves = 0

    @property
    def rows(self) -> int:
        """All rows of the job."""
        return self.p.workload.batch

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.process_time() > self._deadline_s

    def note(self, v: Vector, rows: int, price: EnginePrice) -> None:
        """Keep a price that is known from elsewhere."""
        self.known.setdefault(self.vectors.canonical(v), {})[rows] = price

    def price(self, v: Vector, rows: int, ceiling: float = math.inf) -> EnginePrice:
        """Return what an engine takes for rows; plans not below `ceiling` need not be found."""
        v = self.vectors.canonical(v)
        own = self.known.setdefault(v, {})
        found = own.get(rows)
        if found is None or (found.solved is None and found.bound < ceiling > found.ceiling):
            own[rows] = self._priced(v, rows, ceiling)
        return own[rows]

    def most(self, v: Vector, below: float) -> int:
        """Return rows above which an engine is proven to take `below` or more."""
        v = self.vectors.canonical(v)
        cap = self.rows
        for rows, price in self.known.get(v, {}).items():
            if price.bound >= below:
                cap = min(cap, rows - 1)
        grid = self._grid
        first = bisect_left(grid, below, key=lambda rows: self._floor(v, rows))
        return cap if first == len(grid) else min(cap, grid[first] - 1)

    def floor_of_all(self) -> float:
        """Return a lower bound of every topology: each row where and in sizes as it is quickest."""
        each = []
        most = np.array(self._largest(len(self._grid)))[:, None, None, None]
        for own in self._steps:
            rows = sum((own[phase] * own.passes[phase] / most).min(axis=0) for phase in own.passes)
            each.append(np.asarray(rows).min(axis=2).sum(axis=0))
        speeds = np.array(self.vectors.counts) / np.maximum(np.min(each, axis=0), 1e-30)
        return float(self.rows / speeds.sum()) * (1 - ROUNDING)

    def _priced(self, v: Vector, rows: int, ceiling: float) -> EnginePrice:
        floor = self._floor(v, rows)
        best = EnginePrice(value=math.inf, bound=math.inf, ceiling=ceiling)
        part = self.p.part(self.vectors.names(v))
        for waves in range(1, min(MOST_WAVES, rows) + 1):
            at_most = min(best.value, ceiling)
            if floor >= at_most or self.late:  # the floor is of any number of waves
                return replace(best, bound=min(best.bound, floor))
            job = part.with_job(batch=-(-rows // waves)).with_changes(theta=self.p.theta / waves)
            variants = variants_with_room(job, self.options)
            if not variants:
                continue
            if waves > 1:
                quick = waves * min(quick_bound(one) for one in variants)
                if quick >= at_most and _alike(job):
                    best = replace(best, bound=min(best.bound, quick))
                    continue
            found, bound = self._solved(job, at_most / waves)
            best = replace(best, bound=min(best.bound, max(floor, waves * bound)))
            if found is not None and waves * found.outcome.value < best.value:
                value = waves * found.outcome.value
                best = replace(best, value=value, waves=waves, solved=found)
        return best

    def _solved(self, job: Problem, ceiling: float) -> tuple[Solved | None, float]:
        """Return the best plan below a ceiling and a bound; infinite where none fits."""
        self.num_solves += 1
        left_s = min(self._engine_s, max(0.05, self._deadline_s - time.process_time()))
        options = replace(self.options, time_limit_s=min(left_s, self.options.time_limit_s))
        try:
            found = best_plan(job, options, ceiling=ceiling)
        except Unfinished as error:
            return None, max(0.0, error.bound)
        except DoesNotFitError:
            return None, math.inf
        bound = found.outcome.bound
        return found, 0.0 if bound is None else bound

    @cached_property
    def _grid(self) -> list[int]:
        """Batches at which times are looked up, ascending, the whole last."""
        found, rows = [self.rows], self.rows
        ratio = max(GRID, self.rows ** (1 / MOST_SIZES))
        while rows > 1:
            rows = min(rows - 1, int(rows / ratio))
            found.append(max(1, rows))
        return found[::-1]

    @cached_property
    def _steps(self) -> list[_Steps]:
        """Times of a layer in a step of so many rows, of each variant."""
        found = []
        for own in engine_variants(self.p, self.options.kvs):
            passes = {Phase.PREFILL: own.chunks_of_prompt, Phase.DECODE: own.workload.gen_len - 1}
            passes = {phase: count for phase, count in passes.items() if count}
            times = {
                phase: np.array([own.size_numbers(phase, size).layer_s for size in self._grid])
                for phase in passes
            }
            found.append(_Steps(times=times, passes=passes, loss=own.priced_omega))
        return found

    def _largest(self, count: int) -> list[int]:
        """Return, of the first sizes of the grid, the largest micro-batch below the next one."""
        grid = self._grid
        return [*(size - 1 for size in grid[1:count]), grid[count - 1]]

    def _floor(self, v: Vector, rows: int) -> float:
        """Return a lower bound of an engine's value for rows, in any number of waves."""
        count = bisect_right(self._grid, rows)
        if (v, count) not in self._floors:
            floor = min(self._floor_of(own, v, count) for own in self._steps)
            self._floors[v, count] = floor * (1 - ROUNDING)
        return self._floors[v, count]

    def _floor_of(self, own: _Steps, v: Vector, count: int) -> float:
        """Return the bound of a variant, for as many rows as the grid has at `count - 1`.

        Each phase takes at least what its layers take spread over the devices without loss, and
        what they take one behind the other, of one micro-batch; both grow with the bits, which the
        phases share. Spread: for weights lambda of the devices, of sum 1, the slowest one takes at
        least the weighted sum of all. A micro-batch takes no less than a smaller one, and a row of
        it no more.
        """
        used = [c for c, number in enumerate(v) if number]
        counts = np.array([v[c] for c in used])
        steps = (self._grid[count - 1] / np.array(self._largest(count)))[:, None, None]
        alone = own.loss[:, None, :] + sum(
            passes * own[phase][count - 1][:, used, :] for phase, passes in own.passes.items()
        )
        speed = 1 / np.maximum(alone.min(axis=2).sum(axis=0), 1e-30)
        weights = (speed / (speed * counts).sum())[None, None, :, None]
        total: Floats = own.loss[None, None]
        for axis, (phase, passes) in enumerate(own.passes.items()):
            times = own[phase][:count][:, :, used, :]
            again = passes if phase is Phase.DECODE else 1
            way = again * times.min(axis=2)
            spread = passes * steps * (weights * times).min(axis=2)
            # [ways, 1, sizes, 1, L, B] of prefill, [1, ways, 1, sizes, L, B] of decode.
            both = np.stack([way, spread])
            shape = [1, 1, 1, 1, *both.shape[2:]]
            shape[axis], shape[axis + 2] = both.shape[:2]
            total = total + both.reshape(shape)
        sums = total.min(axis=-1).sum(axis=-1)
        while sums.ndim < 4:
            sums = sums[None]
        return float(sums.max(axis=(0, 1)).min())


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


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Seconds of a layer in one step, by size of the grid, and how many steps a row takes."""

    times: Mapping[Phase, Floats]
    """[sizes, L, C, B]"""
    passes: Mapping[Phase, int]
    loss: Floats
    """[L, B] theta omega."""

    def __getitem__(self, phase: Phase) -> Floats:
        """Return the times of a phase."""
        return self.times[phase]


def _alike(p: Problem) -> bool:
    """Whether all layers are alike: quick bounds are of such layers."""
    return p.numbers(*p.pairs[0]).uniform
