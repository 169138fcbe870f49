"""A profiling run says beforehand how many cases it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.profiler.cli import run
from llmpq.profiler.cli.flags import ProfileRequest, run_parser

pytestmark = pytest.mark.cpu


def test_too_few_shapes_are_refused_before_they_are_timed(
    demo_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("timed"))
    words = ["--model", str(demo_model), "--cluster", "clusters/laptop-cpu.yaml", "--quick"]
    words += ["--max-len", "64", "-o", str(tmp_path / "c.json"), "--max-batch"]
    with pytest.raises(ValueError, match="timed at 2 shapes, its fit needs 3: give a larger"):
        run.main(run_parser().read_as(ProfileRequest, [*words, "2"]))
    run.require_shapes(run.make_job(run_parser().read_as(ProfileRequest, [*words, "4"])))


@pytest.mark.parametrize("words", [(), ("--quick", "--bits", "16,4")])
def test_the_cases_that_are_said_are_those_that_are_timed(demo_model: str, words: tuple[str, ...]):
    asked = ["--model", str(demo_model), "--cluster", "clusters/laptop-cpu.yaml", "-o", "c.json"]
    job = run.make_job(run_parser().read_as(ProfileRequest, [*asked, *words]))
    (device,) = job.devices
    timed = len(job.cases_of(device))
    assert run.foresight(job).startswith(f"{timed:,} cases on {device.profile_kind}; fewer with")
