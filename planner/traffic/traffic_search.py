"""The best plan for live traffic: engines valued by their steady state, then by the simulator.

The simplest ways (a card, one pipeline, also with layers in proportion to cards' rates, even tensor
parallel, equal replicas) are planned and simulated first: the best of them is what all others must
beat. In the time that is left every group of devices is planned for several numbers of requests at
once; rates of disjoint groups are summed by a dynamic program over counts of devices, and those of
the best sums are simulated, in steps of several numbers of tokens. Single engines' rates say which
engines are worth a simulation together; that simulation, of all engines of a way under all requests
of the traffic, decides, and its rates are those that are shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Literal

from llmpq.errors import DoesNotFitError
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import Timer, counting, now_s
from llmpq.planner.solving.count_vectors import CountVectors, Vector
from llmpq.planner.solving.device_groups import is_even, with_groups
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.topology_search import equal_shares
from llmpq.planner.traffic.choose import best_variant, is_far_below
from llmpq.planner.traffic.engine_plans import EnginePlan, EnginePlanner
from llmpq.planner.traffic.named_traffic import NamedTraffic
from llmpq.planner.traffic.plans_ahead import PlansAhead
from llmpq.planner.traffic.rate_grid import RATE_STEP, BestOf, rate_number
from llmpq.planner.traffic.rates import (
    GENERATIONS,
    EngineRates,
    RateFound,
    highest_rate,
    measured_at,
    requests_at_once,
)
from llmpq.planner.traffic.steady_state import MeanLengths
from llmpq.plans.plan import Plan, TrafficForm
from llmpq.plans.topology import EngineShare, Topology, TopologyPredicted
from llmpq.service_measures import ATTAINMENT, Quantiles, ServiceMeasures
from llmpq.sizes.kv_format import BLOCK_TOKENS

TrafficObjective = Literal["throughput", "rate", "latency"]
REQUESTS_AT_ONCE = (64, 16, 256, 4, 1)
STEP_TOKENS = (512, 256, 1024, 2048, 128)
"""Tried in this order while time is left."""
DEARER, MOST_BOUGHT = (3.0, 10.0, 30.0, 100.0, 1000.0), 3
"""Times what quality is worth by the preference, tried in this order where a rate is kept; and the
topologies of which they are tried."""
OF_A_RATE = 200
"""Requests by which it is found which engines are worth a simulation under all."""
HOPE = 1.25
"""Times the largest share of a steady rate that is kept by simulation, that others may keep."""
MOST_JOINED = 8
"""Engines of several devices or groups that are planned, of each number of requests at once."""
STEPS_HOPE = 3.0
"""Times a rate that other steps may give. Seen: up to 2.5, where hardly a request is in time."""
SOLVING_SHARE = 0.3
"""Share of the time left that plans are looked for; then they are simulated."""
SIMPLE_SHARE = 0.8
"""Share of the time left that the simulation of one simple way may take."""
WORK_SHARE = 0.75
"""Seconds of work in a second of the user's limit: some machines take longer for the same work."""


@dataclass(frozen=True, kw_only=True)
class Valued:
    """Engines, and how they serve the traffic."""

    name: str
    engines: tuple[EnginePlan, ...]
    rate: RateFound
    """The highest rate within the limits (or without any, all at once)."""
    at_own_rate: ServiceMeasures | None = None
    """How it serves the traffic at its own rate, where that is not to be found."""

    @property
    def served(self) -> ServiceMeasures:
        """At the traffic's own rate, or where that is to be found at the highest."""
        return self.at_own_rate or self.rate.measures

    def worth(
        self, objective: TrafficObjective, price: float, enough: float = math.inf
    ) -> tuple[bool, float]:
        """Return what is to be largest: a logarithm, less what the loss counts for.

        `price`: of a unit of loss; `enough`: the rate at which it was served, which once it is kept
        is worth no more than answers that end soon.
        """
        near = self.rate.rate_per_s >= (1 - RATE_STEP) * enough
        kept = self.rate.rate_per_s >= enough or (
            math.isfinite(enough) and near and self.served.attained >= ATTAINMENT
        )
        gives = self.rate.rate_per_s
        if objective == "latency" or kept:
            gives = 1 / max(self.served.latency_s.mean, 1e-12)
        elif objective == "throughput":
            gives = self.rate.measures.output_tokens_per_s
        return kept, math.log(max(gives, 1e-12)) - price * self.loss

    @property
    def loss(self) -> float:
        """The largest quality loss of its engines."""
        return max(one.loss for one in self.engines)


@dataclass(frozen=True, kw_only=True)
class TrafficAnswer:
    """The best plan for a traffic, and the simple ways beside it."""

    best: Valued
    quickest: Valued
    """The one of the highest rate of those compared."""
    plan: Plan | Topology
    beside: Mapping[str, Valued | None]
    """`card`, `pipeline`, `shared`, `replicas`, as far as they fit and keep the limits in a steady
    state; None of those for whose simulation the time was too short."""
    tried: int
    """Engines that were planned."""
    left_out: int
    """Engines of several devices that were not, for they promise less."""
    complete: bool
    """Whether all engines were planned, and all that were to be simulated, within the time."""
    simulated: bool
    """Whether the rate of the best is that of a simulation; else the time ended before one was
    found, and it is that of a steady state."""
    seconds: float


