"""Looks for the best topology of a batch job: which devices make engines, and who gets which rows.

The value of a topology is the largest of its engines', each with its rows: seconds plus theta times
its sum of omega; a budget holds for each of them. The search keeps, for every engine, the most rows
that it may do below the best value so far. The most rows of engines of disjoint devices are a
dynamic program over counts of devices: where they are fewer than the job has, no topology is
better. Else the engines it chose are solved for the rows they would get: that is a better topology,
or it proves that one of them does fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmpq.devices.cluster import Device
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import Timer, now_s
from llmpq.planner.solving.count_vectors import CountVectors, Place, Vector
from llmpq.planner.solving.device_groups import is_even
from llmpq.planner.solving.engine_prices import EnginePrice, EnginePrices
from llmpq.planner.solving.methods import SolveOptions

TOPOLOGY_GAP = 1e-3
"""Relative gap to which topologies are searched: more engines must be better by more than this."""
TOPOLOGY_SHARE = 1 / 10
"""Share of the time limit that the search of topologies may compute, after that of one pipeline."""
PARTS_SHARE = 2 / 5
"""Share of the time limit that engines of whole nodes may compute before that, where there are
several nodes."""
REDEALS = 2
"""Times that rows are dealt anew by what engines took for those they had."""
ENGINE_SHARE = 0.5
"""Share of that which one engine may take."""
CEILING_STEP, MOST_ABOVE = 1.25, 100.0
"""Steps in which engines that must be there are looked for above the value of one pipeline."""
MOST_ROUNDS = 2000
HALVINGS = 30
NEARLY = 1.06
"""How many times as long engines that send nothing may take as a best that does, to be known beside
it: predictions of pipelines were up to 5.6 % off (docs/lab-book/runtime.md)."""
MOST_TRIED = 4
"""Engines with groups of devices that are tried first."""


@dataclass(frozen=True, kw_only=True)
class ChosenEngine:
    """An engine of a topology."""

    vector: Vector
    places: tuple[Place, ...]
    rows: int
    price: EnginePrice

    @property
    def sends(self) -> bool:
        """Whether its devices send each other anything."""
        solved = self.price.solved
        stages = () if solved is None else solved.outcome.assignment.stages
        return len(stages) > 1 or not all(isinstance(place, str) for place in self.places)


@dataclass(frozen=True, kw_only=True)
class SearchedTopology:
    """Engines of disjoint devices, and how good they are known to be."""

    engines: tuple[ChosenEngine, ...]
    value: float
    bound: float
    """No topology has a lower value."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KnownPipeline:
    """The best plan of one engine, found before; the search may have none to start from."""

    value: float = math.inf
    bound: float = 0.0
    stages: int = 1


Deal = tuple[Vector, int, EnginePrice]
"""An engine, its rows, and what it takes for them."""


