"""Tokens/s that `devices add` predicts: of the engine that runs, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmpq.planner.make import make_plan
from llmpq.plans.plan import Plan
from llmpq.runtime.elastic import elastic
from llmpq.runtime.elastic.elastic import rates
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.launch.engine_starter import Replanned
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.simulate.simulation import EngineModel, simulate
from llmpq.traffic import Arrival

pytestmark = pytest.mark.pure


def planned(devices: str) -> Plan:
    job = {"batch": 8, "prompt_len": 1000, "gen_len": 16, "bits": "16"}
    return make_plan("opt-1.3b", devices=devices, tensor_parallel=1, **job)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    return planned("t4"), planned("t4:2")


def replanned(plans: tuple[Plan, Plan], options: EngineOptions) -> Replanned:
    before, now = plans
    assert now.inputs is not None
    limits: PoolLimits = PoolPlan(now, now.inputs.model, options).limits
    return Replanned(plan=now, options=options, limits=limits, change={}, before=before)


def simulated(plan: Plan, *, offline: bool) -> float:
    model = EngineModel.of_plan(plan, offline=offline)
    served = simulate([model], [Arrival(0.0, 1000, 16)] * 8)
    return 8 * 16 / max(one.end_s for one in served)


@pytest.mark.parametrize("offline", [True, False])
def test_both_are_of_the_engine_that_runs(plans: tuple[Plan, Plan], offline: bool) -> None:
    found = rates(plans[0], replanned(plans, EngineOptions(offline=offline)))
    assert found == pytest.approx([simulated(plan, offline=offline) for plan in plans])
    assert found[1] > found[0]


def test_live_and_offline_engines_differ(plans: tuple[Plan, Plan]) -> None:
    """A live engine takes prompts in shorter steps."""
    live, offline = (rates(plans[0], replanned(plans, EngineOptions(offline=o))) for o in (0, 1))
    assert live != offline


@pytest.mark.parametrize("why", ["drafts", "late", "no entries"])
def test_what_is_not_simulated_is_as_the_plans_say(
    plans: tuple[Plan, Plan], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replanned(plans, EngineOptions())
    if why == "drafts":
        made = replace(made, options=EngineOptions(speculate="ngram", gamma=2))
    elif why == "late":
        monkeypatch.setattr(elastic, "SIMULATION_S", -1.0)
    else:
        made = replace(made, before=plans[0].model_copy(update={"inputs": None}))
    said = [plan.predicted.output_tokens_per_s for plan in plans if plan.predicted is not None]
    assert list(rates(plans[0], made)) == said