@dataclass
class _Search:
    planner: EnginePlanner
    vectors: CountVectors
    end_s: float
    """When all is over, of the clock of searches."""
    traffic: NamedTraffic
    objective: TrafficObjective
    exactly: int | None = None
    """How many engines; None: any number."""
    known: dict[tuple[Vector, int, int], EnginePlan | None] = field(default_factory=dict)
    rates: dict[tuple[object, ...], RateFound] = field(default_factory=dict)
    filled: list[EnginePlan] = field(default_factory=list)
    """Pipelines with layers in proportion to cards' rates, in steps of several tokens."""
    simulated: dict[tuple[object, ...], EngineRates] = field(default_factory=dict)
    """What is known of the rates of engines that were simulated."""
    alone: dict[Vector, EnginePlan] = field(default_factory=dict)
    """Engines as they serve best by themselves, of those that were simulated so."""
    in_best_steps: set[Vector] = field(default_factory=set)
    """Of these, those that were simulated in other steps, too."""
    kept: float | None = None
    """The largest share of a steady rate that an engine keeps by simulation: a guess for others."""
    late: bool = False
    """Whether the time was too short for a simulation."""
    deadline_s: float = math.inf
    """When what is done now is to end, of the clock of searches."""

    def allow(self, share: float) -> None:
        """Give what is done next a share of the time left."""
        self.deadline_s = now_s() + share * max(0.0, self.end_s - now_s())

    def left_s(self) -> float:
        return self.deadline_s - now_s()

    @property
    def planned_enough(self) -> bool:
        """Whether no more engines are planned, for the time that this takes."""
        return self.left_s() < 0

    def engine(self, v: Vector, requests: int, step_tokens: int) -> EnginePlan | None:
        """Return the plan of an engine of alike devices, solved once."""
        key = self.vectors.canonical(v), requests, step_tokens
        if key not in self.known:
            places = self.vectors.places(key[0], [0] * len(self.vectors.counts))
            self.known[key] = self.planner.plan(
                places, requests, step_tokens, solved_for=STEP_TOKENS[0]
            )
        return self.known[key]

    def plans_of(
        self, v: Vector, *, step_tokens: int | None = None, at_once: int | None = None
    ) -> list[EnginePlan]:
        """Return the plans that are known of an engine.

        Those of steps of so many tokens, for so many requests at once, where these are given.
        """
        like = self.vectors.canonical(v)
        return [
            one
            for (own, requests, tokens), one in self.known.items()
            if own == like
            and one is not None
            and step_tokens in (None, tokens)
            and at_once in (None, requests)
        ]

    def best_of(
        self, v: Vector, *, step_tokens: int | None = None, at_once: int | None = None
    ) -> EnginePlan | None:
        """Return the best of the plans that are known of an engine."""
        found = self.plans_of(v, step_tokens=step_tokens, at_once=at_once)
        return max(found, key=self.planner.worth, default=None)

    def in_steps(self, v: Vector, step_tokens: int) -> EnginePlan | None:
        """Return the best plan of an engine in steps of so many tokens, by its steady state.

        Of those for any number of requests at once that were planned.
        """
        like = self.vectors.canonical(v)
        planned = [key[1] for key, one in self.known.items() if key[0] == like and one is not None]
        for requests in dict.fromkeys(planned):
            self.engine(v, requests, step_tokens)
        return self.best_of(v, step_tokens=step_tokens)

    def is_asked(self, one: Valued | None) -> bool:
        """Whether a way to serve was simulated and is of as many engines as are asked for."""
        return one is not None and self.exactly in (None, len(one.engines))

    @property
    def enough(self) -> float:
        """The traffic's own rate, where a higher one is worth less than quality and quick answers.

        None is where speed is preferred, or where no preference says what quality is worth.
        """
        rate, prefer = self.traffic.rate_per_s, self.planner.options.prefer
        own = self.objective == "rate" and prefer in ("balanced", "quality")
        return math.inf if rate is None or not own else rate

    def worth(self, one: Valued) -> tuple[bool, float]:
        """Return what is to be largest."""
        return one.worth(self.objective, self.planner.price, self.enough)

    def few(self, engine: EnginePlan) -> int:
        """Return how many requests the rate of an engine by itself is of, at most.

        The same for all engines, but those that have very many at once: the longest prompts, which
        decide what is in time, are not among the first few.
        """
        at_once = requests_at_once([engine.model], self.traffic.arrivals)
        return max(OF_A_RATE, GENERATIONS * at_once)

    def rate(self, engine: EnginePlan, above_per_s: float = 0.0) -> RateFound | None:
        """Return the highest rate of an engine by itself, found once of those that are alike.

        None where it is not above `above_per_s`. `TimeoutError` where the time is over before one
        is found.
        """
        key, limits = alike(engine), self.traffic.limits
        if key not in self.rates:
            if limits.ttft_s is None and limits.tpot_s is None:
                few = self.traffic.arrivals[: self.few(engine)]
                found = highest_rate([engine.model], few, limits, deadline_s=self.deadline_s)
            else:
                found = self.rates_of(engine).above(above_per_s)
            if above_per_s and not found.rate_per_s:
                return None
            self.note_rate(engine, found)
        return self.rates[key]

    def together(self, engines: Sequence[EnginePlan]) -> RateFound:
        """Return the highest rate of engines together, under all requests.

        `TimeoutError` where the time is over before one is found.
        """
        by_themselves = [one for engine in engines if (one := self.rate(engine)) is not None]
        every, limits = self.traffic.arrivals, self.traffic.limits
        if len(engines) == 1 and len(every) <= self.few(engines[0]):
            return by_themselves[0]
        key = tuple(sorted(map(str, map(alike, engines))))
        if key not in self.rates:
            total = sum(one.rate_per_s for one in by_themselves)
            steady = sum(one.steady.rate_per_s for one in engines)
            self.rates[key] = highest_rate(
                [one.model for one in engines],
                every,
                limits,
                guess_per_s=total or steady,
                deadline_s=self.deadline_s,
            )
        return self.rates[key]

    def rates_of(self, engine: EnginePlan) -> EngineRates:
        """Return what is known of an engine's rates, to be simulated until the deadline."""
        key = alike(engine)
        if key not in self.simulated:
            self.simulated[key] = EngineRates(
                [engine.model],
                self.traffic.arrivals[: self.few(engine)],
                self.traffic.limits,
                guess_per_s=self.guess(engine),
            )
        self.simulated[key].deadline_s = self.deadline_s
        return self.simulated[key]

    def guess(self, engine: EnginePlan) -> float:
        """Return what the rate of an engine may be, by its steady state."""
        return engine.steady.rate_per_s * (self.kept or 1.0)

    def note_rate(self, engine: EnginePlan, found: RateFound) -> None:
        """Note the highest rate of an engine by itself."""
        self.rates[alike(engine)] = found
        kept = found.rate_per_s / engine.steady.rate_per_s
        self.kept = max(kept, self.kept or 0.0) or None

    def own(self, v: Vector, used: list[int], like: EnginePlan) -> EnginePlan | None:
        """Return the plan of an engine on the next devices that are not used."""
        places = self.vectors.places(v, used)
        if set(like.places) <= set(places):
            return like
        batch, step = like.plan.workload.batch, like.step_tokens
        return self.planner.plan(places, batch, step, solved_for=STEP_TOKENS[0])

    def engines(
        self, chosen: Sequence[Vector], *, at_once: int | None = None
    ) -> tuple[EnginePlan, ...] | None:
        """Return plans of disjoint engines; None where one has none.

        Of each the one that serves best by itself, or where that is not known by its steady state.
        """
        used, found = [0] * len(self.vectors.counts), []
        for v in chosen:
            alone = None if at_once else self.alone.get(self.vectors.canonical(v))
            like = alone or self.best_of(v, at_once=at_once)
            one = None if like is None else self.own(v, used, like)
            if one is None:
                return None
            found.append(one)
            used = [n + more for n, more in zip(used, self.vectors.used(v), strict=True)]
        return tuple(found)


