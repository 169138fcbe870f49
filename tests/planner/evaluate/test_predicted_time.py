"""The closed form against the event simulation, and against real runs of the paper."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import (
    StageTimes,
    job_time,
    makespan,
    pipeline_time,
)
from llmpq.planner.evaluate.simulator import (
    replay,
    reported_time,
    simulate,
    step_by_step_time,
    step_note,
)
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.numbers import distinct_sizes, microbatch_pairs, sizes_of
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Problem
from reference.published_time import published_code_time
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]

DATA = Path(__file__).resolve().parents[3] / "benchmarks" / "data"
REAL = {
    row["plan"]: row
    for row in csv.DictReader((DATA / "llmpq_cluster3_e2e_validation.csv").open())
    if row["measured_e2e_s"]
}
"""Four plans on 3 x T4 + V100, OPT-30b: their stage times (ms) and what they took (s)."""


def _random_times(rng: random.Random, stages: int) -> StageTimes:
    def draw(count: int, scale: float) -> tuple[float, ...]:
        return tuple(rng.uniform(0, 1) ** 2 * scale for _ in range(count))

    hop, back = rng.choice([0.0, 0.05, 2.0]), rng.choice([0.0, 1e-3, 1e-2])
    ways_p = (*draw(stages - 1, hop), back * rng.random() if stages > 1 else 0.0)
    ways_d = (*draw(stages - 1, hop), back * rng.random() if stages > 1 else 0.0)
    busy = rng.choice([0.0, 0.5, 1.0])
    return StageTimes(
        prefill_s=draw(stages, 1.0),
        decode_s=draw(stages, 1.0),
        hop_prefill_s=ways_p[:-1],
        hop_decode_s=ways_d[:-1],
        back_prefill_s=ways_p[-1],
        back_decode_s=ways_d[-1],
        busy_prefill_s=tuple(busy * way for way in ways_p),
        busy_decode_s=tuple(busy * way for way in ways_d),
    )


def _ring(
    stages: tuple[float, ...], ways: tuple[float, ...], busy: tuple[float, ...]
) -> list[tuple[float, float]]:
    hops = zip(busy, ways, strict=True)
    return [step for t, way in zip(stages, hops, strict=True) for step in ((t, t), way)]


def _simulated(t: StageTimes, mp: int, md: int, n: int) -> float:
    prefill = _ring(t.prefill_s, (*t.hop_prefill_s, t.back_prefill_s), t.busy_prefill_s)
    decode = _ring(t.decode_s, (*t.hop_decode_s, t.back_decode_s), t.busy_decode_s)
    return simulate(lambda i, step: prefill, lambda i, step: decode, mp=mp, md=md, n=n).total_s


def test_closed_form_is_never_below_the_simulation() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        t = _random_times(rng, rng.randint(1, 8))
        mp, md, n = rng.randint(1, 9), rng.randint(1, 9), rng.choice([1, 2, 3, 12, 40])
        exact, closed = _simulated(t, mp, md, n), makespan(t, mp=mp, md=md, n=n).total_s
        assert closed >= exact * (1 - 1e-9)


def test_closed_form_is_the_simulation_within_a_thousandth() -> None:
    rng = random.Random(1)
    worst = 0.0
    for _ in range(1000):
        t = _random_times(rng, rng.randint(1, 8))
        mp, md = rng.randint(1, 9), rng.randint(1, 9)
        if t.busy_decode_s[-1] > max(t.decode_s):
            continue  # an upper bound where the way back is slower than every stage
        exact, closed = _simulated(t, mp, md, 100), makespan(t, mp=mp, md=md, n=100).total_s
        worst = max(worst, abs(closed / exact - 1))
    assert worst <= 1e-3, worst


def test_the_papers_form_would_fail_that_test() -> None:
    rng = random.Random(1)
    worst = 0.0
    for _ in range(100):
        t = _random_times(rng, rng.randint(2, 8))
        exact = _simulated(t, 4, 4, 100)
        worst = max(worst, abs(pipeline_time("paper", t, mp=4, md=4, n=100).total_s / exact - 1))
    assert worst > 0.1


@pytest.mark.parametrize("name", REAL)
def test_real_runs_of_the_paper(name: str) -> None:
    row = REAL[name]
    mp, md = int(row["prefill_microbatches"]), int(row["decode_microbatches"])
    measured = float(row["measured_e2e_s"])
    prefill, decode = (
        tuple(float(row[f"{phase}_stage{j}_ms"]) / 1e3 for j in range(4))
        for phase in ("prefill", "decode")
    )
    t = StageTimes(prefill_s=prefill, decode_s=decode)
    ours = makespan(t, mp=mp, md=md, n=100).total_s
    theirs = published_code_time(t, mp=mp, md=md, n=100).total_s
    assert abs(ours / measured - 1) <= 0.10
    if not name.startswith("uniform"):
        assert abs(theirs / measured - 1) > 0.25


def _random_plan(rng: random.Random, p: Problem, *, equal: bool) -> Assignment:
    order = [c for c, cls in enumerate(p.classes) for _ in cls.devices]
    rng.shuffle(order)
    order = order[: rng.randint(1, p.max_stages)]
    cuts = sorted(rng.sample(range(1, p.num_layers), len(order) - 1))
    bounds = [0, *cuts, p.num_layers]
    stages = tuple(
        Stage(
            cls=c, start=a, end=b, choices=tuple(rng.randrange(len(p.choices)) for _ in range(a, b))
        )
        for c, a, b in zip(order, bounds, bounds[1:], strict=False)
    )
    batch = p.workload.batch
    sizes = [s for s in range(1, batch + 1) if (batch % s == 0) == equal]
    return Assignment(
        prefill_microbatch=rng.choice(sizes), decode_microbatch=rng.choice(sizes), stages=stages
    )


@pytest.mark.parametrize("equal", [True, False])
def test_predicted_time_of_random_plans_against_their_replay(equal: bool) -> None:
    """True cache lengths and true micro-batch sizes: within 0.1 %, or 0.5 % and above if ragged."""
    rng = random.Random(7)
    for _ in range(250):
        p = random_problem(rng, batch=5 if not equal else rng.choice([4, 6]))
        work = p.workload.model_copy(update={"prompt_len": 512, "gen_len": 100})
        p = p.with_changes(workload=work)
        a = _random_plan(rng, p, equal=equal)
        predicted, replayed = job_time(p, a).total_s, replay(p, a).total_s
        assert replayed <= predicted * 1.001
        assert predicted == pytest.approx(replayed, rel=1e-3 if equal else 5e-3)


def test_time_step_by_step_of_random_plans_is_their_replay() -> None:
    """Of short jobs, too, for which the closed form is an upper bound only; a plan tells it."""
    rng, rough = random.Random(11), 0
    for _ in range(300):
        p = random_problem(rng, batch=rng.choice([4, 5, 7, 9, 13]))
        lengths = {"prompt_len": rng.choice([16, 512]), "gen_len": rng.choice([1, 2, 3, 20, 100])}
        p = p.with_changes(workload=p.workload.model_copy(update=lengths))
        a = _random_plan(rng, p, equal=rng.random() < 0.3)
        stepwise, replayed = step_by_step_time(p, a), replay(p, a).total_s
        assert stepwise.total_s == pytest.approx(replayed, rel=2e-3)
        far = abs(stepwise.total_s / job_time(p, a).total_s - 1) > 0.005
        rough += far
        assert (step_note(p, a) != "") == far
        assert reported_time(p, a) == (stepwise if far else job_time(p, a))
        assert reported_time(p, a).total_s == pytest.approx(replayed, rel=7e-3)
    assert rough > 10


def test_a_plan_whose_slowest_stage_changes_says_what_it_takes() -> None:
    """One stage reads weights of 16 bits, the other more layers' cache of 4-bit ones."""
    job = "--global-bz 128 --s 16 --n 2000 --bits 16,4"
    words = f"--devices 4090:2 --model qwen3-8b {job}"
    p = make_problem(plan_request(words.split()))[0]
    stages = (
        Stage(cls=0, start=0, end=16, choices=(0,) * 16),
        Stage(cls=0, start=16, end=36, choices=(1,) * 20),
    )
    a = Assignment(prefill_microbatch=64, decode_microbatch=64, stages=stages)
    predicted, replayed = job_time(p, a).total_s, replay(p, a).total_s
    assert replayed > 1.005 * predicted
    assert step_by_step_time(p, a).total_s == pytest.approx(replayed, rel=1e-3)
    assert "the slowest stage is not the same for all" in step_note(p, a)


def test_66_pairs_at_batch_32_one_size_per_count() -> None:
    assert distinct_sizes(32) == (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 32)
    sizes = distinct_sizes(32)
    assert len(microbatch_pairs(sizes, sizes, ordered=True)) == 66
    assert len(microbatch_pairs(sizes, sizes)) == 121
    assert sizes_of(32, 11) == (11, 11, 10)
    assert all(sum(sizes_of(32, s)) == 32 for s in distinct_sizes(32))


def test_a_plan_that_does_not_fit_is_seen() -> None:
    p = random_problem(random.Random(3))
    a = _random_plan(random.Random(3), p, equal=True)
    huge = p.workload.model_copy(update={"batch": 10**6})
    assert not fits(p.with_changes(workload=huge, prefill_microbatch=1, decode_microbatch=1), a)
