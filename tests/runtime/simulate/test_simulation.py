"""The simulator: hand-counted steps, the planner's own times, limits, engines, no torch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.planner.make import make_plan
from llmpq.plans.plan import Plan
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import MicroBatch
from llmpq.runtime.simulate import engine, rounds
from llmpq.runtime.simulate.counted_scheduler import CountedScheduler
from llmpq.runtime.simulate.simulation import EngineModel, simulate, simulate_plan
from llmpq.runtime.simulate.step_times import StepRows, stage_times
from llmpq.service_measures import Quantiles, ServedRequest, ServiceLimits, ServiceMeasures
from llmpq.traffic import Arrival, at_rate, poisson_traffic

pytestmark = pytest.mark.pure


def _plan(devices: str, **job: int) -> Plan:
    work = {"batch": 8, "prompt_len": 256, "gen_len": 32, **job}
    return make_plan("opt-1.3b", devices=devices, bits="16", tensor_parallel=1, **work)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    return _plan("t4:2", batch=1)


def test_one_request_takes_what_the_plan_predicts(pipeline: Plan) -> None:
    assert pipeline.predicted is not None
    model = EngineModel.of_plan(pipeline)
    whole = replace(model, limits=replace(model.limits, fill_tokens=0.0))  # as the plan counts it
    (served,) = simulate([whole], [Arrival(3.0, 256, 32)])
    assert served.ttft_s == pytest.approx(pipeline.predicted.prefill_s, rel=1e-6)
    assert served.latency_s == pytest.approx(pipeline.predicted.total_s, rel=1e-3)
    assert served.at_s == 3.0 and served.output_tokens == 32 and served.preemptions == 0


@pytest.mark.parametrize("tokens", [500, 1000])
def test_a_prompt_alone_has_its_first_token_sooner_in_shares(tokens: int) -> None:
    """Two stages compute at once; the shares are as quick as the best of one size."""
    model = EngineModel.of_plan(_plan("t4:2"))
    assert model.limits.num_stages == 2

    def first_s(**changed: float) -> float:
        own = replace(model, limits=replace(model.limits, **changed))
        return simulate([own], [Arrival(0.0, tokens, 2)])[0].ttft_s

    whole = first_s(fill_tokens=0.0)
    best = min(first_s(fill_tokens=0.0, step_tokens=size) for size in (32, 64, 96, 128, 160, 256))
    assert model.limits.fill_tokens > 0 and best < whole
    assert first_s() < 1.1 * best


@pytest.mark.parametrize("devices", ["t4", "t4:2", "v100,t4"])
def test_a_batch_at_once_takes_about_what_the_plan_predicts(devices: str) -> None:
    """The scheduler fills steps its own way, with prompts beside decoding rows."""
    plan = _plan(devices)
    assert plan.predicted is not None
    budget = plan.prefill_step_tokens
    found = simulate_plan(plan, [Arrival(0.0, 256, 32)] * 8, max_num_batched_tokens=budget)
    assert found.seconds == pytest.approx(plan.predicted.total_s, rel=0.15)
    assert found.requests == 8 and found.output_tokens_per_s == pytest.approx(
        8 * 32 / found.seconds
    )


def test_requests_far_apart_do_not_wait_for_each_other(pipeline: Plan) -> None:
    alone = simulate([EngineModel.of_plan(pipeline)], [Arrival(0.0, 256, 32)])[0].latency_s
    traffic = [Arrival(n * 10 * alone, 256, 32) for n in range(4)]
    for one in simulate([EngineModel.of_plan(pipeline)], traffic):
        assert one.latency_s == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(("seed", "rate"), [(0, 0.02), (1, 0.5), (2, 2.0), (2, math.inf)])
@pytest.mark.parametrize(
    ("devices", "changed"),
    [
        ("t4", {}),
        ("t4", {"tokens_ahead": 2}),
        ("t4", {"num_blocks": 11}),
        ("t4:2", {}),
        ("t4:2", {"decode_rows": 2}),
        ("t4:4", {}),
        ("t4:4", {"max_rows": 6}),
        ("v100,t4:2", {"tokens_ahead": 2}),
        ("v100,t4:2", {"num_blocks": 14}),
    ],
)
def test_rounds_passed_at_once_are_those_step_by_step(
    devices: str, changed: dict[str, int], seed: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many preemptions, prefixes found and steps, and every request at the same time."""
    model = EngineModel.of_plan(_plan(devices, prompt_len=512))
    model = replace(model, limits=replace(model.limits, **changed), host_s=1e-4 * seed)
    traffic = at_rate(poisson_traffic([40, 500, 900], [2, 90, 400], requests=24, seed=seed), rate)
    if seed == 2:
        traffic = tuple(replace(one, blocks=(n % 3, n)) for n, one in enumerate(traffic))
    steps = []
    next_micro_batch = Scheduler.next_micro_batch

    def counted(self: Scheduler) -> MicroBatch | None:
        steps.append(1)
        return next_micro_batch(self)

    monkeypatch.setattr(Scheduler, "next_micro_batch", counted)
    monkeypatch.setattr(engine, "scheduler_of", Scheduler)
    quick = simulate([model], traffic)
    asked = len(steps)
    monkeypatch.setattr(rounds, "LEAST", 10**9)
    slow = simulate([model], traffic)
    assert asked < 0.5 * (len(steps) - asked)
    for one, other in zip(quick, slow, strict=True):
        assert one.number == other.number and one.preemptions == other.preemptions
        assert one.output_tokens == other.output_tokens
        assert one.first_token_s == pytest.approx(other.first_token_s, rel=1e-9)
        assert one.end_s == pytest.approx(other.end_s, rel=1e-9)