def alike(engine: EnginePlan) -> tuple[object, ...]:
    """Return what an engine's times and room follow from: of equal ones, one is simulated."""
    plan, nodes = engine.plan, list(dict.fromkeys(stage.node for stage in engine.plan.stages))
    stages = [
        (one.profile_kind, one.layers, one.precisions, one.shares, nodes.index(one.node))
        for one in plan.stages
    ]
    links = plan.inputs.links if plan.inputs is not None else ()
    return (
        *(str(one) for one in stages),
        *((one.delay_s, one.handshake_s, one.per_byte_s) for one in links),
        plan.workload.batch,
        plan.workload.kv,
        plan.decode_microbatch,
        engine.model.limits.num_blocks,
        engine.step_tokens,
    )


def search_traffic(
    problem: Problem,
    options: SolveOptions,
    path: str | None,
    traffic: NamedTraffic,
    objective: TrafficObjective,
    *,
    exactly: int | None = None,
) -> TrafficAnswer:
    """Return the best plan for a traffic; `DoesNotFitError` where no engine fits or is in time.

    `ValueError` where more engines are asked for than there are devices.

    `exactly`: of so many engines; the simple ways beside it have as many as they have. The limit is
    of work; where the machine is so slow that the user's limit is over before, it is
    of CPU time, not of the time of day: the same command has the same answer beside another load.
    """
    devices = len(problem.cluster.devices)
    if exactly is not None and exactly > devices:
        raise ValueError(f"--engines {exactly} needs as many devices, got {devices}; ask for fewer")
    with counting(time.thread_time() + options.asked_s, time.thread_time), PlansAhead() as ahead:
        options = replace(options, ends_at=math.inf)
        return _searched(problem, options, path, traffic, objective, exactly, ahead)


def _searched(
    problem: Problem,
    options: SolveOptions,
    path: str | None,
    traffic: NamedTraffic,
    objective: TrafficObjective,
    exactly: int | None,
    ahead: PlansAhead,
) -> TrafficAnswer:
    timer = Timer()
    lengths = MeanLengths.of(traffic)
    grouped = with_groups(problem, options.kvs) if options.groups else None
    search = _Search(
        planner=EnginePlanner(
            problem,
            options,
            path,
            lengths,
            traffic.limits,
            ends_soon=objective == "latency",
            ahead=ahead,
        ),
        vectors=CountVectors(problem if grouped is None else grouped.problem),
        end_s=now_s() + WORK_SHARE * options.asked_s,
        traffic=traffic,
        objective=objective,
        exactly=exactly,
    )
    search.allow(SOLVING_SHARE)
    ahead.begin(partial(_plan_simple_from_behind, search))
    in_time = _plan_simple(search)
    ahead.begin(partial(_plan_all_at_once, search))
    simple = _simple(search)
    found = _all_valued(search, simple)
    search.allow(SOLVING_SHARE)
    complete, left_out = _plan_all(search)
    ahead.end()
    chosen = _chosen(search)
    if not (chosen or any(map(search.is_asked, found.values()))):
        raise DoesNotFitError(_nothing(traffic, complete, exactly))
    kept = any(search.is_asked(one) and search.worth(one)[0] for one in found.values() if one)
    if chosen and objective == "rate" and not kept:
        search.allow(SIMPLE_SHARE)
        found |= _all_valued(search, {"best": _best_sum(search) or chosen})
    elif chosen:
        names = {f"few {n}": few for n, few in _others(search, chosen).items()}
        found |= _all_valued(search, {"best": chosen, **names})
    search.deadline_s = search.end_s
    valued = [one for one in found.values() if one is not None and search.is_asked(one)]
    simulated = bool(valued)
    valued = valued or [_unsimulated(search, chosen)]
    best = quickest = _best(search, valued)
    if math.isfinite(search.enough):
        quickest = max(valued, key=lambda one: one.rate.rate_per_s)
        best_ways = sorted(valued, key=search.worth, reverse=True)[:MOST_BOUGHT]
        bought = [new for one in best_ways for new in _bought_back(search, one)]
        best = _best(search, [best, *bought])
    if traffic.rate_per_s is not None and best.at_own_rate is None:
        models = [one.model for one in best.engines]
        own = measured_at(models, traffic.arrivals, traffic.limits)
        best = replace(best, at_own_rate=own)
    return TrafficAnswer(
        best=best,
        quickest=quickest,
        plan=_plan_file(best, traffic, objective, simulated=simulated),
        beside={
            name: best if not simulated and v == chosen else found[name]
            for name, v in simple.items()
        },
        tried=len(search.known),
        left_out=left_out,
        complete=complete and in_time and not search.late,
        simulated=simulated,
        seconds=timer.seconds,
    )


