"""Simulates a plan under a traffic: its engines' own schedulers over predicted step times.

Requests go to the engine that is predicted to end them first, as `serve` routes them
(serve/replicas/routing.py). Needs neither torch nor the model: a plan carries its cost entries.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.requests.request import Request
from llmpq.runtime.simulate.engine import ServedRequest, SimulatedEngine
from llmpq.runtime.simulate.step_times import TimedStage, stage_times
from llmpq.service_measures import ServiceLimits, ServiceMeasures
from llmpq.traffic import BLOCK_OF_TRACE, Arrival

PROMPT_WORK = 1 / 16
"""Work of a prompt's token, in tokens of answers, as `serve` counts it."""


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What is simulated of an engine: what its scheduler may do, and its stages' times."""

    limits: PoolLimits
    stages: tuple[TimedStage, ...]
    speed: float = 1.0
    """Output tokens/s that are predicted of it: how routing weighs its work."""
    host_s: float = 0.0

    @classmethod
    def of_plan(
        cls, plan: Plan, *, max_num_batched_tokens: int | None = None, offline: bool = False
    ) -> EngineModel:
        """Return the engine that `serve` makes of a plan, or, `offline`, a batch run."""
        times = stage_times(plan)
        assert plan.inputs is not None
        options = EngineOptions(max_num_batched_tokens=max_num_batched_tokens, offline=offline)
        limits = PoolPlan(plan, plan.inputs.model, options).limits
        predicted = plan.predicted
        return cls(
            limits=limits,
            stages=times,
            speed=1.0 if predicted is None else max(predicted.output_tokens_per_s, 1e-9),
        )

    def without_prefixes(self) -> EngineModel:
        """Return an engine that finds no prefixes, if it steps as one that does."""
        if self.limits.snapshots:  # of recurrent layers: prompts are cut where they are kept
            return self
        return replace(self, limits=replace(self.limits, prefix_cache=False))

    def engine(
        self,
        ended: Callable[[ServedRequest], None] | None = None,
        within: ServiceLimits | None = None,
        missed: Callable[[int], None] | None = None,
    ) -> SimulatedEngine:
        """Return it, idle at 0 s; arguments are those of `SimulatedEngine`."""
        return SimulatedEngine(
            self.limits,
            self.stages,
            host_s=self.host_s,
            ended=ended,
            within=within,
            missed=missed,
        )


@dataclass
class _Replica:
    engine: SimulatedEngine
    speed: float
    under_way: float = 0.0
    ends: list[tuple[float, float]] = field(default_factory=list)
    """(when it ended, its work) of requests that are still counted."""
    num_counted: int = 0


def simulate(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    *,
    late: Callable[[], bool] | None = None,
    ended: Callable[[ServedRequest], None] | None = None,
    within: ServiceLimits | None = None,
    missed: Callable[[int], None] | None = None,
) -> list[ServedRequest]:
    """Return when each request of a traffic is served, in order of arrival.

    `ValueError` names a request for which no engine has room; `TimeoutError` where it is `late`,
    which is asked before every step. `ended` is called with each request as it ends: of one engine
    in order of time, of several by turns; `missed` with the number of each that is under way when
    it can no longer be `within` limits. What they raise ends the simulation.
    """
    shares_blocks = any(arrival.blocks for arrival in traffic)
    if not shares_blocks:  # nothing to be found, so that nothing need be kept for it
        models = [one.without_prefixes() for one in models]
    replicas = [
        _Replica(engine=one.engine(ended, within, missed), speed=one.speed) for one in models
    ]
    work: dict[int, float] = {}
    for number, arrival in enumerate(traffic):
        if len(replicas) > 1:
            for replica in replicas:
                replica.engine.advance(arrival.at_s, late=late)
                _count_ended(replica, arrival.at_s, work)
        own = arrival.output_tokens + PROMPT_WORK * arrival.prompt_tokens
        best = min(replicas, key=lambda one: (one.under_way + own) / one.speed)
        best.under_way += own
        work[number] = own
        request = _request(number, arrival)
        try:
            models[replicas.index(best)].limits.check(request)
        except ValueError as error:
            raise ValueError(f"request {number} of the traffic: {error}") from None
        best.engine.submit(arrival.at_s, request)
    for replica in replicas:
        replica.engine.advance(late=late)
    return sorted(
        (one for replica in replicas for one in replica.engine.served), key=lambda one: one.number
    )


def _count_ended(replica: _Replica, now_s: float, work: dict[int, float]) -> None:
    """Take off the work of what has ended by now."""
    served = replica.engine.served
    for one in served[replica.num_counted :]:
        heapq.heappush(replica.ends, (one.end_s, work[one.number]))
    replica.num_counted = len(served)
    while replica.ends and replica.ends[0][0] <= now_s:
        replica.under_way -= heapq.heappop(replica.ends)[1]


def _request(number: int, arrival: Arrival) -> Request:
    """Return a request of a traffic: prompts begin alike as far as the traffic says.

    Its tokens are the numbers of its blocks, and of the request, which none has, where there are
    none: which tokens they are changes nothing else.
    """
    if arrival.blocks:
        tokens: list[int] = []
        for block in arrival.blocks:
            tokens += [2 * block] * BLOCK_OF_TRACE
        prompt = tuple(tokens[: arrival.prompt_tokens])
    else:
        prompt = (2 * number + 1,) * arrival.prompt_tokens
    return Request(id=number, prompt=prompt, max_new=arrival.output_tokens, cache_salt=None)


def simulate_plan(
    plan: Plan | Topology,
    traffic: Sequence[Arrival],
    limits: ServiceLimits | None = None,
    *,
    max_num_batched_tokens: int | None = None,
) -> ServiceMeasures:
    """Return how a plan's engines serve a traffic, as predicted."""
    models = [
        EngineModel.of_plan(one, max_num_batched_tokens=max_num_batched_tokens)
        for one in plan.plans
    ]
    served = simulate(models, traffic)
    return ServiceMeasures.of(served, limits or ServiceLimits())


def simulate_batch(plan: Plan, rows: int) -> float:
    """Return the seconds of a batch run of so many rows of a plan's job, all there at once."""
    work = plan.workload
    row = Arrival(at_s=0.0, prompt_tokens=work.prompt_len, output_tokens=work.gen_len)
    served = simulate([EngineModel.of_plan(plan, offline=True)], [row] * rows)
    return max(one.end_s for one in served)