def test_steps_from_counts_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """By either scheduler, to the last bit; where it has prefixes or windows it has its tables."""
    for devices, changed in (("t4", {"num_blocks": 11}), ("t4:4", {}), ("v100,t4:2", {})):
        model = EngineModel.of_plan(_plan(devices, prompt_len=512))
        model = replace(model, limits=replace(model.limits, **changed)).without_prefixes()
        assert isinstance(engine.scheduler_of(model.limits), CountedScheduler)
        traffic = at_rate(poisson_traffic([40, 500, 900], [2, 90, 400], requests=24, seed=3), 0.5)
        counted = simulate([model], traffic)
        with monkeypatch.context() as patched:
            patched.setattr(engine, "scheduler_of", Scheduler)
            assert simulate([model], traffic) == counted
    windows = {"window": 64, "window_blocks": 9, "host_blocks": 0}
    for more in ({"prefix_cache": True}, windows, {"snapshots": 2}):
        assert isinstance(engine.scheduler_of(replace(model.limits, **more)), Scheduler)


def test_more_requests_a_second_wait_longer() -> None:
    model = EngineModel.of_plan(_plan("t4"))
    traffic = poisson_traffic([100, 500], [8, 40], requests=40)
    means = []
    for rate in (0.05, 2.0, math.inf):
        served = simulate([model], at_rate(traffic, rate))
        assert [one.output_tokens for one in served] == [one.output_tokens for one in traffic]
        means.append(ServiceMeasures.of(served, ServiceLimits()).latency_s.mean)
    assert means[0] < means[1] < means[2]


def test_a_small_pool_preempts_and_serves_all() -> None:
    model = EngineModel.of_plan(_plan("t4"))
    small = replace(model, limits=replace(model.limits, num_blocks=8))
    traffic = [Arrival(0.0, 200, 300)] * 4
    served, plenty = simulate([small], traffic), simulate([model], traffic)
    assert [one.output_tokens for one in served] == [300] * 4
    assert sum(one.preemptions for one in served) > 0 == sum(one.preemptions for one in plenty)
    assert max(one.end_s for one in served) > max(one.end_s for one in plenty)


def test_prefixes_that_a_trace_repeats_are_not_computed_again() -> None:
    model = EngineModel.of_plan(_plan("t4", prompt_len=1024))
    assert model.limits.prefix_cache

    def ttft(blocks: Sequence[tuple[int, ...]]) -> float:
        traffic = [Arrival(n * 100.0, 1024, 4, own) for n, own in enumerate(blocks)]
        return simulate([model], traffic)[1].ttft_s

    assert ttft([(1, 2), (1, 3)]) < 0.7 * ttft([(1, 2), (4, 3)])


def test_several_engines_share_a_traffic_by_their_speed() -> None:
    quick, slow = EngineModel.of_plan(_plan("v100")), EngineModel.of_plan(_plan("t4"))
    assert quick.speed > slow.speed
    traffic = [Arrival(0.0, 256, 32)] * 60
    both = ServiceMeasures.of(simulate([quick, slow], traffic), ServiceLimits())
    for alone in (quick, slow):
        one = ServiceMeasures.of(simulate([alone], traffic), ServiceLimits())
        assert both.latency_s.mean < one.latency_s.mean


