"""A plan in the checkpoint's dtype where the cards that lack it are left out anyway."""

from __future__ import annotations

from dataclasses import replace

from llmpq.default_dtype import without_bfloat16
from llmpq.planner.answer import Answer, answer, solve_options
from llmpq.planner.cli.what_if import without
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.requests import PlanRequest


def in_own_dtype(request: PlanRequest, best: Answer, path: str | None) -> tuple[Answer, str] | None:
    """Return the plan over the cards that have bfloat16, and what to say of the others.

    All stages compute in one dtype, which every device of the cluster can: cards without bfloat16
    decide it even where the best plan does not use them. None where it uses one of them, or where
    the dtype is asked for or is the checkpoint's.
    """
    cluster = best.problem.cluster
    lacking, used = without_bfloat16(cluster), {stage.kind for stage in best.plan.stages}
    others = any(d.kind not in lacking and not d.spec.is_cpu for d in cluster.devices)
    if request.dtype != "auto" or not lacking or used & {*lacking} or not others:
        return None
    names = {device.name: device.name for device in cluster.devices}
    while gone := [device for device in cluster.devices if device.kind in lacking]:
        cluster, moved = without(cluster, gone[-1])
        names = {old: moved[new] for old, new in names.items() if new in moved}
    pins = [_moved(pin, best, names) for pin in request.pin]
    problem, _, _ = make_problem(replace(request, pin=pins), cluster)
    if problem.workload.dtype == best.problem.workload.dtype:
        return None
    found = answer(problem, solve_options(request, cluster), path)
    return found, (
        f"{', '.join(lacking)}, which have no bfloat16, are not used: all stages compute in "
        f"{problem.workload.dtype}, the checkpoint's dtype"
    )


def _moved(pin: str, best: Answer, names: dict[str, str]) -> str:
    """Return a `--pin` with its device's name among those that are left."""
    layers, _, device = pin.partition("=")
    return f"{layers}={names[best.problem.cluster.device(device).name]}"
