"""Checks a shared run: its plan by the entries it carries, and its arithmetic."""

from __future__ import annotations

from llmpq.errors import BadPlanError
from llmpq.planner.check.check import RELATIVE_TOLERANCE, check_alone
from llmpq.shared_run import SharedRun, predicted_of


def check_run(run: SharedRun) -> None:
    """Raise `BadPlanError` unless a shared run's numbers follow from one another.

    The plan's prediction is computed again from its entries; what was measured cannot be.
    """
    check_alone(run.plan)
    if len(run.stages) != len(run.plan.stages):
        raise BadPlanError(
            f"the run has {len(run.stages)} measured stages, its plan {len(run.plan.stages)}; "
            "share the report again with llmpq-dist report --share"
        )
    predicted = predicted_of(
        run.plan,
        completed=run.completed,
        prompt_tokens=run.total_input_tokens,
        output_tokens=run.total_output_tokens,
    )
    _agree("output_throughput", run.output_throughput, run.total_output_tokens / run.total_s)
    expected = None if predicted is None else predicted["total_s"]
    if (expected is None) != (run.predicted_s is None):
        raise BadPlanError(f"predicted_s is {run.predicted_s}, the plan's entries give {expected}")
    if expected is not None and run.predicted_s is not None:
        _agree("predicted_s", run.predicted_s, expected)
    for stage in run.stages:
        if stage.busy_share is not None and not 0 <= stage.busy_share <= 1 + 1e-6:
            raise BadPlanError(f"busy_share is a share of time, got {stage.busy_share:g}")


def _agree(name: str, said: float, computed: float) -> None:
    if abs(said - computed) > RELATIVE_TOLERANCE * abs(computed):
        raise BadPlanError(
            f"{name} is {said:.9g}, the run's other numbers give {computed:.9g}; share the report "
            "again with llmpq-dist report --share"
        )
