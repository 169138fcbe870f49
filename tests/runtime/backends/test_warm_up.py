"""Shapes run ahead of a job on a CPU, as far as there is time."""

from __future__ import annotations

import pytest

from llmpq.runtime.backends import stage_runner
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.requests.request import StepKind

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(("limit_s", "counts"), [(2.0, [3, 2, 1, 20, 18]), (0.0, [3])])
def test_steps_of_a_pool_are_run_ahead_as_far_as_there_is_time(monkeypatch, limit_s, counts):
    """Every count of rows, then the ladder's places, the largest first."""
    monkeypatch.setattr(stage_runner, "WARM_UP_S", limit_s)
    compute, run = object.__new__(StageRunner), []
    monkeypatch.setattr(compute, "_run_zeros", lambda kind, n: run.append((kind, n)) or 1e-3)
    compute.warm_up(3, 19)
    assert [count for _, count in run] == counts
    assert all((kind is StepKind.DECODE) == (count <= 3) for kind, count in run)