def _all_valued(search: _Search, ways: Mapping[str, Sequence[Vector]]) -> dict[str, Valued | None]:
    """Simulate ways to serve, each for half of the time left; None of those it is too short for."""
    found: dict[str, Valued | None] = {}
    for name, vectors in ways.items():
        search.allow(0.5)
        try:
            found[name] = _valued(search, name, vectors)
        except TimeoutError:
            found[name], search.late = None, True
    return found


def _valued(search: _Search, name: str, vectors: Sequence[Vector]) -> Valued | None:
    """Simulate a way to serve; `TimeoutError` where the time is over before."""
    one: Valued | None = None
    if all(map(search.best_of, vectors)):
        if search.objective == "rate":
            one = _most_together(search, name, vectors)
        else:
            engines = search.engines(vectors)
            one = None if engines is None else _simulated(search, name, engines)
        if one is not None:
            one = _for_best_requests(search, one, vectors)
    return _or_filled(search, name, one) if name == "pipeline" else one


def _most_together(search: _Search, name: str, vectors: Sequence[Vector]) -> Valued | None:
    """Simulate engines together, and without the slowest ones where the rest may do better.

    An engine that hardly keeps the limits has requests that others would serve in time.
    """
    rates = {v: _by_itself(search, v) for v in vectors}
    all_ = name == "best" and search.exactly is not None
    left = list(vectors) if all_ else [v for v in vectors if rates[v] > 0] or list(vectors)
    best: Valued | None = None
    while left and (best is None or sum(rates[v] for v in left) > best.rate.rate_per_s):
        engines = search.engines(left)
        try:
            one = None if engines is None else _simulated(search, name, engines)
        except TimeoutError:
            if best is None:
                raise
            search.late = True
            break
        best = best if one is None else one if best is None else _best(search, [best, one])
        slowest = min(rates[v] for v in left)
        left = [] if all_ else [v for v in left if rates[v] > slowest]
    return best


def _or_filled(search: _Search, name: str, one: Valued | None) -> Valued | None:
    """Return a pipeline, or one with layers in proportion to cards' rates, whichever is better."""

    def simulated(engine: EnginePlan, best: Valued | None) -> Valued | None:
        if search.left_s() < 0:
            return None
        if best is not None and search.objective == "rate" and not search.worth(best)[0]:
            dearer = math.exp(search.planner.price * (engine.loss - best.loss))
            if search.rate(engine, best.rate.rate_per_s * dearer) is None:
                return None
        return _simulated(search, name, (engine,))

    worth = lambda one: (False, -math.inf) if one is None else search.worth(one)  # noqa: E731
    return best_variant(one, search.filled, simulated, worth)


def _best(search: _Search, valued: Sequence[Valued]) -> Valued:
    """Return what serves best; of equal ones that of the fewest engines."""
    return max(valued, key=lambda one: (search.worth(one), -len(one.engines)))


def _by_itself(search: _Search, v: Vector, above_per_s: float = 0.0) -> float:
    """Return the highest rate of an engine by itself, and note its plan; 0 where it is not above.

    The plan has the steps that are best by its steady state, or where these are not above, others
    that are, if the steady state says little of the rate: it is of mean lengths, and where limits
    are narrow for the longest prompts, it is far above the rate that is kept.
    """
    like = search.vectors.canonical(v)
    if like not in search.alone:
        first = search.best_of(v)
        assert first is not None, "it was planned"
        tried = [first]
        if above_per_s and is_far_below(above_per_s, first.steady.rate_per_s):
            others = (search.in_steps(v, size) for size in STEP_TOKENS)
            tried += _at_once(search, v, first)
            tried += [one for one in others if one is not None]
        found = next((one for one in tried if search.rate(one, above_per_s) is not None), None)
        if found is None:
            return 0.0
        search.alone[like] = found
    known = search.rate(search.alone[like])
    assert known is not None, "it is above nothing"
    return known.rate_per_s


def _in_best_steps(search: _Search, v: Vector, above_per_s: float = 0.0) -> float:
    """Return the highest rate of an engine by itself in any steps, and note its plan in the best.

    0 where it is not above a rate. Where a steady state says little of the rate, engines for other
    numbers of requests at once are tried, too.
    """
    like = search.vectors.canonical(v)
    if like not in search.in_best_steps:
        tried = _in_all_steps(search, v)
        if above_per_s and is_far_below(above_per_s, tried[0].steady.rate_per_s):
            tried += _at_once(search, v, tried[0])
        best = _best_beside(search, tried, above_per_s)
        if best is None:
            return 0.0
        rate = search.rates[alike(best)].rate_per_s
        if is_far_below(rate, best.steady.rate_per_s) and search.left_s() >= 0:
            best = _best_beside(search, [best, *_at_once(search, v, best)]) or best
        search.alone[like] = best
        search.in_best_steps.add(like)
    return _by_itself(search, v)


