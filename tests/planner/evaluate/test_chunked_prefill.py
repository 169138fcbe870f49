"""Prompts are planned in the chunks in which they run: times, bounds, memory and the check."""

from __future__ import annotations

import math
import random

import pytest

from llmpq.costs.cost_model import LatencyEntry, Phase, Regime
from llmpq.errors import BadPlanError, DoesNotFitError
from llmpq.planner.check.check import check_alone
from llmpq.planner.check.refusal import too_big
from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.evaluate.objective import job_time, stage_times
from llmpq.planner.evaluate.simulator import replay, step_by_step_time
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.numbers import chunk_sizes
from llmpq.planner.problem.outcome import Assignment, Infeasible, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.answer import checked_plan
from llmpq.precision import Precision
from llmpq.workload import prompt_chunks
from reference.brute_force import brute_force
from reference.random_problems import random_problem

pytestmark = pytest.mark.pure


LINEAR = LatencyEntry(
    device_kind="X",
    part="layer",
    phase=Phase.PREFILL,
    precision=Precision.W16A16,
    dtype="float16",
    regimes=(Regime(terms={"v*s": 3e-6, "v*s^2": 2e-9}),),
    source="estimated",
)
"""A layer that costs nothing but its tokens' products and attention."""


def _chunked(seed: int, chunk: int, **sizes: object) -> Problem:
    p = random_problem(random.Random(seed), **sizes)  # type: ignore[arg-type]
    return p.with_changes(workload=p.workload.model_copy(update={"prompt_len": 64}), chunk=chunk)


def _any_plan(p: Problem, eta: int) -> Assignment:
    """Return a plan with a stage on every device."""
    order = [c for c, cls in enumerate(p.classes) for _ in cls.devices][: p.max_stages]
    ends = [(j + 1) * p.num_layers // len(order) for j in range(len(order))]
    stages = tuple(
        Stage(cls=c, start=start, end=end, choices=(0,) * (end - start))
        for c, start, end in zip(order, [0, *ends], ends, strict=False)
    )
    return Assignment(prefill_microbatch=eta, decode_microbatch=1, stages=stages)


@pytest.mark.parametrize("chunk", [1, 7, 512, 999, 1000, None])
def test_chunks_compute_what_the_whole_prompt_does(chunk: int | None) -> None:
    chunks = prompt_chunks(1000, chunk)
    assert sum(tokens for _, tokens in chunks) == 1000
    assert max(tokens for _, tokens in chunks) <= (chunk or 1000)
    seconds = [LINEAR.chunk_s(v=3, start=start, length=tokens) for start, tokens in chunks]
    assert sum(seconds) == pytest.approx(LINEAR.seconds(v=3, length=1000))
    assert seconds[:-1] == sorted(seconds[:-1]), "a later chunk sees more keys"


def test_chunks_of_one_prompt_fill_the_pipeline() -> None:
    """The first token is (C - 1) slowest + sum of stages, not C times the sum."""
    job = "--batch 1 --prompt-len 8192 --gen-len 2 --bits 16 --theta 1"
    p = make_problem(plan_request(f"--devices 4090:4 --model llama-3.1-8b {job}".split()))[0]
    plan = _any_plan(p, 1)
    times = stage_times(p, plan)
    hops = sum(times.hop_prefill_s) + times.back_prefill_s
    want = 15 * max(times.prefill_s) + sum(times.prefill_s) + hops
    assert p.counts(1, 1)[0] == 16 and len(plan.stages) == 4
    assert job_time(p, plan).prefill_s == pytest.approx(want)
    assert replay(p, plan).prefill_s == pytest.approx(want, rel=0.06)
    whole = p.with_changes(chunk=8192)
    assert job_time(whole, plan).prefill_s > 2.5 * want


@pytest.mark.parametrize("chunk", [64, 24, 10, 1])
def test_closed_form_and_simulation_agree_on_chunks(chunk: int) -> None:
    for seed in range(12):
        p = _chunked(seed, chunk, devices=(1, 2))
        for eta in (1, 3, 4):  # of 4 requests
            plan = _any_plan(p, eta)
            simulated, stepwise = replay(p, plan), step_by_step_time(p, plan)
            assert stepwise.prefill_s == pytest.approx(simulated.prefill_s, rel=1e-9)
            close = 0.12 if len(plan.stages) > 1 else 1e-9
            assert job_time(p, plan).prefill_s == pytest.approx(simulated.prefill_s, rel=close)


def test_exact_is_brute_force_and_the_check_recomputes_chunks() -> None:
    checked = 0
    for seed in range(12):
        p = _chunked(seed, 24, layers=(3, 4), kinds=(1, 2), devices=(1, 2), precisions=2)
        best, _ = brute_force(p)
        try:
            found = solve_exact(p, gap=1e-9)
        except Infeasible:
            assert best == math.inf
            continue
        assert found.value == pytest.approx(best, rel=1e-9)
        assert found.bound is not None and found.bound <= best * (1 + 1e-9)
        plan = checked_plan(p, found, None)
        assert plan.prefill_chunk == 24 and len(plan.chunks) == 3
        with pytest.raises((BadPlanError, DoesNotFitError)):
            check_alone(plan.model_copy(update={"prefill_chunk": 64}))
        checked += 1
    assert checked >= 6


@pytest.mark.parametrize(
    ("batch", "prompt_len", "sizes"),
    [
        (32, 512, (512,)),
        (1, 100, (512,)),
        (32, 30000, (512,)),
        (1, 30000, (512, 2048, 8192)),
        (1, 2000, (512, 2048)),
        (4, 30000, (512, 2048)),
        (15, 513, (512, 2048)),
    ],
)
def test_larger_chunks_are_tried_where_few_prompts_make_no_large_step(
    batch: int, prompt_len: int, sizes: tuple[int, ...]
) -> None:
    assert chunk_sizes(batch, prompt_len) == sizes
    windowed = tuple(size for size in sizes if size <= 4096)
    assert chunk_sizes(batch, prompt_len, window=4096) == windowed
    assert chunk_sizes(batch, prompt_len, window=128) == (512,)


JOBS = {
    "70B at 4 bits on 72 GB": ("4090,3090:2 --model llama-3.3-70b", 30000),
    "8B on 12 GB": ("3060 --model llama-3.1-8b --bits 4", 30000),
    "32B on two cards": ("4090,3090 --model qwen3-32b --bits 4", 32000),
    "mixture": ("4090 --model qwen3-30b-a3b --bits 4", 38000),
    "CPU": ("cpu=32GB+8threads --model llama-3.1-8b --bits 4", 30000),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_long_prompt_takes_the_workspace_of_a_chunk(name: str) -> None:
    """A prompt of 512 tokens and the same length in all leaves as much room for layers."""
    devices, length = JOBS[name]
    flags = f"--devices {devices} --batch 1 --theta 1".split()

    def problem(prompt_len: int) -> Problem:
        new = str(length + 2000 - prompt_len)
        request = plan_request([*flags, "--prompt-len", str(prompt_len), "--gen-len", new])
        return make_problem(request)[0]

    long, short = problem(length), problem(512)
    assert not too_big(long) and not too_big(short)
    rooms = [p.capacity(1, 1)[0, 0, 0].max() for p in (long, short)]
    whole = long.with_changes(chunk=length).capacity(1, 1)[0, 0, 0].max()
    assert rooms[1] - rooms[0] < 0.02 * rooms[1]
    assert whole < rooms[0]
