"""Plans of engines for live traffic: of a group of devices, requests at once, tokens of a step.

An engine is planned as a batch job of so many requests of the mean lengths: the pool then holds
them, and layers go where such a job is quickest: of several devices with as many micro-batches as
there may be stages, as a pipeline under live traffic has them (steady_state.py): the busiest stage
then counts, not the sum of all. Where answers are to end soon, also with those that suit the job
best. A job of few requests counts longer ones, so that the longest request of the traffic has room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from llmpq.errors import DoesNotFitError
from llmpq.planner.baselines.water_filling import water_filled
from llmpq.planner.evaluate.engine_simulation import EngineModel
from llmpq.planner.front.preference import WEIGHTS, look_around
from llmpq.planner.problem.outcome import Outcome, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import spend_s
from llmpq.planner.solving.answer import checked_plan
from llmpq.planner.solving.count_vectors import Place
from llmpq.planner.solving.device_groups import on_places
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import best_plan, variants_with_room
from llmpq.planner.traffic.plans_ahead import PlansAhead
from llmpq.planner.traffic.steady_state import MeanLengths, SteadyState, best_state
from llmpq.plans.plan import ClusterRef, Plan
from llmpq.service_measures import ServiceLimits

ENGINE_S, ENGINE_GAP = 0.5, 0.01
"""Seconds of one search for an engine's plan, and the relative gap at which it ends: what is nearer
does not show in a rate that is found to a few percent."""

PLAN_S = 0.03
"""Seconds of work of making a problem and checking its plan, beside the search (a core of 2026)."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The plan of an engine, and what it keeps up in a steady state."""

    plan: Plan
    model: EngineModel
    steady: SteadyState
    step_tokens: int
    places: tuple[Place, ...]
    """Devices, and groups that share stages, that it was planned for; stages may be on fewer."""

    @property
    def loss(self) -> float:
        """Quality loss of the plan."""
        assert self.plan.predicted is not None, "the planner always predicts"
        return self.plan.predicted.sum_omega


@dataclass
class _Job:
    """A batch job that an engine is planned as, and its plans by theta."""

    key: str
    """What its plans depend on, beside theta."""
    problem: Problem | None
    """None once it is solved at all of them."""
    thetas: Sequence[float]
    plans: dict[float, Plan | None] = field(default_factory=dict)

    def plan_at(self, theta: float, solved: Callable[[str, Problem], Plan | None]) -> Plan | None:
        if theta not in self.plans:
            assert self.problem is not None, "it is not solved at this theta"
            key = f"{self.key}, theta {theta!r}"
            self.plans[theta] = solved(key, self.problem.with_changes(theta=theta))
            if len(self.plans) == len(set(self.thetas)):
                self.problem = None
        return self.plans[theta]


