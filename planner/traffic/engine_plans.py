"""Plans of engines for live traffic: of a group of devices, requests at once, tokens of a step.

An engine is planned as a batch job of so many requests of the mean lengths: the pool then holds
them, and layers go where such a job is quickest: once with the micro-batches that suit the job
best, and where there are several devices once with as many as there may be stages, as a pipeline
under live traffic has them (steady_state.py): the busiest stage then counts, not the sum of all. A
job of few requests counts longer ones, so that the longest request of the traffic has room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmpq.errors import DoesNotFitError
from llmpq.planner.evaluate.engine_simulation import EngineModel
from llmpq.planner.front.preference import WEIGHTS, look_around
from llmpq.planner.problem.outcome import Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.answer import checked_plan
from llmpq.planner.solving.count_vectors import Place
from llmpq.planner.solving.device_groups import on_places
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import best_plan
from llmpq.planner.traffic.steady_state import MeanLengths, SteadyState, best_state
from llmpq.plans.plan import ClusterRef, Plan
from llmpq.service_measures import ServiceLimits

ENGINE_S = 2.0
"""Seconds of one search for an engine's plan."""


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


@dataclass(frozen=True)
class EnginePlanner:
    """Plans engines of a problem's devices."""

    problem: Problem
    options: SolveOptions
    path: str | None
    lengths: MeanLengths
    limits: ServiceLimits

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
        lengths = self.lengths
        mean = lengths.prompt + lengths.output
        scale = max(1.0, lengths.longest / requests / mean)
        prompt = max(1, round(lengths.prompt * scale))
        output = max(1, round(lengths.output * scale + 0.5))
        kvs = self.options.kvs or (self.problem.kv,)
        own = on_places(self.problem, places, kvs).with_job(
            batch=requests, prompt_len=prompt, gen_len=max(output, lengths.longest + 1 - prompt)
            if requests == 1 else output,
        )  # fmt: skip
        return own.with_changes(chunk=min(step_tokens, prompt))

    def plan(
        self, places: Sequence[Place], requests: int, step_tokens: int, *, dearer: float = 1.0
    ) -> EnginePlan | None:
        """Return the best plan of an engine; None where none fits or none is within the limits.

        `dearer`: how many times what quality is worth by the preference it is worth here.
        """
        found = []
        for kv in self.options.kvs or (self.problem.kv,):
            job = self.job(places, requests, step_tokens).with_job(kv=kv)
            thetas = [job.theta]
            if self.price:  # where such a plan is not within the limits, the quickest may be
                near, _ = look_around([job.sharing_tables()], self.price)
                thetas.insert(0, dearer * self.price * near.time_s)
            sizes = [job.decode_microbatch]
            if len(places) > 1 and job.decode_microbatch is None:
                sizes.append(-(-requests // len(places)))
            for rows in sizes:
                own = job.with_changes(decode_microbatch=rows)
                each = (
                    self._priced(own.with_changes(theta=theta), step_tokens) for theta in thetas
                )
                best = next((one for one in each if one is not None), None)
                found += [] if best is None else [replace(best, places=tuple(places))]
        return max(found, key=self.worth, default=None)

    def _priced(self, job: Problem, step_tokens: int) -> EnginePlan | None:
        """Return the plan of a job at its theta."""
        options = replace(
            self.options, kvs=(), time_limit_s=min(ENGINE_S, self.options.time_limit_s)
        )
        try:
            solved = best_plan(job, options)
            valued = solved.problem
            if options.budget is not None:
                valued = valued.with_changes(theta=0.0)
            plan = checked_plan(valued, solved.outcome, self.path, options.prefer)
        except (DoesNotFitError, Unfinished):
            return None
        return self.engine_of(plan, step_tokens)

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
