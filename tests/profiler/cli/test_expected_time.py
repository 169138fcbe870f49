"""A profiling run says beforehand how many cases it has, and about how long they take."""

from __future__ import annotations

import re

import pytest

from llmpq.profiler.cli import run
from llmpq.profiler.cli.flags import ProfileRequest, run_parser
from llmpq.profiler.timing.cases import Effort, TimedCase
from llmpq.profiler.timing.expected_time import expected_s

pytestmark = pytest.mark.cpu
CLUSTER = "clusters/laptop-cpu.yaml"


def job_of(model: str, *words: str) -> run.ProfileJob:
    asked = ["--model", str(model), "--cluster", CLUSTER, "-o", "costs.json", *words]
    return run.make_job(run_parser().read_as(ProfileRequest, asked))


def seconds(job: run.ProfileJob, effort: Effort | None = None) -> float:
    (device,) = job.devices
    return expected_s(job.spec, device, run._cases_of(job, device), effort or job.effort)


def test_the_cases_that_are_said_are_those_that_are_timed(demo_model: str) -> None:
    job = job_of(demo_model, "--quick", "--bits", "16,4")
    timed: list[TimedCase] = list(run._cases_of(job, job.devices[0]))
    said = run.foresight(job)
    assert said.startswith(f"{len(timed)} cases on {job.devices[0].profile_kind}: about ")
    assert re.search(r"about \d+ (seconds|minutes|hours) where nothing else runs", said)


def test_fewer_shapes_fewer_bits_and_smaller_models_take_less(demo_model: str) -> None:
    quick, few = job_of(demo_model, "--quick"), job_of(demo_model, "--bits", "16")
    whole, large = job_of(demo_model), job_of("llama-3.2-1b")
    assert seconds(quick) < seconds(few) < seconds(whole) < seconds(large)
    (device,) = whole.devices
    cases = run._cases_of(whole, device)
    effort = whole.effort
    # A case of next to no work takes its effort in each of its two rounds.
    assert 2 * len(cases) * effort.seconds < seconds(whole) < 6 * len(cases) * effort.seconds
    assert seconds(whole, effort.model_copy(update={"seconds": 1.0})) > seconds(whole) + len(cases)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (3, "20 seconds"),
        (44, "40 seconds"),
        (89, "90 seconds"),
        (600, "10 minutes"),
        (7201, "2 hours"),
    ],
)
def test_times_are_rounded_as_people_say_them(number: float, said: str) -> None:
    assert run._about(number) == said
