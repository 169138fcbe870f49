"""A profiling run says beforehand how many cases it has."""

from __future__ import annotations

import pytest

from llmpq.profiler.cli import run
from llmpq.profiler.cli.flags import ProfileRequest, run_parser

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("words", [(), ("--quick", "--bits", "16,4")])
def test_the_cases_that_are_said_are_those_that_are_timed(demo_model: str, words: tuple[str, ...]):
    asked = ["--model", str(demo_model), "--cluster", "clusters/laptop-cpu.yaml", "-o", "c.json"]
    job = run.make_job(run_parser().read_as(ProfileRequest, [*asked, *words]))
    (device,) = job.devices
    timed = len(run._cases_of(job, device))
    assert run.foresight(job).startswith(f"{timed:,} cases on {device.profile_kind}; fewer with")
