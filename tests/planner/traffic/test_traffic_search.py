"""Plans for live traffic: the steady state is what the simulator settles at, the best is chosen."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import accumulate, chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.cli.show_simulation import highest_line
from llmpq.planner.cli.show_traffic import engines_in_words, traffic_job
from llmpq.planner.evaluate.engine_simulation import EngineModel, simulate
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.make import make_plan
from llmpq.planner.problem.outcome import Assignment, Outcome, Stage
from llmpq.planner.problem.requests import PlanRequest, TrafficFlags
from llmpq.planner.solving.answer import checked_plan
from llmpq.planner.solving.count_vectors import CountVectors
from llmpq.planner.solving.device_groups import with_groups
from llmpq.planner.traffic import rates, traffic_search
from llmpq.planner.traffic.engine_plans import EnginePlan, EnginePlanner
from llmpq.planner.traffic.named_traffic import NamedTraffic, named_traffic
from llmpq.planner.traffic.rates import RateFound, highest_rate, kept_apart, measured_at
from llmpq.planner.traffic.steady_state import MeanLengths, SteadyState, best_state, steady_state
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology, read_plan
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.service_measures import ServiceLimits, ServiceMeasures
from llmpq.traffic import Arrival, at_rate, poisson_traffic, rate_of, repeated

pytestmark = pytest.mark.pure


LIMITED: Any = {"prompt": "64,256", "gen": "16,48", "rate": "max", "ttft": 0.5, "tpot": 0.05}


def _model(devices: str, batch: int) -> EngineModel:
    plan = make_plan(
        "opt-1.3b", devices=devices, bits="16", batch=batch, prompt_len=128, gen_len=64
    )
    return EngineModel.of_plan(plan, max_num_batched_tokens=256)


def _even(count: int) -> NamedTraffic:
    arrivals = tuple(Arrival(0.0, 128, 64) for _ in range(count))
    return NamedTraffic(arrivals=arrivals, limits=ServiceLimits(), rate_per_s=None)


@pytest.mark.parametrize(("devices", "batch"), [("t4", 8), ("t4:2", 8), ("v100,t4", 16)])
def test_what_is_simulated_settles_at_the_steady_state(devices: str, batch: int) -> None:
    model, traffic = _model(devices, batch), _even(10 * batch)
    found = best_state(model, MeanLengths.of(traffic), ServiceLimits())
    assert found is not None and found.running == batch
    served = simulate([model], traffic.arrivals)
    ends = sorted(one.end_s for one in served)
    first, last = 3 * batch, 8 * batch  # the pipeline is full
    rate = (last - first) / (ends[last] - ends[first])
    assert rate == pytest.approx(found.rate_per_s, rel=0.1)
    mean = ServiceMeasures.of(served[first:last], ServiceLimits()).tpot_s.mean
    assert mean == pytest.approx(found.tpot_s, rel=0.1)


def test_layers_lie_where_a_full_pipeline_is_quickest() -> None:
    """Not where a batch of one micro-batch is: stages work at once, so the busiest counts."""
    asked = {"prompt": "1200", "gen": "200", "rate": "max", "ttft": 2.0, "tpot": 0.1}
    job, traffic, _ = traffic_job(
        PlanRequest(model="llama-3.1-8b", devices="4090,3060", bits="16", requests=8, **asked)
    )
    planner = EnginePlanner(job.problem, job.options, None, MeanLengths.of(traffic), traffic.limits)
    names = [device.name for device in job.problem.cluster.devices]
    found, whole = planner.plan(names, 64, 512), planner.job(names, 64, 512)
    assert found is not None and [len(stage.layers) for stage in found.plan.stages] != [1, 31]
    rates = []
    for cut in range(22, 32):
        ends = ((0, 0, cut), (1, cut, 32))
        stages = tuple(Stage(cls=c, start=a, end=b, choices=(0,) * (b - a)) for c, a, b in ends)
        given = Assignment(prefill_microbatch=8, decode_microbatch=32, stages=stages)
        if fits(whole, given):
            outcome = Outcome(
                method="uniform",
                status="baseline",
                assignment=given,
                value=0,
                bound=None,
                seconds=0,
            )
            engine = planner.engine_of(checked_plan(whole, outcome, None), 512)
            rates += [] if engine is None else [engine.steady.rate_per_s]
    assert len(rates) > 3 and found.steady.rate_per_s >= 0.98 * max(rates)


def test_limits_bound_how_many_run_at_once() -> None:
    model, lengths = _model("t4", 64), MeanLengths.of(_even(4))
    free = best_state(model, lengths, ServiceLimits())
    assert free is not None
    bound = ServiceLimits(tpot_s=free.tpot_s * 0.5)
    few = best_state(model, lengths, bound)
    assert few is not None and few.running < free.running and few.tpot_s <= free.tpot_s * 0.5
    assert best_state(model, lengths, ServiceLimits(tpot_s=1e-6)) is None
    assert steady_state(model, lengths, 65) is None


@pytest.mark.parametrize(("devices", "prompt"), [("t4", 128), ("t4:2", 1024), ("v100,t4", 1024)])
def test_a_request_that_runs_alone_decodes_without_the_prompts_of_others(
    devices: str, prompt: int
) -> None:
    model = _model(devices, 16)
    arrivals = tuple(Arrival(1e4 * number, prompt, 16) for number in range(4))
    traffic = NamedTraffic(arrivals=arrivals, limits=ServiceLimits(), rate_per_s=None)
    alone = ServiceMeasures.of(simulate([model], arrivals), ServiceLimits()).tpot_s.mean
    found = steady_state(model, MeanLengths.of(traffic), 1)
    assert found is not None and found.tpot_s == pytest.approx(alone, rel=0.05)
    limits = ServiceLimits(tpot_s=1.1 * alone)
    assert best_state(model, MeanLengths.of(traffic), limits) is not None
    assert kept_apart([model], arrivals, limits, 1.0)
    assert not kept_apart([model], arrivals, ServiceLimits(tpot_s=0.9 * alone), 1.0)


def test_no_rate_is_looked_for_where_a_request_alone_is_late() -> None:
    model, traffic = _model("t4", 4), _even(8)
    found = highest_rate([model], traffic.arrivals, ServiceLimits(ttft_s=1e-6), guess_per_s=1.0)
    assert found.rate_per_s == 0.0 and found.measures.attained == 0.0


def test_a_rate_that_is_not_found_in_time_is_no_rate() -> None:
    """Nor is a simulation ended that was not; what was found before stays."""
    model, traffic = _model("t4", 4), _even(8)
    with pytest.raises(TimeoutError):
        highest_rate([model], traffic.arrivals, ServiceLimits(ttft_s=1.0), deadline_s=0.0)
    with pytest.raises(TimeoutError):
        highest_rate([model], traffic.arrivals, ServiceLimits(), deadline_s=0.0)


@pytest.mark.parametrize("words", [["--rate", "max", "--ttft", "1"], ["--rate", "3"]])
def test_traffic_keeps_the_time_limit_though_no_rate_was_found(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    plan = _planned(["--devices", "t4,v100", "--time-limit", "0.01", *words], path)
    traffic = plan.plans[0].traffic
    assert traffic is not None and traffic.highest_rate_per_s is None
    assert traffic.requests == traffic.predicted.requests == 30
    text = " ".join(capsys.readouterr().out.split())
    assert "highest rate: not found before --time-limit ended the search; in a steady" in text
    assert ("requests within TTFT 1 s" in text) == ("--ttft" in words)


@pytest.mark.parametrize("limit_s", [0.4, pytest.param(30.0, marks=pytest.mark.seldom)])
def test_another_load_changes_no_answer(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is of work: also where the time of day is over, and where work ends the search."""
    request = PlanRequest(model="opt-1.3b", devices="t4:2", bits="16", requests=10, **LIMITED)
    job, traffic, objective = traffic_job(replace(request, time_limit=limit_s))

    def answered() -> tuple[Any, ...]:
        found = traffic_search.search_traffic(job.problem, job.options, None, traffic, objective)
        rates = {name: one and one.rate.rate_per_s for name, one in found.beside.items()}
        engines = [one.plan.stages for one in found.best.engines]
        return engines, found.best.rate.rate_per_s, rates, found.tried, found.complete

    quiet = answered()
    now = accumulate(repeat(1e6))
    monkeypatch.setattr(time, "perf_counter", now.__next__)
    assert answered() == quiet and quiet[-1] == (limit_s > 1)