def _best_beside(
    search: _Search, tried: Sequence[EnginePlan], above_per_s: float = 0.0
) -> EnginePlan | None:
    """Return the best of plans of an engine by their rates, which are tried beside each other.

    None where no rate is above one, or none lasts.
    """
    limits = search.traffic.limits
    if limits.ttft_s is None and limits.tpot_s is None:
        return max(tried, key=partial(_worth_alone, search))
    price = search.planner.price / -math.log(1 - RATE_STEP)
    offsets = [math.ceil(price * (one.loss - tried[0].loss) - 1e-9) for one in tried]
    beside = BestOf([search.rates_of(one) for one in tried], offsets)
    beside.find(
        rate_number(search.guess(tried[0])), rate_number(above_per_s) if above_per_s else None
    )
    if beside.winner is None:
        return None
    best = tried[beside.winner]
    search.note_rate(best, search.rates_of(best).found(cut=beside.cut))
    return best


def _worth_alone(search: _Search, engine: EnginePlan) -> float:
    found = search.rate(engine)
    assert found is not None, "it is above nothing"
    return math.log(max(found.rate_per_s, 1e-12)) - search.planner.price * engine.loss


def _in_all_steps(search: _Search, v: Vector) -> list[EnginePlan]:
    """Return the plans of an engine in steps of all sizes, no two alike; first the best so far.

    Of all that there is time for.
    """
    first = search.alone.get(search.vectors.canonical(v)) or search.best_of(v)
    others = (search.in_steps(v, size) for size in STEP_TOKENS if search.left_s() >= 0)
    return list({alike(one): one for one in (first, *others) if one is not None}.values())


def _at_once(search: _Search, v: Vector, like: EnginePlan) -> list[EnginePlan]:
    """Return an engine in the steps of another for other requests at once, of about its rate.

    By their steady states: fewer at once may be in time where prompts come together.
    """
    tokens, least = like.step_tokens, like.steady.rate_per_s
    found = (search.engine(v, number, tokens) for number in REQUESTS_AT_ONCE)
    able = [one for one in found if one and not is_far_below(one.steady.rate_per_s, least)]
    return [one for one in able if alike(one) != alike(like)]


def _best_sum(search: _Search) -> list[Vector]:
    """Return the disjoint engines of the highest sum of rates, each by itself.

    A rate is that of its simulation, or until it had one what its steady state lets hope for: as
    large a share of it as any engine has by simulation, and HOPE times that. Where it is far from
    its steady state in the steps that are best by that, others may give STEPS_HOPE times as much.
    The engines of the best sum are simulated until all of them are, each as far as it takes to say
    whether the sum is the best.
    """
    planned = {v: one for v in search.vectors.vectors if (one := search.best_of(v)) is not None}
    likes = {v: search.vectors.canonical(v) for v in planned}
    ceilings: dict[Vector, float] = {}
    while True:
        known = {v: _by_itself(search, v) for v, like in likes.items() if like in search.alone}
        steady = {v: planned[v].steady.rate_per_s for v in planned}
        hope = HOPE * max((rate / steady[v] for v, rate in known.items()), default=1.0)
        least, best = search.vectors.most_rows(known, search.exactly)
        open_ = {
            v: max(HOPE * rate, min(steady[v], STEPS_HOPE * rate))
            for v, rate in known.items()
            if is_far_below(rate, steady[v]) or is_far_below(steady[v], rate)
            if likes[v] not in search.in_best_steps
        }
        rates = {
            v: min(steady[v] * (hope or 1.0), ceilings.get(like, math.inf))
            for v, like in likes.items()
        }
        rates |= known | open_
        most, chosen = search.vectors.most_rows(rates, search.exactly)
        new = [v for v in chosen if v in open_ or v not in known]
        if not new or most <= (1 + RATE_STEP / 2) * least or search.left_s() < 0:
            return best
        v = max(new, key=lambda one: rates[one])
        number = sum(likes[one] == likes[v] for one in chosen)
        try:
            if v in known:
                _in_best_steps(search, v)
            else:
                ceilings[likes[v]] = max(0.0, rates[v] - (most - least) / number)
                _by_itself(search, v, ceilings[likes[v]])
        except TimeoutError:
            search.late = True
            return best


def _for_best_requests(search: _Search, one: Valued, vectors: Sequence[Vector]) -> Valued:
    """Return engines planned for the requests at once with which answers end soonest.

    Where that counts: the highest rate is of many at once, and bits that are quickest for these are
    not for a few.
    """
    if search.objective != "latency" and not search.worth(one)[0]:
        return one

    def simulated(requests: int, _: Valued) -> Valued | None:
        engines = search.engines(vectors, at_once=requests)
        if engines in (None, one.engines) or search.left_s() < 0:
            return None
        return _simulated(search, one.name, engines)

    return best_variant(one, REQUESTS_AT_ONCE, simulated, search.worth)


def _unsimulated(search: _Search, chosen: Sequence[Vector]) -> Valued:
    """Return the best engines by their steady state; how requests are served at that rate."""
    engines = search.engines(chosen)
    assert engines is not None, "they were planned"
    rate, every = sum(one.steady.rate_per_s for one in engines), search.traffic.arrivals
    served = measured_at([one.model for one in engines], every, search.traffic.limits, rate)
    return Valued(
        name="best", engines=engines, rate=RateFound(rate_per_s=rate, measure=lambda: served)
    )


