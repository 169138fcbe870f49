"""The best topology of a batch job beside simple ones: single cards, one pipeline, equal shares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import BUDGET_ROUNDING, job_time, value
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stage_memory import weights_of_groups
from llmpq.planner.problem.work_clock import counting
from llmpq.planner.solving.count_vectors import MOST_VECTORS, Place, Vector
from llmpq.planner.solving.device_groups import on_places, with_groups
from llmpq.planner.solving.engine_prices import EnginePrice
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import Solved, best_plan
from llmpq.planner.solving.topology_search import (
    TOPOLOGY_GAP,
    ChosenEngine,
    Deal,
    KnownPipeline,
    TopologySearch,
    dealt_equally,
    equal_shares,
)

SAME = 1e-9
"""Relative difference of the values of one plan on devices that are alike."""
Simple = tuple[str, float, float]
"""Of a simple topology: its devices in words, the job's seconds, and its quality loss."""


@dataclass(frozen=True, kw_only=True)
class FoundEngine:
    """An engine of a topology: its devices, its rows, and the plan of one wave of them."""

    places: tuple[Place, ...]
    rows: int
    waves: int
    solved: Solved


@dataclass(frozen=True, kw_only=True)
class FoundTopology:
    """The best topology that was found."""

    engines: tuple[FoundEngine, ...]
    """None: nothing was found that is better than the known pipeline."""
    value: float
    bound: float
    """No topology has a lower value."""
    seconds: float
    simple: Mapping[str, Simple | None]
    """`card`: the best single device, `node`: an engine a node, where there are several, `each`: an
    engine on every device that has room, `equal`: the best equal shares, `shared`: the best engine
    whose devices all share every layer evenly; None where none fits."""
    groups: int = 0
    """Kinds of groups of devices that were looked at as stages in tensor parallel."""
    groups_measured: int = 0
    """Of these, how many have measured costs."""
    groups_left_out: int = 0
    """Sets of devices that were not."""
    alone: tuple[FoundEngine, ...] = ()
    """Engines of one device each that are nearly as good, where these send between devices."""
    alone_value: float = math.inf
    quicker: float | None = None
    """Share by which the best that sends between devices is quicker than these engines, which do
    not and are taken; None where they are the best by themselves."""
    work_s: float = 0.0
    """Of the search, by the clock that counts it (planner/problem/work_clock.py)."""
    cut: bool = False
    """Whether the time limit ended the search before its work was done."""
    most: tuple[tuple[Vector, int], ...] = ()
    """Rows that each engine of stages of one device may do below the bound, as is proven; none
    where not all engines are listed."""


def best_topology(
    p: Problem,
    options: SolveOptions,
    known: KnownPipeline,
    *,
    exactly: int | None = None,
    gap: float = TOPOLOGY_GAP,
) -> FoundTopology:
    """Return the best topology of a batch job; the plans of its engines are on their devices."""
    with counting(options.ends_at) as clock:
        found = _best_topology(p, options, known, exactly, gap)
    return replace(found, work_s=clock.spent_s, cut=clock.cut)


def _best_topology(
    p: Problem, options: SolveOptions, known: KnownPipeline, exactly: int | None, gap: float
) -> FoundTopology:
    grouped = with_groups(p, options.kvs) if options.groups else None
    among = p if grouped is None else grouped.problem
    search = TopologySearch(among, options, known=known, exactly=exactly, gap=gap)
    # Single devices are quickly priced: they are known where the time ends all else.
    card, each = _best_card(search), search.one_a_device()
    search.offer([(v, rows) for v, rows, _ in each])
    parts, by_node = search.try_parts(), search.vectors.by_node
    equal = _equal(search)
    found = search.run()
    alone = search.without_sending(found, each)

    def own(engines: Sequence[ChosenEngine]) -> tuple[FoundEngine, ...]:
        return tuple(
            FoundEngine(
                places=one.places,
                rows=one.rows,
                waves=one.price.waves,
                solved=_moved(search, one, p),
            )
            for one in engines
        )

    nodes = len(search.vectors.partitions[0]) if by_node else 0
    return FoundTopology(
        engines=own(found.engines),
        alone=own(alone),
        alone_value=max((one.price.value for one in alone), default=math.inf),
        value=found.value,
        bound=found.bound,
        seconds=found.seconds,
        simple={
            "card": card,
            "node": _apart(parts, nodes, "node") if by_node else None,
            "each": _apart(each, sum(search.vectors.counts), "device"),
            "equal": equal,
            "shared": _best_shared(search),
        },
        groups=len(search.vectors.groups),
        groups_measured=sum(map(among.costs.measures, search.vectors.groups.values())),
        groups_left_out=0 if grouped is None else grouped.left_out,
        most=search.most_of_each(found.bound),
    )


def two_fit(p: Problem, options: SolveOptions) -> bool:
    """Whether two disjoint groups of devices may have room for the model's layers, each for all.

    False is proven: no two groups have the memory for the fewest bytes that the allowed choices and
    the quality budget leave, where the layers of a choice may be fractions.
    """
    least = _least_bytes(p, options)
    room = [(cls.count, cls.first.limit_bytes) for cls in p.classes]
    whole = sum(count * limit for count, limit in room)
    if whole < 2 * least or math.prod(count + 1 for count, _ in room) > MOST_VECTORS:
        return whole >= 2 * least
    groups = itertools.product(*(range(count + 1) for count, _ in room))
    each = (sum(n * limit for n, (_, limit) in zip(v, room, strict=True)) for v in groups)
    return any(least <= own <= whole - least for own in each)


