"""Solves a problem as its options say, in a child process, and has the plan checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmpq.errors import DoesNotFitError
from llmpq.planner.evaluate.objective import job_time, value
from llmpq.planner.front.preference import TOLERANCE, WEIGHTS
from llmpq.planner.problem import limits
from llmpq.planner.problem.limits import MOST_WAVES
from llmpq.planner.problem.make_problem import kvs_to_plan, stated_theta
from llmpq.planner.problem.outcome import OPTIMAL_GAP, Outcome, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.device_groups import may_group, on_places
from llmpq.planner.solving.methods import NO_PLAN, SolveOptions, within
from llmpq.planner.solving.plan_search import nothing_fits, search_plan, variants_with_room
from llmpq.planner.solving.robustness import NEAR, bound_only, work_limit_s
from llmpq.planner.solving.worker import (
    SolverCrashed,
    plan_in_child,
    robustness_in_child,
    topology_in_child,
)
from llmpq.plans.plan import Plan, Predicted, Prefer, Robustness, SolverReport
from llmpq.plans.topology import EngineShare, Topology, TopologyPredicted
from llmpq.version import __version__

if TYPE_CHECKING:
    from llmpq.planner.solving.topologies import FoundEngine, FoundTopology
    from llmpq.planner.solving.topology_search import KnownPipeline

DEFAULT_PREFER: Prefer = "balanced"
TIE = 0.02
"""What predictions of pipelines may be off by: 15 of 18 plans over GPUs took within 1.4 % of their
predicted times, three within 5.6 % (docs/lab-book/runtime.md); plans of one GPU within 1.1 %."""
PROVEN = 1.01e-3
"""Relative gap up to which one engine is said to be the best of all topologies."""
MOST_TOKENS = 300_000
"""Answers' tokens of a job up to which it is simulated; of more, plans' own times are taken."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A solved problem and its checked plan."""

    problem: Problem
    outcome: Outcome
    plan: Plan
    waves: int = 1
    """How often the plan is run for all rows of a job that it has no room for at once."""

    @property
    def time_s(self) -> float:
        """Seconds of the job, as the search counts them."""
        return self.waves * job_time(self.problem, self.outcome.assignment).total_s