def _plan_all(search: _Search) -> tuple[bool, int]:
    """Plan engines for several numbers of requests at once, then take them in other steps.

    Return whether the time was enough, and how many engines of several devices or groups were left
    out, for those that promise more.
    """
    vectors = search.vectors
    first = [vectors.whole, *_cards(search), *chain(*vectors.partitions)]
    first += [v for v in vectors.vectors if sum(v) == 1]
    first = list(dict.fromkeys(map(vectors.canonical, first)))
    rest = {vectors.canonical(v) for v in vectors.vectors} - {*first}
    joined: dict[Vector, None] = {}
    for requests in REQUESTS_AT_ONCE:
        for own in (first, None):
            for v in own or _promising(search, rest, requests):
                if search.planned_enough and search.known:
                    return False, 0
                if not _is_known_worse(search, v, requests):
                    search.engine(v, requests, STEP_TOKENS[0])
                if own is None:
                    joined[v] = None
    for step_tokens in STEP_TOKENS[1:]:
        for v in (*first, *joined):
            if search.planned_enough:
                return False, 0
            best = search.best_of(v)
            requests = REQUESTS_AT_ONCE[0] if best is None else best.plan.workload.batch
            search.engine(v, requests, step_tokens)
    beaten = sum(_is_beaten(search, v) for v in rest if v not in joined)
    return vectors.complete, len(rest) - len(joined) - beaten


def _promising(search: _Search, rest: Collection[Vector], requests: int) -> list[Vector]:
    """Return the engines of several devices or groups that promise most, by the rates of these.

    A part that is no engine by itself, for want of room, counts as the others of its memory rate.
    """
    vectors = search.vectors
    able = [
        v for v in rest if not _is_beaten(search, v) and not _is_known_worse(search, v, requests)
    ]
    parts = {part for v in able for part in vectors.parts(v)}
    known = {part: one.steady.rate_per_s for part in parts if (one := search.best_of(part))}
    per_gbps = max((rate / vectors.mem_gbps(v) for v, rate in known.items()), default=1.0)

    def promise(v: Vector) -> float:
        own = [(part, v[part.index(1)]) for part in vectors.parts(v)]
        return sum(n * known.get(one, per_gbps * vectors.mem_gbps(one)) for one, n in own)

    return sorted(able, key=lambda v: (-promise(v), v))[:MOST_JOINED]


def _is_beaten(search: _Search, v: Vector) -> bool:
    """Whether an engine of several devices or groups need not be planned, by those of one each.

    That is where a group's devices do better by themselves in other shares, or where each of its
    parts, as an engine, has room for more requests than the limits allow: joined, they have more
    room, of no use, and wait for each other. Not said of all devices, of a node's, and of all of a
    class: prompts that are cut go through several stages at once.
    """
    vectors, kinds = search.vectors, range(len(search.vectors.counts))
    parts = vectors.parts(v)
    if sum(v) == 1 or v == vectors.whole or any(v in parting for parting in vectors.partitions):
        return False
    best = {part: search.best_of(part) for part in parts}
    for part, own in best.items():
        if part in vectors.groups:
            others = (search.best_of(other) for other in vectors.same_devices(part))
            least = 0.0 if own is None else own.steady.rate_per_s
            if any(one is not None and one.steady.rate_per_s > least for one in others):
                return True
    if any(v == vectors.alone([n * (c == k) for c, n in enumerate(vectors.counts)]) for k in kinds):
        return False
    return all(one is not None and _has_room(search, one) for one in best.values())


def _has_room(search: _Search, engine: EnginePlan) -> bool:
    """Whether an engine has room for more requests than it has at once by the limits."""
    limits, lengths, running = engine.model.limits, search.planner.lengths, engine.steady.running
    tokens = 1.25 * running * (lengths.prompt + lengths.output / 2)
    return running < limits.max_rows and tokens < limits.num_blocks * BLOCK_TOKENS


def _is_known_worse(search: _Search, v: Vector, requests: int) -> bool:
    """Whether an engine for so many requests at once need not be planned, by those that are.

    That is where one for fewer has not all of them at once in its steady state, for want of room or
    by the limits: more requests have less room; or where one for more has as many or more at once,
    and loses no quality for it. Where answers are to end soon, few requests may be served quicker.
    """
    if search.objective == "latency" or math.isfinite(search.enough):
        return False
    key = search.vectors.canonical(v)
    for other in REQUESTS_AT_ONCE:
        if (key, other, STEP_TOKENS[0]) not in search.known:
            continue
        engine = search.known[key, other, STEP_TOKENS[0]]
        running = 0 if engine is None else engine.steady.running
        if other < requests and running < other:
            return True
        loss = 0.0 if engine is None else engine.loss * search.planner.price
        if other > requests and running >= requests and loss < RATE_STEP:
            return True
    return False


def _cards(search: _Search) -> list[Vector]:
    """Return the engines of a device each, one of every class."""
    kinds = range(len(search.vectors.counts))
    return [search.vectors.alone([int(c == own) for c in kinds]) for own in kinds]


def _chosen(search: _Search) -> list[Vector]:
    """Return the disjoint engines that promise most by their steady states.

    Those of the highest sum of rates, or where answers are to end soon of what each ends in a time.
    """
    if search.objective != "latency":
        return search.vectors.most_rows(_steady_rates(search), search.exactly)[1]
    return _soonest(search, search.exactly or 1)


def _soonest(search: _Search, number: int) -> list[Vector]:
    """Return so many disjoint engines whose answers end soonest by their steady states."""
    speeds = {v: 1 / _latency(search, v, number) for v in _steady_rates(search)}
    return search.vectors.most_rows(speeds, number)[1]