def _least_bytes(p: Problem, options: SolveOptions) -> float:
    """Return a lower bound of the weights of all layers, by the Lagrangian of the budget."""
    weights = np.where(p.open, weights_of_groups(p), np.inf)
    if options.budget is None:
        return float(weights.min(axis=1).sum())
    jobs = [p.with_job(kv=kv) for kv in options.kvs or (p.kv,)]
    p = min(jobs, key=lambda job: float(job.omega.sum()))
    omega, budget = p.omega, options.budget * (1 + BUDGET_ROUNDING)
    with np.errstate(divide="ignore", invalid="ignore"):
        saved = weights[:, :, None] - weights[:, None]
        slopes = saved / (omega[:, None] - omega[:, :, None])
    prices = np.unique(slopes[np.isfinite(slopes) & (slopes > 0)])
    bounds = [
        (weights + price * omega).min(axis=1).sum() - price * budget for price in (0.0, *prices)
    ]
    return float(max(bounds))


def _time_s(price: EnginePrice) -> float:
    """Return the seconds of an engine's rows."""
    assert price.solved is not None
    solved = price.solved
    return price.waves * job_time(solved.problem, solved.outcome.assignment).total_s


def _best_card(search: TopologySearch) -> Simple | None:
    """Return what the best single device would take for the whole job."""
    found, classes = list[tuple[float, Simple]](), search.prices.p.classes
    for at, cls in enumerate(classes):
        if search.vectors.is_group[at]:
            continue
        v: Vector = tuple(int(c == at) for c in range(len(classes)))
        price = search.prices.price(v, search.prices.rows)
        if price.solved is not None:
            found.append((price.value, (cls.first.name, _time_s(price), price.omega)))
    return min(found)[1] if found else None


def _best_shared(search: TopologySearch) -> Simple | None:
    """Return what the best group of even shares would take for the whole job, as one stage.

    Of the largest groups.
    """
    found = list[tuple[float, Simple]]()
    for v, group in search.even_groups().items():
        price = search.prices.price(v, search.prices.rows)
        if price.solved is not None:
            found.append((price.value, (group.kind, _time_s(price), price.omega)))
    return min(found)[1] if found else None


def _apart(deals: Sequence[Deal], of: int, what: str) -> Simple | None:
    """Return what an engine on every device, or node, takes; None where none fits."""
    if not deals:
        return None
    left_out = of - len(deals)
    words = f"{len(deals)} engine{'s' * (len(deals) > 1)}"
    words += f", {left_out} {what}{'s' * (left_out > 1)} left out" if left_out else ""
    times = [_time_s(price) for _, _, price in deals]
    return words, max(times), max(price.omega for _, _, price in deals)


def _equal(search: TopologySearch) -> Simple | None:
    """Return what the best equal shares of all devices would take, each for its rows."""
    counts, rows = search.vectors.counts, search.prices.rows
    found = list[tuple[float, Simple]]()
    for engines in equal_shares(counts, rows):
        v = search.vectors.alone([count // engines for count in counts])
        most = dealt_equally(rows, engines)[0]
        price = search.prices.price(v, most)
        if price.solved is not None:
            each = _in_words(search, v)
            simple = f"{engines} engines of {each}", _time_s(price), price.omega
            found.append((price.value, simple))
    return min(found)[1] if found else None


def _in_words(search: TopologySearch, v: Vector) -> str:
    """Return how many devices of each kind an engine has."""
    kinds: dict[str, int] = {}
    for cls, count in zip(search.prices.p.classes, v, strict=True):
        if not count:
            continue
        kinds[cls.first.kind] = kinds.get(cls.first.kind, 0) + count
    return " + ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items())


def _moved(search: TopologySearch, engine: ChosenEngine, p: Problem) -> Solved:
    """Return an engine's plan on its own devices: it was solved for devices that are alike."""
    found = engine.price.solved
    assert found is not None
    rows = found.problem.workload.batch
    own = on_places(search.prices.p.with_changes(cluster=p.cluster), engine.places, ())
    own = own.with_job(batch=rows)
    own = own.with_changes(
        workload=found.problem.workload,
        chunk=found.problem.chunk,
        theta=found.problem.theta,
        quantization=found.problem.quantization,
        costs=found.problem.costs,
    )
    numbers = _numbers_of(found.problem, own)
    if numbers is not None:
        stages = tuple(replace(s, cls=numbers[s.cls]) for s in found.outcome.assignment.stages)
        a = replace(found.outcome.assignment, stages=stages)
        before, after = value(found.problem, found.outcome.assignment), value(own, a)
        if fits(own, a) and math.isclose(before, after, rel_tol=SAME):
            return Solved(problem=own, outcome=replace(found.outcome, assignment=a))
    return best_plan(own, replace(search.prices.options, kvs=(own.kv,)))


def _numbers_of(before: Problem, after: Problem) -> dict[int, int] | None:
    """Return the class of one problem for each of another's: the next of the same devices."""
    left = [(cls.first.profile_kind, cls.first.limit_bytes, cls.count) for cls in after.classes]
    found: dict[int, int] = {}
    for number, cls in enumerate(before.classes):
        key = (cls.first.profile_kind, cls.first.limit_bytes, cls.count)
        at = next((k for k, own in enumerate(left) if own == key and k not in found.values()), None)
        if at is None:
            return None
        found[number] = at
    return found
