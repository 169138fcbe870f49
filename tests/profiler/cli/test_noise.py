"""What is said of noisy times: how noisy, and what the machine's load is."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from llmpq.profiler.cli import run
from llmpq.profiler.cli.run import report

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("noise", "said"), [(0.5, True), (0.001, False)])
def test_noise_is_said_with_the_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, noise: float, said: bool
) -> None:
    monkeypatch.setattr(run, "profile_tables", lambda outcome: [])
    monkeypatch.setattr(run, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 0.0, 0.0))
    costs = SimpleNamespace(links=(), sums=())
    report(SimpleNamespace(costs=costs, failed={}, noise={"a": noise}))  # type: ignore[arg-type]
    line = "the times are noisy (median +-50 %), as they are beside other programs (load 2.5 on 4"
    assert (line in caplog.text) == said
