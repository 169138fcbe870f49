"""Plans of engines for live traffic: of a group of devices, requests at once, tokens of a step.

An engine is planned as a batch job of so many requests of the mean lengths: the pool then holds
them, and layers go where such a job is quickest. A job of few requests counts longer ones, so that
the longest request of the traffic has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmpq.errors import DoesNotFitError
from llmpq.plan import ClusterRef, Plan
from llmpq.planner.answer import checked_plan
from llmpq.planner.problem.outcome import Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import best_plan
from llmpq.planner.traffic.simulated import EngineModel
from llmpq.planner.traffic.steady_state import MeanLengths, SteadyState, best_state
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


@dataclass(frozen=True)
class EnginePlanner:
    """Plans engines of a problem's devices."""

    problem: Problem
    options: SolveOptions
    path: str | None
    lengths: MeanLengths
    limits: ServiceLimits

    def job(self, devices: Sequence[str], requests: int, step_tokens: int) -> Problem:
        """Return the batch job that an engine is planned as."""
        lengths = self.lengths
        mean = lengths.prompt + lengths.output
        scale = max(1.0, lengths.longest / requests / mean)
        prompt = max(1, round(lengths.prompt * scale))
        output = max(1, round(lengths.output * scale + 0.5))
        own = self.problem.part(devices).with_job(
            batch=requests, prompt_len=prompt, gen_len=max(output, lengths.longest + 1 - prompt)
            if requests == 1 else output,
        )  # fmt: skip
        return own.with_changes(chunk=min(step_tokens, prompt))

    def plan(self, devices: Sequence[str], requests: int, step_tokens: int) -> EnginePlan | None:
        """Return the best plan of an engine; None where none fits or none is within the limits."""
        found: list[EnginePlan] = []
        for kv in self.options.kvs or (self.problem.kv,):
            job = self.job(devices, requests, step_tokens).with_job(kv=kv)
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
                continue
            whole = self.problem.cluster
            plan = plan.model_copy(
                update={"cluster": ClusterRef(name=whole.name, fingerprint=whole.fingerprint())}
            )
            model = EngineModel.of_plan(plan, max_num_batched_tokens=step_tokens)
            steady = best_state(model, self.lengths, self.limits)
            if steady is None or model.limits.room < self.lengths.longest:
                continue
            model = replace(model, speed=steady.rate_per_s)
            found.append(EnginePlan(plan=plan, model=model, steady=steady, step_tokens=step_tokens))
        return max(found, key=lambda one: one.steady.rate_per_s, default=None)
