"""What an engine takes for its rows: proven lower bounds at once, plans by the exact search.

An engine that has no memory for all its rows at once runs them in waves, one after the other, each
of as many rows. Prices are kept: engines of alike devices are solved once.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
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

MOST_WAVES = 4
"""Waves in which an engine may run its rows."""
GRID = 1.1
"""Ratio of the batches at which times of layers are looked up."""
MONOTONE = 1e-9
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
        self._layers: dict[tuple[int, int], Floats] = {}
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
        """Return a lower bound of every topology: each row where and in batches as it is quickest.

        A batch takes no less than the next smaller one of the grid.
        """
        grid = self._grid
        each = []
        for rows, above in zip(grid, [*grid[1:], self.rows + 1], strict=True):
            for number in range(len(self._variants)):
                alone = self._layer_s(number, rows).min(axis=2).sum(axis=0)
                each.append(alone / max(1, above - 1))
        speeds = np.array(self.vectors.counts) / np.maximum(np.min(each, axis=0), 1e-30)
        return float(self.rows / speeds.sum()) * (1 - MONOTONE)

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
        while rows > 1:
            rows = min(rows - 1, int(rows / GRID))
            found.append(max(1, rows))
        return found[::-1]

    @cached_property
    def _variants(self) -> list[Problem]:
        """The job at every KV precision and usual prefill chunk that some engine may have.

        Smaller chunks, of engines that have no room for these, take no less time.
        """
        kvs = self.options.kvs or (self.p.kv,)
        work, found = self.p.workload, []
        for kv in kvs:
            own = self.p.with_changes(workload=work.model_copy(update={"kv": kv}))
            chunks: tuple[int, ...] = (own.chunk,)
            if self.options.kvs:
                chunks = chunk_sizes(1, work.prompt_len, window=own.spec.widest_window)
            found += [own.with_changes(chunk=chunk) for chunk in chunks]
        return found

    @cached_property
    def _steps(self) -> list[dict[Phase, Floats]]:
        """Of each variant and phase [sizes, L, C, B] seconds of a layer, all steps of its rows.

        Sizes are those of the grid; one between two of them takes no less than the smaller.
        """
        found = []
        for own in self._variants:
            passes = {Phase.PREFILL: own.chunks_of_prompt, Phase.DECODE: own.workload.gen_len - 1}
            found.append(
                {
                    phase: count
                    * np.array([own.size_numbers(phase, size).layer_s for size in self._grid])
                    for phase, count in passes.items()
                    if count
                }
            )
        return found

    def _layer_s(self, variant: int, rows: int) -> Floats:
        """[L, C, B] least seconds of a layer for all tokens of so many rows, which the grid has."""
        if (variant, rows) not in self._layers:
            at = self._grid.index(rows) + 1
            largest = np.array([*(size - 1 for size in self._grid[1:at]), rows])
            steps = -(-rows // largest)[:, None, None, None]
            of_phases = [(steps * own[:at]).min(axis=0) for own in self._steps[variant].values()]
            self._layers[variant, rows] = np.asarray(sum(of_phases))
        return self._layers[variant, rows]

    def _floor(self, v: Vector, rows: int) -> float:
        """Return a lower bound of an engine's value: its layers, spread without loss.

        For weights lambda of the devices, of sum 1, the slowest device takes at least the weighted
        sum of what all take; each layer is then charged where that is least.
        """
        at = self._grid[bisect_right(self._grid, rows) - 1]
        if (v, at) not in self._floors:
            used = [c for c, count in enumerate(v) if count]
            counts, floors = np.array([v[c] for c in used]), []
            for number, own in enumerate(self._variants):
                times = self._layer_s(number, at)[:, used, :]
                loss = own.priced_omega[:, None, :]
                alone = (times + loss).min(axis=2).sum(axis=0)
                speed = 1 / np.maximum(alone, 1e-30)
                weights = speed / (speed * counts).sum()
                floors.append((weights[None, :, None] * times + loss).min(axis=(1, 2)).sum())
            self._floors[v, at] = float(min(floors)) * (1 - MONOTONE)
        return self._floors[v, at]


def _alike(p: Problem) -> bool:
    """Whether all layers are alike: quick bounds are of such layers."""
    return p.numbers(*p.pairs[0]).uniform
