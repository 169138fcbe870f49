"""What an engine takes for its rows: proven lower bounds at once, plans by the exact search.

An engine is given as a vector of counts: how many devices of each class it has (count_vectors.py).

An engine that has no memory for all its rows at once runs them in waves, one after the other, each
of as many rows. Prices are kept: engines of alike devices are solved once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property

from llmpq.errors import DoesNotFitError
from llmpq.planner.evaluate.objective import sum_omega
from llmpq.planner.problem.limits import MOST_WAVES
from llmpq.planner.problem.outcome import Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import now_s
from llmpq.planner.solving.count_vectors import CountVectors, Vector
from llmpq.planner.solving.engine_floors import EngineFloors
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import Solved, best_plan, variants_with_room

GRID, MOST_SIZES = 1.1, 40
"""Ratio of neighbouring batches for which lower bounds are kept, and how many batches at most: with
more, the ratio is larger."""


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
        """`deadline_s`: when to stop, `engine_s`: of one solve; by the clock of searches."""
        self.p = p if options.budget is None else p.with_changes(theta=0.0)
        self.vectors, self.options = vectors, replace(options, prefer=None)
        self.deadline_s, self._engine_s = deadline_s, engine_s
        self.known: dict[Vector, dict[int, EnginePrice]] = {}
        """Canonical vector -> rows -> price."""
        self._in_one: dict[tuple[Vector, int], float] = {}
        """Bounds of one wave that are known from elsewhere."""
        listed = list(dict.fromkeys(map(vectors.canonical, vectors.vectors)))
        self._floors = EngineFloors(self.p, listed, options.kvs, options.budget)
        self._parts: dict[Vector, Problem] = {}

    @property
    def rows(self) -> int:
        """All rows of the job."""
        return self.p.workload.batch

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return now_s() > self.deadline_s

    def note(self, v: Vector, rows: int, price: EnginePrice) -> None:
        """Keep a price of rows in one wave that is known from elsewhere.

        Of more waves, for which plans of more bits may have room, floors are the bound.
        """
        v = self.vectors.canonical(v)
        self._in_one[v, rows] = price.bound
        more = range(2, min(MOST_WAVES, rows) + 1)
        bounds = [price.bound, *(self._floors.in_waves(v, rows, waves) for waves in more)]
        looked = math.inf if min(bounds) == price.bound else -math.inf
        self.known.setdefault(v, {})[rows] = replace(price, bound=min(bounds), ceiling=looked)

    def price(self, v: Vector, rows: int, ceiling: float = math.inf) -> EnginePrice:
        """Return what an engine takes for rows; plans not below `ceiling` need not be found."""
        v = self.vectors.canonical(v)
        own = self.known.setdefault(v, {})
        found = own.get(rows)
        if found is None or (found.solved is None and found.bound < ceiling > found.ceiling):
            own[rows] = replace(self._priced(v, rows, ceiling), ceiling=ceiling)
        return own[rows]

    def most(self, v: Vector, below: float) -> int:
        """Return the rows beyond which an engine's value is proven to be `below` or more."""
        v = self.vectors.canonical(v)
        cap = self.rows
        for rows, price in self.known.get(v, {}).items():
            if price.bound >= below:
                cap = min(cap, rows - 1)
        grid = self._grid
        first = bisect_left(grid, below, key=lambda rows: self.floor(v, rows))
        return cap if first == len(grid) else min(cap, grid[first] - 1)

    def floor_of_all(self) -> float:
        """Return a lower bound of every topology: each row where and in sizes as it is quickest."""
        return self._floors.of_all()

    def _priced(self, v: Vector, rows: int, ceiling: float) -> EnginePrice:
        floor = self._floors.floor(v, rows)
        best = EnginePrice(value=math.inf, bound=math.inf, ceiling=ceiling)
        part = self._part(v)
        for waves in range(1, min(MOST_WAVES, rows) + 1):
            at_most = min(best.value, ceiling)
            if waves == 1 and (v, rows) in self._in_one:
                best = replace(best, bound=self._in_one[v, rows])
                continue
            if floor >= at_most or self.late:  # the floor is of any number of waves
                return replace(best, bound=min(best.bound, floor))
            least = self._floors.in_waves(v, rows, waves)
            if least >= at_most:
                best = replace(best, bound=min(best.bound, least))
                continue
            job = part.with_job(batch=-(-rows // waves)).with_changes(theta=self.p.theta / waves)
            if not variants_with_room(job, self.options):
                continue
            found, bound = self._solved(job, at_most / waves)
            best = replace(best, bound=min(best.bound, max(least, waves * bound)))
            if found is not None and waves * found.outcome.value < best.value:
                value = waves * found.outcome.value
                best = replace(best, value=value, waves=waves, solved=found)
        return best

    def _part(self, v: Vector) -> Problem:
        """Return the job on an engine's devices."""
        if v not in self._parts:
            self._parts[v] = self.p.part(self.vectors.names(v)).prepared()
        return self._parts[v]

    def _solved(self, job: Problem, ceiling: float) -> tuple[Solved | None, float]:
        """Return the best plan below a ceiling and a bound; infinite where none fits."""
        left_s = min(self._engine_s, max(0.05, self.deadline_s - now_s()))
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

    def floor(self, v: Vector, rows: int) -> float:
        """Return a lower bound of an engine's value for rows, in any number of waves."""
        return self._floors.floor(self.vectors.canonical(v), rows)