def test_a_request_without_room_is_named(pipeline: Plan) -> None:
    model = EngineModel.of_plan(pipeline)
    with pytest.raises(ValueError, match="request 1 of the traffic: the prompt is too long"):
        simulate([model], [Arrival(0.0, 10, 2), Arrival(0.0, model.limits.room + 1, 2)])


def test_plans_without_costs_are_refused(pipeline: Plan) -> None:
    bare = pipeline.model_copy(update={"inputs": None})
    with pytest.raises(ValueError, match="carries no cost entries"):
        EngineModel.of_plan(bare)


def test_goodput_counts_those_within_both_limits() -> None:
    served = [
        ServedRequest(n, 0.0, ttft, ttft + 9 * tpot, 5, 10) for n, (ttft, tpot) in enumerate(CASES)
    ]
    found = ServiceMeasures.of(served, ServiceLimits(ttft_s=1.0, tpot_s=0.1))
    assert found.attained == 0.25
    assert found.goodput_per_s == pytest.approx(1 / max(one.end_s for one in served))
    assert ServiceMeasures.of(served, ServiceLimits()).attained == 1.0
    single = ServedRequest(0, 0.0, 0.5, 0.5, 5, 1)
    assert single.tpot_s is None and ServiceLimits(tpot_s=1e-9).keeps(single)


CASES = [(0.5, 0.05), (2.0, 0.05), (0.5, 0.2), (2.0, 0.2)]


def test_quantiles_are_straight_between_values() -> None:
    found = Quantiles.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.mean, found.p50) == (3.0, 3.0)
    assert found.p90 == pytest.approx(4.6) and found.p99 == pytest.approx(4.96)
    assert Quantiles.of([7.0]).p99 == 7.0


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['ray'] = None\n"
        "import llmpq.planner.evaluate.engine_simulation"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_cpu_s_core_passes_messages_on_between_two_steps() -> None:
    """A GPU's host does it while the GPU computes."""
    gpus = EngineModel.of_plan(_plan("t4:2", batch=16))
    cpus = replace(gpus, stages=tuple(replace(stage, is_cpu=True) for stage in gpus.stages))
    rows = StepRows(chunks=[], caches=[300] * 8, samples=8)
    first, last = cpus.stages
    assert first.host_s(rows) == first.hop(rows)[0] > 0 and gpus.stages[0].host_s(rows) == 0
    traffic = [Arrival(0.0, 256, 32)] * 16
    took = [max(one.end_s for one in simulate([own], traffic)) for own in (gpus, cpus)]
    least_s = 31 * 2 * min(first.host_s(rows), last.host_s(rows))  # two groups take turns
    assert took[1] - took[0] >= 0.9 * least_s


@pytest.mark.parametrize(("num_stages", "share"), [(1, 0.5), (2, 1.0)])
def test_a_stage_alone_on_its_host_is_not_slowed_by_others(
    num_stages: int, share: float, tmp_path: Path
) -> None:
    """One CPU holds the model, or two of the host do, which share its memory's bandwidth."""
    memory = {1: ["8 GiB", "64 MiB"], 2: ["4 GiB", "4 GiB"]}[num_stages]
    devices = [{"kind": "CPU", "threads": 2, "memory": each, "reserve": 0} for each in memory]
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"name": "two", "nodes": [{"name": "a", "devices": devices}]}))
    job = {"batch": 2, "prompt_len": 64, "gen_len": 8, "bits": "16", "dtype": "float32"}
    plan = make_plan("opt-1.3b", cluster=path, **job)  # type: ignore[arg-type]
    assert plan.inputs is not None and len(plan.stages) == num_stages
    timed = [one.model_copy(update={"alone_share": 0.5}) for one in plan.inputs.costs]
    update = {"inputs": plan.inputs.model_copy(update={"costs": tuple(timed)})}
    rows = StepRows(chunks=[], caches=[70, 70], samples=2)
    pairs = zip(stage_times(plan), stage_times(plan.model_copy(update=update)), strict=True)
    for plain, own in pairs:
        assert own.seconds(rows) == pytest.approx(share * plain.seconds(rows))