def _steady_rates(search: _Search) -> dict[Vector, float]:
    """Return the steady rates of all engines that were planned, each of its best plan."""
    best = {v: search.best_of(v) for v in search.vectors.vectors}
    return {v: one.steady.rate_per_s for v, one in best.items() if one is not None}


def _latency(search: _Search, v: Vector, engines: int) -> float:
    """Return the lowest latency of an engine's plans that keep its share of the traffic's rate.

    Of all plans where none does. `engines`: how many share the traffic. Its loss lengthens it, as
    the preference weighs both.
    """
    plans, rate = search.plans_of(v), (search.traffic.rate_per_s or 0.0) / engines
    able = [one for one in plans if one.steady.rate_per_s >= rate] or plans
    output, price = search.planner.lengths.output, search.planner.price
    return min(
        (one.steady.ttft_s + one.steady.tpot_s * output) * math.exp(price * one.loss)
        for one in able
    )


def _simple_ways(search: _Search) -> dict[str, list[list[Vector]]]:
    """Return the simple ways: single cards, even tensor parallel, equal replicas, one pipeline."""
    vectors, counts, cards = search.vectors, search.vectors.counts, _cards(search)
    problem = search.planner.problem
    shares = [
        [vectors.alone([count // n for count in counts])] * n
        for n in equal_shares(counts, sum(counts))
    ]
    of_each = zip(cards, counts, strict=True)
    with_room = [v for v, count in of_each if search.best_of(v) for _ in range(count)]
    return {
        "card": [[v] for v in cards],
        "shared": [[v] for v, group in vectors.groups.items() if is_even(problem, group)],
        "replicas": [*shares, with_room] if len(with_room) > 1 else shares,
        "pipeline": [[vectors.whole]] if sum(counts) > 1 else [],
    }


def _plan_simple(search: _Search) -> bool:
    """Plan the engines of the simple ways, in all steps; whether the time was enough."""
    ways = chain(*_simple_ways(search).values())
    engines = list(dict.fromkeys(map(search.vectors.canonical, chain(*ways))))
    for requests in REQUESTS_AT_ONCE:
        for v in engines:
            if search.planned_enough and search.known:
                return False
            search.engine(v, requests, STEP_TOKENS[0])
    if sum(search.vectors.counts) > 1:
        search.filled = _filled(search.planner)
    for v in engines:
        for step_tokens in STEP_TOKENS[1:]:
            if search.planned_enough:
                return False
            search.in_steps(v, step_tokens)
    return True


def _plan_simple_from_behind(search: _Search) -> None:
    """Plan the engines of the simple ways, the last first: what `_plan_simple` comes to last."""
    ways = chain(*_simple_ways(search).values())
    engines = list(dict.fromkeys(map(search.vectors.canonical, chain(*ways))))
    for requests in reversed(REQUESTS_AT_ONCE):
        for v in reversed(engines):
            search.engine(v, requests, STEP_TOKENS[0])


def _plan_all_at_once(search: _Search) -> None:
    """Plan all engines, without a limit: what `_plan_all` does when the simple ways are known."""
    search.deadline_s = math.inf
    _plan_all(search)


def _filled(planner: EnginePlanner) -> list[EnginePlan]:
    """Return pipelines with layers in proportion to cards' rates: of each step's the best.

    By their steady states, for any number of requests at once.
    """
    plans = [planner.filled(requests, STEP_TOKENS[0]) for requests in REQUESTS_AT_ONCE]
    names = tuple(device.name for device in planner.problem.cluster.devices)
    found = []
    for step_tokens in STEP_TOKENS:
        own = []
        for plan in filter(None, plans):
            with suppress(DoesNotFitError):  # longer steps than it was made for
                own.append(planner.engine_of(plan, step_tokens))
        best = max(filter(None, own), key=planner.worth, default=None)
        found += [] if best is None else [replace(best, places=names)]
    return found


def _simple(search: _Search) -> dict[str, list[Vector]]:
    """Return the best of each simple way, of those that fit: by their rates where these count.

    First what has most of a steady rate: the time may be short. Where rates count, in the steps
    that are best by a steady state, then in all: if these may make the way the best.
    """
    able = {
        name: sorted(
            (way for way in ways if all(map(search.best_of, way))),
            key=partial(_steady_rate, search),
            reverse=True,
        )
        for name, ways in _simple_ways(search).items()
    }
    names = [name for name, ways in able.items() if ways]
    names.sort(key=lambda name: -_steady_rate(search, able[name][0]))
    found = {name: able[name][0] for name in names}
    if search.objective == "rate":
        first = {name: _best_way(search, able[name], _by_itself) for name in names}
        names.sort(key=lambda name: -first[name][1])
        least = max(rate for _, rate in first.values()) / STEPS_HOPE if names else 0.0
        for name in names:
            found[name], rate = first[name]
            if rate <= 0 or rate >= least:
                found[name], _ = _best_way(search, able[name], _in_best_steps)
    return found | ({"pipeline": [search.vectors.whole]} if search.filled else {})


def _steady_rate(search: _Search, way: Sequence[Vector]) -> float:
    return sum(one.steady.rate_per_s for v in way if (one := search.best_of(v)))


def _best_way(
    search: _Search,
    ways: Sequence[list[Vector]],
    rate_of: Callable[[_Search, Vector, float], float],
) -> tuple[list[Vector], float]:
    """Return the way of the highest sum of single engines' rates, and that; else the first."""
    best, most = ways[0], -1.0
    for way in ways:
        search.allow(SIMPLE_SHARE)
        enough = max(0.0, most) / len(way) if len(set(way)) == 1 else 0.0
        try:
            rate = sum(rate_of(search, v, enough) for v in way)
        except TimeoutError:
            search.late = True
            continue
        if rate > most:
            best, most = way, rate
    return best, most


def _others(search: _Search, chosen: Sequence[Vector]) -> dict[int, list[Vector]]:
    """Return the best topologies of other numbers of engines, where steady rates are near.

    Of those whose answers are to end soon two beside one, and of so many as are asked for the ones
    of the highest rate, too: where requests wait, that decides.
    """
    rates, exactly = _steady_rates(search), search.exactly
    if search.objective == "latency":
        number = exactly or 2
        vectors = (
            _soonest(search, 2) if exactly is None else search.vectors.most_rows(rates, exactly)[1]
        )
        return {number: vectors} if vectors and sorted(vectors) != sorted(chosen) else {}
    if exactly is not None:
        return {}
    found = {}
    most, _ = search.vectors.most_rows(rates)
    for number in range(1, min(len(chosen) + 2, sum(search.vectors.counts)) + 1):
        if number != len(chosen):
            total, vectors = search.vectors.most_rows(rates, number)
            if vectors and total > 0.8 * most:
                found[number] = vectors
    return found


def _simulated(search: _Search, name: str, engines: tuple[EnginePlan, ...]) -> Valued:
    """Simulate engines together, under all requests; `TimeoutError` if the time is over before."""
    traffic, late = search.traffic, search.deadline_s
    models, every = [one.model for one in engines], traffic.arrivals
    if search.objective == "rate":
        rate = search.together(engines)
    else:
        rate = highest_rate(models, every, traffic.limits, deadline_s=late)
    own = None
    if search.objective == "latency" or math.isfinite(search.enough):
        own = measured_at(models, every, traffic.limits, deadline_s=late)
    return Valued(name=name, engines=engines, rate=rate, at_own_rate=own)


def _bought_back(search: _Search, one: Valued) -> list[Valued]:
    """Return engines that keep the traffic's rate, like those given and with less and less loss."""
    found: list[Valued] = []
    least, kept = one.loss, search.worth(one)[0]
    for dearer in DEARER:
        if not kept or least == 0 or search.left_s() < 0:
            break
        engines = [_dearer(search, engine, dearer) for engine in one.engines]
        new = tuple(engine for engine in engines if engine is not None)
        if len(new) < len(engines):
            break
        if max(engine.loss for engine in new) < least:
            try:
                better = _simulated(search, one.name, new)
            except TimeoutError:
                break
            kept, least = search.worth(better)[0], better.loss
            found.append(better)
    return found


def _dearer(search: _Search, engine: EnginePlan, dearer: float) -> EnginePlan | None:
    """Return an engine's plan where quality is dearer; of fewer requests at once if need be."""
    requests = engine.plan.workload.batch
    while requests:
        found = search.planner.plan(engine.places, requests, engine.step_tokens, dearer=dearer)
        if found is not None or search.left_s() < 0:
            return found
        requests //= 4
    return None


def _plan_file(
    best: Valued, traffic: NamedTraffic, objective: TrafficObjective, *, simulated: bool
) -> Plan | Topology:
    """Return the plan with its traffic, of one engine or several."""
    rate = best.rate.rate_per_s if traffic.rate_per_s is None else traffic.rate_per_s

    def with_traffic(engine: EnginePlan) -> Plan:
        form = TrafficForm(
            objective=objective,
            requests=best.served.requests,
            prompt_tokens=Quantiles.of(map(float, traffic.prompt_tokens)),
            output_tokens=Quantiles.of(map(float, traffic.output_tokens)),
            longest=MeanLengths.of(traffic).longest,
            limits=traffic.limits,
            step_tokens=engine.step_tokens,
            rate_per_s=rate,
            highest_rate_per_s=best.rate.rate_per_s if simulated else None,
            predicted=best.served,
        )
        return engine.plan.model_copy(update={"traffic": form})

    plans = [with_traffic(engine) for engine in best.engines]
    if len(plans) == 1:
        return plans[0]
    shares = tuple(EngineShare(rows=plan.workload.batch, plan=plan) for plan in plans)
    first: Callable[[str], float] = lambda name: max(  # noqa: E731
        getattr(plan.predicted, name) for plan in plans
    )
    rows = sum(share.rows for share in shares)
    work = plans[0].workload.model_copy(update={"batch": rows})
    return Topology(
        engines=shares,
        workload=work,
        predicted=TopologyPredicted(
            total_s=first("total_s"),
            output_tokens_per_s=rows * work.gen_len / first("total_s"),
            sum_omega=first("sum_omega"),
        ),
    )


def _nothing(traffic: NamedTraffic, complete: bool, exactly: int | None) -> str:
    limits = traffic.limits
    asked = [
        f"{name} {seconds:g} s"
        for name, seconds in (("--ttft", limits.ttft_s), ("--tpot", limits.tpot_s))
        if seconds is not None
    ]
    longest = max(one.prompt_tokens + one.output_tokens for one in traffic.arrivals)
    kept = f" within {' and '.join(asked)}" if asked else ""
    more = "" if complete else "; --time-limit gives the search more time"
    several = exactly not in (None, 1)
    who = f"no {exactly} engines" if several else "no engine"
    serves = f"{who} on these devices serve{'' if several else 's'} requests of up"
    instead = "fewer engines (--engines), " if several else ""
    return (
        f"{serves} to {longest} tokens{kept}, even one at a time: allow {instead}fewer bits "
        f"(--bits 4, --kv 8), shorter requests{', longer limits' if asked else ''} or another "
        f"card{more}"
    )