def test_on_a_slow_machine_the_search_ends_by_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    job, traffic, objective = traffic_job(
        PlanRequest(model="opt-1.3b", devices="v100,t4", bits="16", requests=20, **LIMITED)
    )
    times = chain([0.0], repeat(1e9))
    monkeypatch.setattr(traffic_search, "time", SimpleNamespace(thread_time=times.__next__))
    found = traffic_search.search_traffic(job.problem, job.options, None, traffic, objective)
    assert not found.simulated and not found.complete and found.tried == 1


def test_cards_share_stages_of_live_traffic_where_that_is_quickest(tmp_path: Path) -> None:
    """A model that no card holds, over a quick link; and not where the shares are refused."""
    nodes = [{"name": "n", "devices": [{"kind": "T4", "count": 2, "memory": "2.6 GiB"}]}]
    link = {"gbps": 2000, "latency_us": 1}
    cluster = tmp_path / "c.json"
    cluster.write_text(json.dumps({"name": "c", "nodes": nodes, "links": {"within_node": link}}))
    words = ["--cluster", str(cluster), "--rate", "0.2", "--objective", "latency"]
    plan = _planned(words, tmp_path / "plan.json")
    assert isinstance(plan, Plan) and [stage.shares for stage in plan.stages] == [(1, 1)]
    plan = _planned([*words, "--tensor-parallel", "1"], tmp_path / "alone.json")
    assert isinstance(plan, Plan) and len(plan.stages) == 2