class TopologySearch:
    """The search, anytime: it ends with the best so far when the time is over."""

    def __init__(
        self,
        p: Problem,
        options: SolveOptions,
        *,
        known: KnownPipeline | None = None,
        exactly: int | None = None,
        gap: float = TOPOLOGY_GAP,
    ) -> None:
        """`known`: of one pipeline over any of the devices; `exactly`: how many engines."""
        self._timer = Timer()
        self._limit_s = options.time_limit_s
        share = options.time_limit_s * TOPOLOGY_SHARE
        self.vectors = CountVectors(p)
        self.prices = EnginePrices(
            p,
            self.vectors,
            replace(options, gap=max(options.gap, gap / 2)),
            deadline_s=now_s() + share,
            engine_s=share * ENGINE_SHARE,
        )
        self._gap, self._exactly = gap, exactly
        self._given_up: dict[Vector, int] = {}
        """Rows from which on an engine is not looked at any more, without a proof."""
        self.best: tuple[ChosenEngine, ...] | None = None
        """None: the known pipeline, or nothing."""
        self._known = known = known or KnownPipeline()
        self.value = known.value if exactly in (None, 1) else math.inf
        self._ceiling = self._first_ceiling = known.value
        """Value below which engines are looked for; higher once there are none (`exactly`)."""
        if known.value < math.inf:
            whole = EnginePrice(value=known.value, bound=known.bound)
            self.prices.note(self.vectors.whole, self.prices.rows, whole)

    def offer(self, engines: Sequence[tuple[Vector, int]]) -> None:
        """Start from engines whose prices are known, if they are better than the best so far."""
        if engines and self._exactly in (None, len(engines)):
            self._try(engines, self._target)

    def try_parts(self) -> list[Deal]:
        """Begin with engines that part the devices where links are slow; return those of the nodes.

        Their time is not that of the search; rows are dealt by what each engine is found to take.
        """
        nodes: list[Deal] = []
        if self._exactly == 1:  # one engine is the known pipeline, or has groups
            return nodes
        self.prices.deadline_s = now_s() + self._limit_s * PARTS_SHARE
        for at, parts in enumerate(self.vectors.partitions):
            found = self._tuned(parts)
            nodes = found if at == 0 else nodes
        self.prices.deadline_s = now_s() + self._limit_s * TOPOLOGY_SHARE
        return nodes

    def _tuned(self, parts: Sequence[Vector]) -> list[Deal]:
        """Return engines with the rows that let all end about together, as their plans take."""
        deals, best = self._first_deals(parts), list[Deal]()
        for redeals in reversed(range(REDEALS + 1)):
            if any(price.solved is None for _, _, price in deals) or not deals:
                break
            if sum(rows for _, rows, _ in deals) == self.prices.rows:
                self.offer([(v, rows) for v, rows, _ in deals])
                best = min(best, deals, key=_slowest)
            if not redeals or self.prices.late:
                break
            speeds = [rows / max(price.value, 1e-12) for _, rows, price in deals]
            able = [math.ceil(self.prices.rows * speed / min(speeds)) for speed in speeds]
            deals = self._priced([v for v, _, _ in deals], dealt(self.prices.rows, able))
        return self._row_by_row(best)

    def _priced(self, engines: Sequence[Vector], rows: Sequence[int]) -> list[Deal]:
        """Return engines with what they take for their rows; those without any left out."""
        return [(v, n, self.prices.price(v, n)) for v, n in zip(engines, rows, strict=True) if n]

    def _row_by_row(self, deals: list[Deal]) -> list[Deal]:
        """Give rows of the slowest engine to the one that then ends first, while that is better."""
        while len(deals) > 1 and not self.prices.late:
            slow = max(range(len(deals)), key=lambda at: deals[at][2].value)
            with_one_more = [price.value * (rows + 1) / rows for _, rows, price in deals]
            fast = min(range(len(deals)), key=lambda at: with_one_more[at])
            if fast == slow:
                break
            moved = [n - (at == slow) + (at == fast) for at, (_, n, _) in enumerate(deals)]
            anew = self._priced([v for v, _, _ in deals], moved)
            if _slowest(anew) >= _slowest(deals):
                break
            deals = anew
            self.offer([(v, rows) for v, rows, _ in deals])
        return deals

    def _first_deals(self, parts: Sequence[Vector]) -> list[Deal]:
        """Return engines with rows as floors have it: as many engines as there must be."""
        deals = self._evenly(parts)
        if self._exactly is None:
            return deals
        deals = sorted(deals, key=lambda deal: -deal[1])[: self._exactly]
        # Engines that are too slow for an even share must be there, too.
        left = list(parts)
        for v, _, _ in deals:
            left.remove(v)
        slow = [v for v in left if self.prices.most(v, math.inf)]
        return deals + [(v, 1, self.prices.price(v, 1)) for v in slow[: self._exactly - len(deals)]]

    def run(self) -> SearchedTopology:
        """Search; return the best topology. Without engines it is the known pipeline.

        First of stages of one device, as if there were no groups; then of all.
        """
        self._seed()
        engines = self._plain
        proven = self._improve(engines)
        if self.vectors.groups:
            engines = self.vectors.vectors
            self._ceiling = self._first_ceiling
            self.prices.deadline_s = now_s() + self._limit_s * TOPOLOGY_SHARE
            self._try_groups()
            proven = self._improve(engines)
        bound = self._target if proven else self.bound(engines)
        return SearchedTopology(
            engines=self.best or (),
            value=self.value,
            bound=min(bound, self.value),
            seconds=self._timer.seconds,
        )

    @property
    def _plain(self) -> list[Vector]:
        """Engines without groups."""
        kinds = len(self.vectors.counts)
        return [v for v in self.vectors.vectors if not any(v[kinds:])]

    def _improve(self, engines: Sequence[Vector]) -> bool:
        """Look for a better topology of these engines; return whether none is, proven."""
        for _ in range(MOST_ROUNDS):
            if self.prices.late:
                return False
            below = self._target
            total, chosen = self._most_rows(engines, below)
            if total < self.prices.rows:
                if self._raised():
                    continue
                return not self._given_up and self.vectors.complete
            self._try(self._dealt(chosen, below), below)
        return False

    @property
    def _target(self) -> float:
        """Value that a better topology is below: the other half of the gap is the engines' own."""
        value = min(self.value, self._ceiling)
        return value * (1 - self._gap / 2) if math.isfinite(value) else math.inf

    def _raised(self) -> bool:
        """Look for engines of a higher value where none are as good as one pipeline.

        Rows are dealt by what engines can do below a value: an infinite one says nothing of them.
        """
        if self._ceiling >= self.value:
            return False
        self._ceiling *= CEILING_STEP
        if self._ceiling > self._first_ceiling * MOST_ABOVE:
            self._ceiling = math.inf
        self._given_up.clear()
        return True

    def _seed(self) -> None:
        """Begin with equal shares of the devices, where classes can be divided."""
        counts, rows = self.vectors.counts, self.prices.rows
        for engines in equal_shares(counts, rows):
            if self._exactly not in (None, engines):
                continue
            v = self.vectors.alone([count // engines for count in counts])
            self._try([(v, n) for n in dealt_equally(rows, engines)], self._target)
        if self._exactly in (None, sum(counts)):
            self._try_single_devices()

    def _try_groups(self) -> None:
        """Try the engines of the best topology with groups of their devices, and one for all rows.

        Of all engines those that may be quickest first.
        """
        rows, kinds = self.prices.rows, len(self.vectors.counts)
        for v in self.even_groups():
            self.prices.price(v, rows)
            self.offer([(v, rows)])
        if self.best is not None and len(self.best) > 1:
            self._tuned([self._grouped(one) for one in self.best])
        able = [v for v in self.vectors.vectors if any(v[kinds:])]
        floors = {v: self.prices.floor(v, rows) for v in able}
        for v in sorted(able, key=lambda v: floors[v])[:MOST_TRIED]:
            if self._exactly not in (None, 1) or floors[v] >= self._target or self.prices.late:
                return
            self._try([(v, rows)], self._target)

    def _grouped(self, engine: ChosenEngine) -> Vector:
        """Return an engine's devices in the groups that are quickest for its rows, or as it is."""
        used, found, least = self.vectors.used(engine.vector), engine.vector, engine.price.value
        same = [v for v in self.vectors.vectors if self.vectors.used(v) == used]
        floors = {v: self.prices.floor(v, engine.rows) for v in same}
        for v in sorted(same, key=lambda v: floors[v])[:MOST_TRIED]:
            if floors[v] < least and not self.prices.late:
                value = self.prices.price(v, engine.rows, least).value
                found, least = (v, value) if value < least else (found, least)
        return found

    def even_groups(self) -> dict[Vector, Device]:
        """Return the engines of one group of even shares, of the largest groups."""
        even = {v: g for v, g in self.vectors.groups.items() if is_even(self.prices.p, g)}
        most = max((len(group.shares) for group in even.values()), default=0)
        return {v: group for v, group in even.items() if len(group.shares) == most}

    def _try_single_devices(self) -> None:
        """Try every device as an engine, dealing rows anew while that is better."""
        each, before = self.single_devices, math.inf
        while self.value < before and not self.prices.late:
            before, below = self.value, self._target
            if sum(self._able(v, below) for v in each) < self.prices.rows:
                return
            self._try(self._dealt(each, below), below)

    @property
    def single_devices(self) -> list[Vector]:
        """Every device as an engine."""
        counts = self.vectors.counts
        return [
            self.vectors.alone([int(c == own) for c in range(len(counts))])
            for own, count in enumerate(counts)
            for _ in range(count)
        ]

    def one_a_device(self) -> list[Deal]:
        """Return engines of one device each, with the rows that let all end about together."""
        each = self.single_devices
        return self._tuned(each) if self._exactly is None else self._evenly(each)

    def without_sending(
        self, best: SearchedTopology, each: Sequence[Deal]
    ) -> tuple[ChosenEngine, ...]:
        """Return engines of one device `each` that are nearly as good as a best that sends."""
        pipeline = not best.engines and self._known.stages > 1
        sends = pipeline or any(one.sends for one in best.engines)
        if self._exactly is not None or not sends or _slowest(each) > best.value * NEARLY:
            return ()
        return self._named(each)

    def _evenly(self, each: Sequence[Vector]) -> list[Deal]:
        """Return these engines, with the rows that let all end about together, as floors have it.

        Those that have no room for the model, or are too slow for a row, have none; no engines
        where so few rows or engines are left.
        """
        high = 1.0
        able = [self.prices.most(v, math.inf) for v in each]
        if sum(able) < self.prices.rows:
            return []
        while sum(self.prices.most(v, high) for v in each) < self.prices.rows:
            high *= 2
        low = 0.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            enough = sum(self.prices.most(v, middle) for v in each) >= self.prices.rows
            low, high = (low, middle) if enough else (middle, high)
        rows = dealt(self.prices.rows, [self.prices.most(v, high) for v in each])
        engines = [(v, n) for v, n in zip(each, rows, strict=True) if n]
        found = [(v, n, self.prices.price(v, n)) for v, n in engines]
        return found if all(price.solved is not None for _, _, price in found) else []

    def most_of_each(self, below: float) -> tuple[tuple[Vector, int], ...]:
        """Return the rows that each engine without groups may do below a value, as is proven."""
        kinds = len(self.vectors.counts)
        if not self.vectors.complete:
            return ()
        return tuple((v[:kinds], self.prices.most(v, below)) for v in self._plain)

    def _most_rows(
        self, engines: Sequence[Vector], below: float, *, proven: bool = False
    ) -> tuple[float, list[Vector]]:
        rows: dict[Vector, float] = {}
        for v in engines:
            most = self.prices.most(v, below)
            if not proven:
                most = min(most, self._given_up.get(self.vectors.canonical(v), most))
            rows[v] = most
        return self.vectors.most_rows(rows, self._exactly)

    def _able(self, v: Vector, below: float) -> int:
        """Return the most rows that an engine may be tried with."""
        most = self.prices.most(v, below)
        return min(most, self._given_up.get(self.vectors.canonical(v), most))

    def _dealt(self, chosen: Sequence[Vector], below: float) -> list[tuple[Vector, int]]:
        """Deal the job's rows to engines in proportion to the rows each may do."""
        able = [self._able(v, below) for v in chosen]
        # Engines that must all be there have a row each.
        least = [int(self._exactly is not None)] * len(able)
        more = dealt(self.prices.rows - sum(least), [n - 1 if least[0] else n for n in able])
        return [(v, own + n) for v, own, n in zip(chosen, least, more, strict=True)]

    def _try(self, engines: Sequence[tuple[Vector, int]], below: float) -> None:
        """Solve the engines of a topology; keep it if all are below.

        Where so many engines must be there, it is kept if it is better than the best so far.
        """
        found, limit = [], below if self._exactly is None else self.value
        for v, rows in engines:
            if rows == 0:
                continue
            price = self.prices.price(v, rows, below)
            if price.bound < below <= price.value:  # not proven, and not found
                like = self.vectors.canonical(v)
                self._given_up[like] = min(rows - 1, self._given_up.get(like, rows))
            if price.value >= limit:
                return
            found.append((v, rows, price))
        if self._exactly is not None and len(found) != self._exactly:
            return
        if all(price.solved is not None for _, _, price in found):
            self.best = self._named(found)
            self.value = max(price.value for _, _, price in found)

    def _named(self, deals: Sequence[Deal]) -> tuple[ChosenEngine, ...]:
        """Return engines with devices of their own."""
        used, named = [0] * len(self.vectors.counts), []
        for v, rows, price in deals:
            places = self.vectors.places(v, used)
            named.append(ChosenEngine(vector=v, places=places, rows=rows, price=price))
            used = [n + more for n, more in zip(used, self.vectors.used(v), strict=True)]
        return tuple(named)

    def bound(self, engines: Sequence[Vector]) -> float:
        """Return the largest value found below which these cannot do all rows, as is proven."""
        if not self.vectors.complete:
            return min(self.prices.floor_of_all(), self.value)
        low, high = 0.0, self.value
        if not math.isfinite(high):
            return low
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            total, _ = self._most_rows(engines, middle, proven=True)
            if total < self.prices.rows:
                low = middle
            else:
                high = middle
        return low


def _slowest(deals: Sequence[Deal]) -> float:
    return max((price.value for _, _, price in deals), default=math.inf)


def equal_shares(counts: Vector, rows: int) -> list[int]:
    """Return the numbers of engines, more than one, that equal shares of all classes make."""
    most = min(math.gcd(*counts), rows)
    return [n for n in range(2, most + 1) if all(count % n == 0 for count in counts)]


def dealt_equally(rows: int, engines: int) -> list[int]:
    """Return rows of engines of one speed."""
    least, over = divmod(rows, engines)
    return [least + (at < over) for at in range(engines)]


def dealt(rows: int, able: Sequence[int]) -> list[int]:
    """Deal rows in proportion to what each may have, and not more; those left over to the largest.

    The sum of `able` is not below `rows`.
    """
    assert sum(able) >= rows, "there are engines for all rows"
    whole = max(1, sum(able))
    found = [rows * most // whole for most in able]
    left = rows - sum(found)
    order = sorted(range(len(able)), key=lambda at: (found[at] - rows * able[at] / whole, at))
    while left:
        for at in order:
            if left and found[at] < able[at]:
                found[at] += 1
                left -= 1
    return found