def in_waves(
    problem: Problem, options: SolveOptions, path: str | None, refused: DoesNotFitError
) -> Answer:
    """Return the best pipeline in several waves where `refused` says that one has no room."""
    rows, found = problem.workload.batch, list[Answer]()
    if isinstance(refused, Unfinished):  # there may be room
        raise refused
    own = replace(options, time_limit_s=options.time_limit_s / MOST_WAVES)
    for waves in range(2, min(MOST_WAVES, rows) + 1):
        job = problem.with_job(batch=-(-rows // waves)).with_changes(theta=problem.theta / waves)
        with suppress(DoesNotFitError):
            found.append(replace(answer(job, own, path), waves=waves))
    if not found:
        raise refused
    return min(found, key=lambda one: _score_in_waves(one, options))


def solve_options(request: PlanRequest, problem: Problem) -> SolveOptions:
    """Return how to solve, from the request and what the cluster's author recommends."""
    method, budget = request.method or "exact", None
    if method == "flexgen":
        raise ValueError(NO_PLAN)
    if request.quality_budget is not None:
        budget = limits.within("--quality-budget", request.quality_budget, limits.MAX_BUDGET)
    options = SolveOptions(
        method=method,
        gap=limits.within("--gap", request.gap, 1.0),
        backend=request.solver or "highs",
        budget=budget,
        kvs=kvs_to_plan(problem, request.kv),
        prefer=None
        if budget is not None or stated_theta(request, problem.cluster) is not None
        else request.prefer or DEFAULT_PREFER,
        tie=TIE,
        groups=request.tensor_parallel is None,
        names_context=request.context is not None,
    )
    return within(options, limits.within("--time-limit", request.time_limit, math.inf))


def answer(problem: Problem, options: SolveOptions, path: str | None) -> Answer:
    """Return the checked plan that is best as asked for."""
    priced, outcome = solved(problem, options)
    # Under a budget the value is time only.
    valued = priced if options.budget is None else priced.with_changes(theta=0.0)
    plan = checked_plan(valued, outcome, path, options.prefer)
    return Answer(problem=priced, outcome=outcome, plan=plan)


def with_robustness(best: Answer, options: SolveOptions, spent_s: float) -> Answer:
    """Return a pipeline whose plan says by how much costs may be wrong with it near the best.

    `spent_s`: work of the searches for it. As it is where it was not made by the exact method for
    the makespan of all rows at once.
    """
    p, outcome = best.problem, best.outcome
    if outcome.method != "exact" or p.objective != "makespan" or best.waves > 1:
        return best
    variants = variants_with_room(p, options)
    if (p.kv, p.chunk) not in [(one.kv, one.chunk) for one in variants]:
        return best
    work_s = work_limit_s(options, spent_s)
    try:
        found = robustness_in_child(p, outcome, variants, options, work_s)
    except SolverCrashed:  # the plan is as good without; a crash has been said
        return best
    solver = best.plan.solver.model_copy(update={"robustness": found})
    return replace(best, plan=best.plan.model_copy(update={"solver": solver}))


@dataclass(frozen=True, kw_only=True)
class TopologyAnswer:
    """The best topology of a batch job, and what was found beside it."""

    topology: Topology | None
    """Engines with their checked plans; None: the one pipeline is not bettered."""
    plans: tuple[Answer, ...]
    """Of its engines."""
    found: FoundTopology
    known: KnownPipeline
    """The one pipeline, as topologies are valued."""
    theta: float
    """At which they are: what a unit of omega is worth, in seconds."""
    pipeline: Answer
    """The best plan of one engine whose stages have a device each."""
    alone: TopologyAnswer | None = None
    """Engines of one device each that are nearly as good, where these send between devices."""

    def uses(self, kinds: Collection[str]) -> bool:
        """Whether an engine has a device of one of these kinds."""
        places = () if self.topology is None else self.topology.places
        return any(place.kind in kinds for place in places)

    @property
    def single(self) -> Answer | None:
        """The one engine that is best, where it runs all rows at once."""
        if self.topology is None or len(self.plans) != 1 or self.topology.engines[0].waves > 1:
            return None
        return self.plans[0]


def answer_topology(
    problem: Problem,
    best: Answer,
    options: SolveOptions,
    path: str | None,
    *,
    exactly: int | None = None,
) -> TopologyAnswer:
    """Return the best topology of a job whose best pipeline is known, in waves or of all rows.

    All are compared by what the options state: a theta, the budget, which every engine keeps, or
    the preference's score. After a preference topologies are searched at the theta of the
    pipeline's time, and, as the score of plans far from it may be lower than their value there
    says, at those of chords of the score's curve: of one precision for all layers, which is quickly
    searched, and, where time is left, of all.
    """
    found = _topology_at(_theta_of(problem, best, options), problem, best, options, path, exactly)
    if options.prefer is None or (found.topology is None and exactly not in (None, 1)):
        return found
    start, least, work_s = found, _score_of(found, options), found.found.work_s
    searches = _chords(problem, best, options, least)
    for theta, everywhere in searches:
        if everywhere is None and work_s > options.time_limit_s / 2:
            break
        share = 1 / 2 if everywhere is None else 1 / (len(searches) - 1)
        own = replace(options, time_limit_s=options.time_limit_s * share)
        # Of all precisions: a least value is concave in theta.
        bound = start.found.bound * min(1.0, theta / start.theta)
        only = None if everywhere is None else (everywhere, bound)
        other = _topology_at(theta, problem, best, own, path, exactly, everywhere=only)
        work_s += other.found.work_s
        if other.topology is not None and _score_of(other, options) < least:
            found, least = other, _score_of(other, options)
    return replace(found, alone=start.alone)


MOST_EVERYWHERE = 2
"""Precisions for all layers with which topologies are looked for after a preference; they divide
the time."""


def _score_of(found: TopologyAnswer, options: SolveOptions) -> float:
    """Return the score of a topology, or of the pipeline where it is not bettered."""
    if found.topology is None:
        return _score_in_waves(found.pipeline, options)
    return score(found.pipeline, found.topology.predicted, options)


def _score_in_waves(one: Answer, options: SolveOptions) -> float:
    """Return the score of a pipeline that runs all rows of a job in its waves."""
    once = score(one, one.plan.predicted, options)
    return once + math.log(one.waves) if options.prefer else once * one.waves


def _only(problem: Problem, b: int) -> Problem:
    """Return the job with one precision for all layers."""
    return problem.with_changes(choices=(problem.choices[b],))


def _chords(
    problem: Problem, best: Answer, options: SolveOptions, least: float
) -> list[tuple[float, int | None]]:
    """Return thetas at which to search topologies of a score below `least`, beside the pipeline's.

    Each is that of a chord of the score's curve, from the pipeline's loss to another: plans between
    whose score is lower have a lower value at it. The first are to the losses of one precision for
    all layers, the last is to the loss above which none is quick enough, of all precisions.
    """
    from llmpq.planner.solving.engine_floors import EngineFloors

    assert options.prefer is not None and best.plan.predicted is not None
    price, own_omega = _price_of(problem, options.prefer), best.plan.predicted.sum_omega
    time_s = best.time_s
    floors, omegas = dict[int, float](), problem.omega.sum(axis=0)
    for b in range(len(problem.choices)):
        own = _only(problem.with_changes(theta=0.0), b)
        if problem.open[:, b].all() and variants_with_room(own, options):
            floors[b] = EngineFloors(own, (), options.kvs, None).of_all()

    def theta(more: float) -> float:
        return time_s * -math.expm1(-price * more) / more

    far = [b for b in floors if abs(price * (omegas[b] - own_omega)) > TOLERANCE]
    if not far or time_s <= min(floors.values()):
        return []
    scores = {b: math.log(floors[b]) + price * float(omegas[b]) for b in far}
    chosen = sorted((b for b in far if scores[b] < least), key=lambda b: scores[b])
    most = math.log(time_s / min(floors.values())) / price
    return [
        *((theta(float(omegas[b]) - own_omega), b) for b in chosen[:MOST_EVERYWHERE]),
        (theta(most), None),
    ]


def _topology_at(
    theta: float,
    problem: Problem,
    best: Answer,
    options: SolveOptions,
    path: str | None,
    exactly: int | None,
    *,
    everywhere: tuple[int, float] | None = None,
) -> TopologyAnswer:
    """Return the topology of the least time + theta omega.

    `everywhere`: of one precision for all layers, and the bound that is known of all precisions.
    """
    from llmpq.planner.solving.topology_search import KnownPipeline

    priced = problem.with_changes(theta=theta)
    own = best.problem.with_changes(theta=theta)
    bound, at = best.outcome.bound, best.problem.theta
    known = KnownPipeline()
    if best.waves == 1:
        known = KnownPipeline(
            value=value(own, best.outcome.assignment),
            # A least value is concave in theta, and not below zero at none.
            bound=max(0.0, bound or 0.0) * (1.0 if theta >= at else theta / at),
            stages=len(best.outcome.assignment.stages),
        )
    if everywhere is None:
        found = topology_in_child(priced, options, known, exactly=exactly)
    else:
        choice, least = everywhere
        found = topology_in_child(_only(priced, choice), options, known, exactly=exactly)
        found = replace(found, bound=min(found.bound, least), most=())
    is_one = len(found.engines) == 1 and found.engines[0].waves == 1
    bound_of_one = min(found.bound, found.value) if is_one else None
    plans = tuple(
        _engine_answer(problem, one, options, path, bound_of_one) for one in found.engines
    )
    topology = _topology(problem, found, plans, options, theta) if plans else None
    if topology is not None and exactly in (None, 1) and best.waves == 1:
        least = _reported(best.plan, 1, theta)
        most = max(_reported(one.plan, one.waves, theta) for one in topology.engines)
        if most >= least:  # step by step it is not better
            topology = None
    answered = TopologyAnswer(
        topology=topology, plans=plans, found=found, known=known, theta=theta, pipeline=best
    )
    if not found.alone:
        return answered
    apart = replace(found, engines=found.alone, value=found.alone_value, alone=())
    plans = tuple(_engine_answer(problem, one, options, path, None) for one in apart.engines)
    topology = _topology(problem, apart, plans, options, theta)
    alone = replace(answered, topology=topology, plans=plans, found=apart)
    return replace(answered, alone=alone)


PIPELINE_SHARE = 0.85
"""Share of the time limit for a pipeline, where groups of devices are looked for behind it."""


def before_groups(options: SolveOptions) -> SolveOptions:
    """Return the options of a pipeline's search that leave time for `one_engine`."""
    return replace(options, time_limit_s=options.time_limit_s * PIPELINE_SHARE)


def one_engine(
    problem: Problem, best: Answer, options: SolveOptions, path: str | None
) -> TopologyAnswer | None:
    """Return whether one engine whose stages may be groups of a node's devices is better.

    `best`: the best pipeline. None where devices cannot be in any group.
    """
    if options.method != "exact" or not (options.groups and may_group(problem)):
        return None
    found = answer_topology(problem, best, options, path, exactly=1)
    return found if found.single is not None else replace(found, topology=None, plans=())


def pipeline_below(
    problem: Problem, best: Answer, options: SolveOptions, path: str | None, found: TopologyAnswer
) -> Answer | None:
    """Return a pipeline that is better than the topology found; None where none was found."""
    assert found.topology is not None, "there is one to better"
    theta = found.theta
    fixed, below = replace(options, prefer=None), found.found.value
    try:
        solved = plan_in_child(problem.with_changes(theta=theta), fixed, ceiling=below)
    except DoesNotFitError:  # or none that is better
        return None
    if solved.outcome.value >= below:
        return None
    valued = solved.problem if options.budget is None else solved.problem.with_changes(theta=0.0)
    plan = checked_plan(valued, solved.outcome, path, options.prefer)
    better = Answer(problem=solved.problem, outcome=solved.outcome, plan=plan)
    return better if score(better, plan.predicted, options) < _score_of(found, options) else None


def score(
    one: Answer, predicted: Predicted | TopologyPredicted | None, options: SolveOptions
) -> float:
    """Return what the preference, the budget or theta makes smallest."""
    p = one.problem
    assert predicted is not None, "the planner always predicts"
    if options.budget is not None:
        return predicted.total_s
    if options.prefer is None:
        return predicted.total_s + p.theta * predicted.sum_omega
    return math.log(predicted.total_s) + _price_of(p, options.prefer) * predicted.sum_omega


def without_sending(best: Answer, found: TopologyAnswer, options: SolveOptions) -> TopologyAnswer:
    """Return engines of one device each where a plan that sends between devices is hardly better.

    Within `SolveOptions.tie`, both valued by the runtime's scheduler over their predicted step
    times, with what a plan's closed form leaves out: how stages fill and drain, and the rows that
    follow one another.
    """
    alone, topology = found.alone, found.topology
    if not options.tie or alone is None or alone.topology is None:
        return found
    engines = [(best.plan, best.plan.workload.batch)]
    if topology is not None:
        engines = [(one.plan, one.rows) for one in topology.engines]
    sends = _simulated_score(best, engines, options)
    others = [(one.plan, one.rows) for one in alone.topology.engines]
    other = _simulated_score(best, others, options)
    quicker = math.expm1(other - sends) if options.prefer else other / sends - 1
    if quicker > options.tie:
        return found
    return replace(alone, found=replace(alone.found, quicker=quicker))


def _simulated_score(
    best: Answer, engines: Sequence[tuple[Plan, int]], options: SolveOptions
) -> float:
    """Return what is made smallest, of engines with their rows as they would run."""
    tokens = sum(rows * plan.workload.gen_len for plan, rows in engines)
    total_s = max(_job_seconds(plan, rows, tokens <= MOST_TOKENS) for plan, rows in engines)
    predicted = TopologyPredicted(
        total_s=total_s,
        output_tokens_per_s=tokens / total_s,
        sum_omega=max(plan.predicted.sum_omega for plan, _ in engines if plan.predicted),
    )
    return score(best, predicted, options)


def _job_seconds(plan: Plan, rows: int, simulated: bool) -> float:
    """Return how long a plan takes for so many rows: simulated, or as it predicts, in waves."""
    if simulated:
        from llmpq.planner.evaluate.engine_simulation import simulate_batch

        return simulate_batch(plan, rows)
    assert plan.predicted is not None, "the planner always predicts"
    return -(-rows // plan.workload.batch) * plan.predicted.total_s


def _price_of(problem: Problem, prefer: Prefer) -> float:
    """Return what a unit of omega counts for, in the logarithm of time."""
    unit = problem.sensitivity.four_bit_omega()
    return WEIGHTS[prefer] / unit if unit else 0.0


def _theta_of(problem: Problem, best: Answer, options: SolveOptions) -> float:
    """Return what a unit of omega is worth, in seconds of the one pipeline's job."""
    if options.budget is not None:
        return 0.0
    if options.prefer is None:
        return problem.theta
    return _price_of(problem, options.prefer) * best.time_s


def _reported(plan: Plan, waves: float, theta: float) -> float:
    assert plan.predicted is not None, "the planner always predicts"
    return waves * plan.predicted.total_s + theta * plan.predicted.sum_omega


def _engine_answer(
    problem: Problem,
    engine: FoundEngine,
    options: SolveOptions,
    path: str | None,
    bound: float | None,
) -> Answer:
    """Return the checked plan of an engine, which names the whole cluster."""
    from llmpq.planner.check.check import check_plan
    from llmpq.plans.plan import ClusterRef

    own, outcome = engine.solved.problem, engine.solved.outcome
    if own.choices != problem.choices:  # of one for all layers
        (everywhere,) = own.choices
        one = problem.choices.index(everywhere)
        stages = outcome.assignment.stages
        stages = tuple(replace(stage, choices=(one,) * len(stage.choices)) for stage in stages)
        estimate = on_places(problem, engine.places, options.kvs).costs.estimate
        costs = replace(own.costs, estimate=estimate)
        own = own.with_changes(choices=problem.choices, costs=costs)
        outcome = replace(outcome, assignment=replace(outcome.assignment, stages=stages))
    if bound is not None:  # of all topologies, of which this is one engine
        proven = outcome.value - bound <= PROVEN * abs(outcome.value)
        outcome = replace(outcome, bound=bound, status="optimal" if proven else "feasible")
    plan = checked_plan(own, outcome, path, options.prefer)
    whole = problem.cluster
    plan = plan.model_copy(
        update={"cluster": ClusterRef(name=whole.name, fingerprint=whole.fingerprint())}
    )
    check_plan(plan, spec=own.spec, cluster=whole, costs=None)
    return Answer(problem=own, outcome=outcome, plan=plan)


def _topology(
    problem: Problem,
    found: FoundTopology,
    plans: Sequence[Answer],
    options: SolveOptions,
    theta: float,
) -> Topology:
    """Return the plan file of a topology."""
    engines = tuple(
        EngineShare(rows=one.rows, plan=own.plan)
        for one, own in zip(found.engines, plans, strict=True)
    )
    seconds = max(engine.predicted_s or 0.0 for engine in engines)
    work = problem.workload
    gap = max(0.0, found.value - found.bound)
    proven = gap <= OPTIMAL_GAP * found.value
    return Topology(
        engines=engines,
        workload=work,
        predicted=TopologyPredicted(
            total_s=seconds,
            output_tokens_per_s=work.batch * work.gen_len / seconds,
            sum_omega=max(one.plan.predicted.sum_omega for one in plans if one.plan.predicted),
        ),
        solver=SolverReport(
            method="exact",
            status="optimal" if proven else "feasible",
            prefer=options.prefer,
            theta=theta,
            value=found.value,
            bound=found.bound if found.bound > 0 else None,
            gap=gap / found.bound if found.bound > 0 else None,
            version=__version__,
            sensitivity=problem.sensitivity.indicator,
            robustness=Robustness(
                near=NEAR, proven=bound_only(found.value, found.value, found.bound)
            ),
        ),
    )


def solved(problem: Problem, options: SolveOptions) -> tuple[Problem, Outcome]:
    """Return the job with what is chosen of it (KV precision, chunk, theta), and the outcome."""
    if not variants_with_room(problem, options):  # known without a search
        raise nothing_fits(problem, options)
    found = (plan_in_child if options.in_child else search_plan)(problem, options)
    return found.problem, found.outcome


def checked_plan(
    problem: Problem, outcome: Outcome, path: str | None, prefer: Prefer | None = None
) -> Plan:
    """Build the plan and have it checked by code that shares nothing with the solver."""
    from llmpq.planner.check.build_plan import build_plan
    from llmpq.planner.check.check import check_plan

    plan = build_plan(problem, outcome, model_path=path, prefer=prefer)
    check_plan(plan, spec=problem.spec, cluster=problem.cluster, costs=problem.costs)
    return plan