@pytest.mark.thin
@pytest.mark.parametrize(
    "limits",
    [
        ServiceLimits(ttft_s=1.0),
        pytest.param(ServiceLimits(ttft_s=30.0), marks=pytest.mark.seldom),
        pytest.param(ServiceLimits(tpot_s=0.1), marks=pytest.mark.seldom),
        ServiceLimits(ttft_s=2.0, tpot_s=0.1),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_highest_rate_lasts(limits: ServiceLimits, count: int) -> None:
    """Of a traffic that ends before engines are full, too; the same of any number of requests."""
    models = [_model("t4", 8)] * count
    short = poisson_traffic([64, 256], [16, 48], requests=12)
    long = poisson_traffic([64, 256], [16, 48], requests=200 * count, seed=1)
    found = highest_rate(models, short, limits).rate_per_s
    ends = sorted(one.end_s for one in simulate(models, at_rate(long, math.inf)))
    full = 120 * count / (ends[160 * count] - ends[40 * count])
    assert 0 < found <= 1.1 * full
    lasting = simulate(models, at_rate(long, 0.8 * found))[16 * count :]
    assert ServiceMeasures.of(lasting, limits).attained >= 0.9
    assert highest_rate(models, long, limits).rate_per_s == pytest.approx(found, rel=0.25)


def test_engines_alike_keep_up_as_many_times_the_rate_of_one() -> None:
    model, limits = _model("t4", 8), ServiceLimits(ttft_s=1.0)
    traffic = poisson_traffic([64, 256], [16, 48], requests=12)
    one, four = (highest_rate([model] * n, traffic, limits).rate_per_s for n in (1, 4))
    assert 3.4 * one < four < 5.5 * one


def test_a_repeated_traffic_has_its_rate_and_finds_no_prompt_again() -> None:
    rows = (Arrival(0.0, 600, 4, (7, 8)), Arrival(1.0, 600, 4, (7, 9)), Arrival(3.0, 600, 4, (7,)))
    again = repeated(rows, 8)
    assert len(again) == 9 and again[:3] == rows
    assert rate_of(again) == pytest.approx(rate_of(rows))
    assert [one.blocks[0] for one in again[::3]] == [7, 10, 13]
    assert all(early.at_s < late.at_s for early, late in zip(again, again[1:], strict=False))
    assert {one.at_s for one in repeated(_even(3).arrivals, 7)} == {0.0}
    assert repeated(rows, 2) == rows


@pytest.mark.parametrize("limit", [[], ["--time-limit", "0.01"]])
def test_a_plan_predicts_what_its_simulation_gives(
    limit: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the rate that was given, also where only the steady state of the engines is known."""
    path = tmp_path / "plan.json"
    given = ["--rate", "12", "--ttft", "0.5", "--tpot", "0.05"]
    plan = _planned(["--devices", "t4:2", "--prefer", "speed", *given, *limit], path)
    assert plan.plans[0].traffic is not None
    assert isinstance(plan, Topology) or limit
    capsys.readouterr()
    assert main(["simulate", str(path), *TRAFFIC, *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    predicted = plan.plans[0].traffic.predicted.model_dump(mode="json")
    assert {name: found[name] for name in predicted} == predicted


def test_a_limit_that_only_a_request_alone_keeps_is_planned_for(tmp_path: Path) -> None:
    flags = ["--devices", "t4:2", "--prompt", "1024", "--gen", "8", "--rate", "0.05"]
    job: Any = {"bits": "16", "batch": 1, "prompt_len": 1024, "gen_len": 8}
    plan = make_plan("opt-1.3b", devices="t4:2", tensor_parallel="1", **job)
    assert plan.predicted is not None
    decode_s = plan.predicted.decode_s / 7
    limits = ["--requests", "8", "--ttft", "60", "--tpot", f"{1.1 * decode_s}", "--bits", "16"]
    path = tmp_path / "plan.json"
    quick = ["--time-limit", "5"]  # how good the plan is, is not looked at here
    assert main(["--model", "opt-1.3b", *flags, *limits, *quick, "-o", str(path)]) == 0
    assert main(["check", str(path)]) == 0


def test_lengths_of_traffic_have_the_units_of_other_lengths() -> None:
    flags = TrafficFlags(prompt="1k, 1.5k,300", gen="1k", rate="1", requests=60)
    traffic = named_traffic(flags)
    assert {*traffic.prompt_tokens} == {1024, 1536, 300} and {*traffic.output_tokens} == {1024}
    for wrong in ("1k,0", "", ",", "4kb", "-5", "1.5"):
        with pytest.raises(ValueError, match="--prompt must be numbers of tokens, such as"):
            named_traffic(replace(flags, prompt=wrong))


TRAFFIC = ["--prompt", "64,256", "--gen", "16,48", "--requests", "30"]


def _planned(words: list[str], path: Path) -> Plan | Topology:
    assert main(["--model", "opt-1.3b", "--bits", "16", *TRAFFIC, *words, "-o", str(path)]) == 0
    assert main(["check", str(path)]) == 0
    return read_plan(path)


def test_cards_that_hold_the_model_are_engines_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--devices", "t4:2", "--rate", "max", "--ttft", "0.5", "--tpot", "0.05"]
    plan = _planned(words, tmp_path / "plan.json")
    text = capsys.readouterr().out
    assert isinstance(plan, Topology) and len(plan.engines) == 2
    for own in plan.plans:
        traffic = own.traffic
        assert traffic is not None and traffic.objective == "rate"
        assert traffic.predicted.attained >= 0.9
        assert traffic.rate_per_s == traffic.highest_rate_per_s > 0
    for line in ("traffic: 30 requests", "highest rate:", "best single card:", "one pipeline:"):
        assert line in text
    assert "replicas: the same" in text
    assert "even tensor parallel: " in text
    assert "on T4:2: live traffic, " in text and "sent at once" not in text


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(
            1,
            ["--rate", "max", "--ttft", "0.5", "--tpot", "0.05"],
            marks=pytest.mark.seldom,
        ),
        (2, ["--rate", "max", "--ttft", "0.5", "--tpot", "0.05"]),
        (2, ["--rate", "1", "--objective", "latency"]),
        (3, ["--rate", "1"]),
    ],
)
def test_so_many_engines_as_are_asked_for(number: int, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = _planned(["--devices", "t4:3", "--engines", str(number), *words], path)
    assert len(plan.plans) == number
    used = [member.device for own in plan.plans for stage in own.stages for member in stage.members]
    assert len(used) == len(set(used)) >= number


def test_several_engines_whose_answers_are_to_end_soon_are_the_quick_ones() -> None:
    """Joined with a T4 each, two V100 serve more requests, and each of them later."""
    request = PlanRequest(model="opt-1.3b", devices="v100:2,t4:2", prompt="64", gen="10", rate="1")
    job, traffic, _ = traffic_job(request)
    vectors = CountVectors(job.problem)
    v100, t4, both = (vectors.alone(counts) for counts in ((1, 0), (0, 1), (1, 1)))
    known = {
        (vectors.canonical(v), 64, 512): SimpleNamespace(
            steady=SteadyState(running=1, rate_per_s=rate, ttft_s=0.0, tpot_s=tpot_s), loss=0.0
        )
        for v, rate, tpot_s in ((v100, 2.0, 0.1), (t4, 0.5, 0.4), (both, 5.0, 0.3))
    }
    planner = SimpleNamespace(
        price=0.0, lengths=MeanLengths.of(traffic), worth=lambda one: one.steady.rate_per_s
    )
    search = traffic_search._Search(
        planner=cast(Any, planner),
        vectors=vectors,
        end_s=0.0,
        traffic=traffic,
        objective="latency",
        exactly=2,
        known=cast(Any, known),
    )
    chosen = traffic_search._chosen(search)
    assert chosen == [v100, v100]
    assert traffic_search._others(search, chosen) == {2: [both, both]}  # where requests wait
    search.exactly = None
    assert traffic_search._chosen(search) == [v100]
    assert traffic_search._others(search, [v100]) == {2: [v100, v100]}
    search.objective, search.exactly = "throughput", 2
    assert traffic_search._chosen(search) == [both, both]


def test_more_engines_than_cards_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "opt-1.3b", "--bits", "16", *TRAFFIC, "--devices", "t4", "--rate", "1"]
    assert main([*words, "--engines", "2"]) == 2
    assert "--engines 2 needs as many devices, got 1; ask for fewer" in capsys.readouterr().err
    small = [*words[:-3], "t4=3GB+320GB/s+65TFLOPS:2", *words[-2:]]
    assert main([*small, "--engines", "2"]) == 5
    assert "no 2 engines on these devices serve requests of" in capsys.readouterr().err
    assert main([*words, "--engines", "two"]) == 2


@pytest.mark.parametrize(
    ("words", "unit"),
    [
        (["--rate", "max", "--tpot", "0.05"], "requests/s"),
        (["--rate", "3"], "tokens/s"),
        pytest.param(
            ["--rate", "0.5", "--objective", "latency"], "s an answer", marks=pytest.mark.seldom
        ),
    ],
)
def test_simpler_ways_are_beside_the_plan_in_one_measure(
    words: list[str], unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is best in its own column."""
    _planned(["--devices", "t4,v100", *words, "--requests", "70"], tmp_path / "plan.json")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first = next(k for k, line in enumerate(lines) if line.startswith("this plan: "))
    found = {}
    for line in lines[first : first + 5]:
        name, _, said = line.partition(": ")
        found[name] = None if said == "the same" else float(said.split()[0])
        assert found[name] is None or f" {unit}" in said
    names = {"best single card", "one pipeline", "even tensor parallel", "replicas"}
    assert set(found) == {"this plan", *names}
    own = found.pop("this plan")
    assert own is not None
    others = [value for value in found.values() if value is not None]
    assert others and (own <= min(others) if "answer" in unit else own >= max(others))


@pytest.mark.parametrize("rate", ["max", pytest.param("500", marks=pytest.mark.seldom)])
def test_no_simple_way_is_better_than_the_answer(rate: str) -> None:
    """Each of them in steps of all sizes, for all numbers of requests at once.

    Prompts are near the limit: by their steady state others would be chosen. Also at a rate that is
    not kept.
    """
    flags = {"prompt": "64,900", "gen": "8,48", "rate": rate, "ttft": 0.25, "tpot": 0.05}
    job, traffic, objective = traffic_job(
        PlanRequest(model="opt-1.3b", devices="v100,t4", bits="16", requests=30, **flags)
    )
    found = traffic_search.search_traffic(job.problem, job.options, None, traffic, objective)
    lengths = MeanLengths.of(traffic)
    planner = EnginePlanner(job.problem, job.options, None, lengths, traffic.limits)

    def rate(models: list[EngineModel], above: float = 0.0) -> float:
        return highest_rate(models, traffic.arrivals, traffic.limits, above_per_s=above).rate_per_s

    def highest(names: list[str]) -> tuple[float, EngineModel | None]:
        kept: tuple[float, EngineModel | None] = 0.0, None
        for tokens in traffic_search.STEP_TOKENS:
            plans = (
                planner.plan(names, requests, tokens, solved_for=traffic_search.STEP_TOKENS[0])
                for requests in traffic_search.REQUESTS_AT_ONCE
            )
            engine = max(filter(None, plans), key=planner.worth, default=None)
            if engine is not None:
                own = rate([engine.model], kept[0])
                kept = (own, engine.model) if own > kept[0] else kept
        return kept

    cards = [(cls.count, highest([cls.first.name])) for cls in job.problem.classes]
    simple = [rate for _, (rate, _) in cards]
    simple.append(rate([model for count, (_, model) in cards for _ in range(count) if model]))
    simple.append(highest([device.name for device in job.problem.cluster.devices])[0])
    for requests in traffic_search.REQUESTS_AT_ONCE:
        plan = planner.filled(requests, 512)
        filled = None if plan is None else planner.engine_of(plan, 512)
        simple += [] if filled is None else [rate([filled.model])]
    printed = {name: one for name, one in found.beside.items() if one is not None}
    assert set(found.beside) == {"card", "pipeline", "shared", "replicas"}
    assert found.best.rate.rate_per_s >= max(simple)
    for one in (found.best, *printed.values()):  # all by one measure
        assert one.rate.rate_per_s == rate([engine.model for engine in one.engines])
        assert found.best.rate.rate_per_s >= one.rate.rate_per_s


@pytest.mark.parametrize(
    ("alone", "joined", "engines"),
    [(0.9, 0.2, 3), (0.2, 1.0, 1), (0.3, 0.3, 3)],
)
def test_engines_are_taken_by_what_they_keep_when_simulated(
    alone: float, joined: float, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by their steady states: one device each keeps a share of it, of several another."""

    def rate(self: Any, engine: EnginePlan, above_per_s: float = 0.0) -> RateFound | None:
        several = len(engine.places) > 1 or not isinstance(engine.places[0], str)
        found = engine.steady.rate_per_s * (joined if several else alone)
        measure = lambda: measured_at([engine.model], traffic.arrivals, traffic.limits)  # noqa: E731
        return RateFound(rate_per_s=found, measure=measure) if found > above_per_s else None

    def together(self: Any, every: tuple[EnginePlan, ...]) -> RateFound:
        known = [found for one in every if (found := rate(self, one)) is not None]
        return replace(known[0], rate_per_s=sum(one.rate_per_s for one in known))

    monkeypatch.setattr(traffic_search._Search, "rate", rate)
    monkeypatch.setattr(traffic_search._Search, "together", together)
    job, traffic, objective = traffic_job(
        PlanRequest(model="opt-1.3b", devices="v100,t4:2", bits="16", requests=30, **LIMITED)
    )
    found = traffic_search.search_traffic(job.problem, job.options, None, traffic, objective)
    assert len(found.best.engines) == engines
    used = [name for engine in found.best.engines for name in engine.places]
    assert len(used) == len(set(used)) and (engines == 1 or len(used) == 3)


def test_an_engine_of_several_has_parts_of_which_groups_are_had_in_other_shares() -> None:
    request = PlanRequest(model="opt-1.3b", devices="5090,3090:2", prompt="512", gen="64", rate="1")
    job, _, _ = traffic_job(request)
    grouped = with_groups(job.problem, job.options.kvs)
    assert grouped is not None
    vectors = CountVectors(grouped.problem)
    one, two = (vectors.alone(counts) for counts in ((1, 0), (0, 1)))
    assert vectors.parts(vectors.whole) == [one, two]
    assert vectors.mem_gbps(vectors.whole) == vectors.mem_gbps(one) + 2 * vectors.mem_gbps(two)
    for group in vectors.groups:
        others = vectors.same_devices(group)
        assert vectors.parts(group) == [group] and group not in others
        assert {vectors.used(other) for other in others} <= {vectors.used(group)}
        assert all(vectors.same_devices(other).count(group) == 1 for other in others)
    assert any(vectors.same_devices(group) for group in vectors.groups)


def test_a_rate_that_is_kept_leaves_the_rest_to_quality(tmp_path: Path) -> None:
    """4 bits would be quickest; 8 lose as good as nothing, and keep the rate, too."""
    path = tmp_path / "plan.json"
    flags = ["--model", "qwen3-14b", "--devices", "3090", *TRAFFIC, "--ttft", "2", "--tpot", "0.1"]
    assert main([*flags, "--rate", "0.5", "-o", str(path)]) == 0
    plan = read_plan(path)
    assert isinstance(plan, Plan) and plan.traffic is not None and plan.predicted is not None
    assert plan.predicted.sum_omega < 0.01
    assert plan.traffic.predicted.attained >= 0.9 and (plan.traffic.highest_rate_per_s or 0) >= 0.5


def _trace(path: Path, requests: int) -> str:
    rows = ["at_s,prompt_tokens,output_tokens", *(f"{at},64,16" for at in range(requests))]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def test_of_a_longer_trace_it_is_said_how_many_requests_are_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, plan = _trace(tmp_path / "trace.csv", 50), str(tmp_path / "plan.json")
    words = ["--model", "opt-1.3b", "--bits", "16", "--devices", "t4", "--trace", trace]
    for count, said in ((20, "traffic: the first 20 of 50 requests (--requests N: "), (60, "50 r")):
        assert main([*words, "--requests", str(count), "-o", plan]) == 0
        assert said in capsys.readouterr().out
    assert main(["simulate", plan, "--trace", trace, "--requests", "20"]) == 0
    assert "traffic: the first 20 of 50 requests (" in capsys.readouterr().out
    assert main(["simulate", plan, "--trace", trace]) == 0
    assert "the first" not in capsys.readouterr().out


def test_a_rate_beside_which_no_higher_ones_were_tried_is_said_to_be_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time is over when a second rate is simulated."""
    tried = list[float]()

    def once(*args: Any) -> float:
        tried.append(0.0)
        if len(tried) > 2:  # the first is of requests far apart
            raise TimeoutError
        return 0.0

    monkeypatch.setattr(rates, "missed_share", once)
    traffic, limits = _even(20), ServiceLimits(tpot_s=1.0)
    model = _model("t4", 8)
    found = highest_rate([model], traffic.arrivals, limits, guess_per_s=0.01)
    assert 0.0095 < found.rate_per_s <= 0.01 and found.cut
    line = highest_line(found.rate_per_s, replace(traffic, limits=limits), cut=found.cut)
    assert line.startswith("highest rate: at least 0.00989 requests/s, with 90% of the requests")
    tried.clear()
    monkeypatch.setattr(rates, "missed_share", lambda *_: 0.0)
    assert not highest_rate([model], traffic.arrivals, limits, guess_per_s=0.01).cut


@pytest.mark.parametrize(
    ("model", "devices", "shares", "words"),
    [
        ("opt-1.3b", "3090:2", "2", "2 x RTX-3090 in tensor parallel"),
        ("opt-1.3b", "a100-40gb,3090", "3:1", "A100-40GB + RTX-3090 in tensor parallel"),
        ("opt-30b", "3090:2,4090", "2", "(2 x RTX-3090 in tensor parallel) + RTX-4090"),
        ("opt-30b", "3090:4", "2", "2 x (2 x RTX-3090 in tensor parallel)"),
    ],
)
def test_engines_are_said_stage_by_stage(model: str, devices: str, shares: str, words: str) -> None:
    """Devices of two stages are not said to share one."""
    plan = make_plan(
        model, devices=devices, tensor_parallel=shares, bits="16", batch=1, prompt_len=64, gen_len=9
    )
    one = SimpleNamespace(plan=plan, step_tokens=512)
    said = engines_in_words([cast(EnginePlan, one)])
    assert said == f"{words} (1 request at once, steps of 512 tokens, 16-bit KV)"


def test_a_change_of_devices_is_compared_by_a_plan_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "opt-1.3b", "--devices", "t4", *TRAFFIC, "--rate", "1"]
    assert main([*words, "--what-if", "+t4"]) == 2
    assert capsys.readouterr().err.endswith(
        "leave one of them out; plan for the changed devices beside it\n"
    )


@pytest.mark.parametrize(("rate", "kept"), [("1", True), ("500", False)])
def test_a_rate_that_is_not_kept_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: str, kept: bool
) -> None:
    plan = _planned(["--devices", "t4", "--rate", rate, "--ttft", "0.2"], tmp_path / "plan.json")
    assert isinstance(plan, Plan) and plan.traffic is not None
    assert (plan.traffic.predicted.attained >= 0.9) is kept
    text = capsys.readouterr().out
    assert (f"{rate} requests/s are not kept: " not in text) is kept
    # What is weighed where a rate is kept stands beside the rates.
    mean = plan.traffic.predicted.latency_s.mean
    assert f" requests/s; at the traffic's rate {mean:.3g} s an answer" in text


def test_few_requests_are_all_compared_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _planned(["--devices", "t4", "--rate", "3"], tmp_path / "plan.json")
    text = capsys.readouterr().out
    assert main(["verify", str(tmp_path / "plan.json")]) == 2
    assert "is of live traffic, whose rate is simulated" in capsys.readouterr().err
    assert "requests alone" not in text and "this plan: " in text
    assert "on T4: live traffic, " in text and "sent at once" not in text


def test_a_run_takes_the_step_and_the_requests_of_the_plan(tmp_path: Path) -> None:
    words = ["--devices", "t4", "--rate", "4", "--tpot", "0.05"]
    plan = _planned(words, tmp_path / "plan.json")
    assert isinstance(plan, Plan) and plan.traffic is not None and plan.inputs is not None
    limits = PoolPlan(plan, plan.inputs.model, EngineOptions()).limits
    assert limits.step_tokens == plan.traffic.step_tokens
    assert limits.max_rows == plan.workload.batch
    own = PoolPlan(plan, plan.inputs.model, EngineOptions(max_num_batched_tokens=96)).limits
    assert own.step_tokens == 96


def test_a_model_that_needs_both_cards_is_one_pipeline(tmp_path: Path) -> None:
    words = ["--devices", "t4=3GB+320GB/s+65TFLOPS,v100=3GB+900GB/s+112TFLOPS"]
    plan = _planned([*words, "--rate", "2"], tmp_path / "plan.json")
    assert isinstance(plan, Plan) and len(plan.stages) == 2
    assert plan.traffic is not None and plan.traffic.objective == "throughput"


def test_the_lowest_latency_is_of_the_quickest_card(tmp_path: Path) -> None:
    words = ["--devices", "t4,v100", "--rate", "0.2", "--objective", "latency"]
    plan = _planned(words, tmp_path / "plan.json")
    (stage,) = [stage for own in plan.plans for stage in own.stages]
    assert stage.kind.startswith("V100")


def test_the_lowest_latency_has_the_bits_of_few_requests(tmp_path: Path) -> None:
    """Of 64 requests 16 bits are quickest, their prompts are; of those that come here 8, by far."""
    path = tmp_path / "plan.json"
    flags = ["--model", "llama-3.1-8b", "--devices", "3090", "--prompt", "500", "--gen", "100"]
    words = ["--rate", "0.1", "--objective", "latency", "--requests", "8"]
    assert main([*flags, *words, "-o", str(path)]) == 0
    free = read_plan(path).plans[0].traffic
    assert main([*flags, *words, "--bits", "8", "-o", str(path)]) == 0
    eight = read_plan(path).plans[0].traffic
    assert free is not None and eight is not None
    assert free.predicted.latency_s.mean < 1.1 * eight.predicted.latency_s.mean


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--rate", "1", "--objective", "rate"], 2, "give --ttft, --tpot or both"),
        (["--rate", "max", "--objective", "latency"], 2, "give --rate R, not max"),
        (["--rate", "1", "--batch", "4"], 2, "--batch has no effect with live traffic"),
        (["--rate", "1", "--context", "4k"], 2, "--context has no effect with live traffic"),
        (["--rate", "1", "--pareto"], 2, "--pareto is of a batch job"),
        (["--rate", "1", "--what-if", "+t4"], 2, "--what-if is of a batch job"),
        (["--rate", "1", "--method", "ilp"], 2, "planned by --method exact"),
        (["--rate", "1", "--ttft", "200ms"], 2, "number of seconds such as 0.5, without a unit"),
        (["--rate", "1", "--time-limit", "1min"], 2, "without a unit, got '1min'"),
        (["--rate", "1", "--tpot", "1e-6"], 5, "within --tpot 1e-06 s, even one at a time"),
        (["--rate", "1", "--prompt", "3000"], 2, "has 2,048 positions"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "opt-1.3b", "--devices", "t4", *TRAFFIC, *words]
    assert main(flags) == code
    assert said in capsys.readouterr().err


def test_objectives_of_traffic_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "opt-1.3b", "--devices", "t4", "--objective", "rate"]) == 2
    assert "--objective rate is of live traffic" in capsys.readouterr().err


def test_the_plan_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    flags = ["--model", "opt-1.3b", "--devices", "t4", *TRAFFIC, "--rate", "2", "--json"]
    assert main(flags) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["traffic"]["requests"] == 30 and data["traffic"]["predicted"]["ttft_s"]["p50"] > 0