@dataclass(frozen=True)
class EnginePlanner:
    """Plans engines of a problem's devices."""

    problem: Problem
    options: SolveOptions
    path: str | None
    lengths: MeanLengths
    limits: ServiceLimits
    ends_soon: bool = False
    """Whether answers are to end soon, not many requests to be served."""
    ahead: PlansAhead = field(default_factory=PlansAhead)
    """Solves them, and may have had a fork do so."""
    _known: dict[tuple[object, ...], list[_Job]] = field(default_factory=dict)

    @property
    def price(self) -> float:
        """What a unit of loss is worth by the preference, in the logarithm of time or rate."""
        unit = self.problem.sensitivity.four_bit_omega()
        return WEIGHTS[self.options.prefer] / unit if self.options.prefer and unit else 0.0

    def worth(self, engine: EnginePlan) -> float:
        """Return what is largest of the best engine: its rate, by its loss."""
        return math.log(engine.steady.rate_per_s) - self.price * engine.loss

    def job(self, places: Sequence[Place], requests: int, step_tokens: int) -> Problem:
        """Return the batch job that an engine is planned as."""
        prompt, output = self._job_lengths(requests)
        kvs = self.options.kvs or (self.problem.kv,)
        own = on_places(self.problem, places, kvs).with_job(
            batch=requests, prompt_len=prompt, gen_len=output
        )
        chunk = min(step_tokens, prompt)
        # A step has as many prompts as its tokens hold; a pool with windows maybe room for fewer.
        prompts = None if own.spec.windows else min(requests, max(1, step_tokens // chunk))
        return own.with_changes(chunk=chunk, prefill_microbatch=prompts)

    def _job_lengths(self, requests: int) -> tuple[int, int]:
        """Return tokens of a prompt and of an answer: of few requests longer ones than the mean."""
        lengths = self.lengths
        scale = max(1.0, lengths.longest / requests / (lengths.prompt + lengths.output))
        prompt = max(1, round(lengths.prompt * scale))
        output = max(1, round(lengths.output * scale + 0.5))
        return prompt, max(output, lengths.longest + 1 - prompt) if requests == 1 else output

    def plan(
        self,
        places: Sequence[Place],
        requests: int,
        step_tokens: int,
        *,
        dearer: float = 1.0,
        solved_for: int | None = None,
    ) -> EnginePlan | None:
        """Return the best plan of an engine; None where none fits or none is within the limits.

        `dearer`: how many times what quality is worth by the preference it is worth here.
        `solved_for`: other tokens of a step, for which layers and bits are chosen; they change
        little with them. Where that has no room, they are chosen for `step_tokens`.
        """
        found: list[EnginePlan] = []
        has_room = True
        chosen_for = solved_for or step_tokens
        for one in self._jobs(tuple(places), requests, chosen_for, dearer):
            for theta in one.thetas:
                plan = one.plan_at(theta, self._solved)
                try:
                    engine = None if plan is None else self.engine_of(plan, step_tokens)
                except DoesNotFitError:  # longer steps than it was made for
                    plan = engine = None
                has_room &= plan is not None
                if engine is not None:
                    found.append(replace(engine, places=tuple(places)))
                    break
        if not found and not has_room and chosen_for != step_tokens:
            return self.plan(places, requests, step_tokens, dearer=dearer)
        return max(found, key=self.worth, default=None)

    def _jobs(
        self, places: tuple[Place, ...], requests: int, step_tokens: int, dearer: float
    ) -> list[_Job]:
        """Return what an engine is planned as, each solved once."""
        chunk = min(step_tokens, self._job_lengths(requests)[0])
        key = places, requests, chunk, dearer
        if key not in self._known:
            self._known[key] = list(self._new_jobs(places, requests, step_tokens, dearer))
        return self._known[key]

    def _new_jobs(
        self, places: tuple[Place, ...], requests: int, step_tokens: int, dearer: float
    ) -> Iterator[_Job]:
        for kv in self.options.kvs or (self.problem.kv,):
            job = self.job(places, requests, step_tokens).with_job(kv=kv)
            thetas = [job.theta]
            if self.price:  # where such a plan is not within the limits, the quickest may be
                near, _ = look_around([job.sharing_tables()], self.price)
                thetas.insert(0, dearer * self.price * near.time_s)
            sizes = [job.decode_microbatch]
            if len(places) > 1 and job.decode_microbatch is None:
                full = -(-requests // len(places))
                sizes = [None, full] if self.ends_soon else [full]
            for rows in sizes:
                key = f"{places}, {requests} of {job.chunk} tokens, {dearer!r}, {kv}, {rows} rows"
                yield _Job(key, job.with_changes(decode_microbatch=rows), thetas)

    def _solved(self, key: str, job: Problem) -> Plan | None:
        """Return the plan of a job at its theta; None where nothing fits."""
        return self.ahead.solve(key, partial(self._solve, job))

    def _solve(self, job: Problem) -> Plan | None:
        spend_s(PLAN_S)
        options = replace(
            self.options,
            kvs=(),
            gap=max(ENGINE_GAP, self.options.gap),
            time_limit_s=min(ENGINE_S, self.options.time_limit_s),
        )
        try:
            solved = best_plan(job, options)
            return self._checked(solved.problem, solved.outcome)
        except (DoesNotFitError, Unfinished):
            return None

    def _checked(self, job: Problem, outcome: Outcome) -> Plan:
        valued = job if self.options.budget is None else job.with_changes(theta=0.0)
        return checked_plan(valued, outcome, self.path, self.options.prefer)

    def filled(self, requests: int, step_tokens: int) -> Plan | None:
        """Return the pipeline over all devices with layers in proportion to their rates.

        For so many requests at once; None where it has no room.
        """
        names = [device.name for device in self.problem.cluster.devices]
        job = self.job(names, requests, step_tokens)
        found = water_filled(variants_with_room(job, self.options), self.options.budget)
        return None if found is None else self._checked(*found)

    def engine_of(self, plan: Plan, step_tokens: int) -> EnginePlan | None:
        """Return what an engine of this plan keeps up; None where nothing within the limits."""
        whole = self.problem.cluster
        plan = plan.model_copy(
            update={"cluster": ClusterRef(name=whole.name, fingerprint=whole.fingerprint())}
        )
        model = EngineModel.of_plan(plan, max_num_batched_tokens=step_tokens)
        steady = best_state(model, self.lengths, self.limits)
        if steady is None or model.limits.room < self.lengths.longest:
            return None
        return EnginePlan(plan=plan, model=model, steady=steady, step_tokens=step_tokens, places=())
