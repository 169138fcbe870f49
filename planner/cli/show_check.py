"""`llmpq-algo check`: a plan, its engines or a shared run, by what the file carries."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.errors import BadPlanError
from llmpq.planner.check.check import RELATIVE_TOLERANCE, check_alone, check_plan, check_run
from llmpq.planner.problem.named_inputs import model_of_plan, names_devices, read_cluster
from llmpq.planner.problem.requests import CheckRequest
from llmpq.plans.shared_run import SharedRun, is_shared_run
from llmpq.plans.topology import Topology, read_plan

if TYPE_CHECKING:
    from llmpq.plans.plan import Plan


def show_check(request: CheckRequest) -> None:
    """Check a file; what holds on stdout, `BadPlanError` for what does not."""
    if _is_run(request.plan):
        _check_shared(request)
        return
    whole = read_plan(request.plan)
    if isinstance(whole, Topology):
        _check_engines(request, whole)
    else:
        _check_engine(request, whole)


def _check_engines(request: CheckRequest, topology: Topology) -> None:
    """Check every engine of a plan, and that they end when the plan says."""
    for number, engine in enumerate(topology.engines):
        try:
            _check_engine(request, engine.plan, f"engine {number}, {engine.rows} rows: ")
        except BadPlanError as error:
            raise BadPlanError(f"engine {number}: {error}") from error
    seconds = [engine.predicted_s for engine in topology.engines]
    if topology.predicted is None or None in seconds:
        return
    last = max(one for one in seconds if one is not None)
    if not math.isclose(last, topology.predicted.total_s, rel_tol=RELATIVE_TOLERANCE):
        raise BadPlanError(
            f"the plan states {topology.predicted.total_s:.6g} s for all engines, expected "
            f"{last:.6g} s, when the last of them ends; re-plan with llmpq-algo"
        )
    sys.stdout.write(f"all engines: {last:.3f} s\n")


def _check_engine(request: CheckRequest, plan: Plan, which: str = "") -> None:
    complete = plan.inputs is not None
    if names_devices(request) or not complete:
        if not names_devices(request):
            raise ValueError(
                f"'{request.plan}' carries no device, link and cost entries (an older llmpq made "
                "it, or a hand): name the devices it should fit with --cluster or --devices"
            )
        check_plan(
            plan, spec=model_of_plan(request, plan), cluster=read_cluster(request), costs=None
        )
    elif request.model or request.model_name or request.model_size:
        model_of_plan(request, plan)
    times = check_alone(plan) if complete else None
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    sys.stdout.write(f"{which}{request.plan}: {stages}, complete, fits\n")
    if times is not None:
        sys.stdout.write(
            f"recomputed from its own entries: {times.total_s:.3f} s (prefill "
            f"{times.prefill_s:.3f}, decode {times.decode_s:.3f})\n"
        )


def _is_run(path: str) -> bool:
    try:
        return is_shared_run(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False  # said where a plan is read


def _check_shared(request: CheckRequest) -> None:
    if names_devices(request) or request.model or request.model_name or request.model_size:
        raise ValueError(
            f"'{request.plan}' is a shared run, which carries its model and devices; leave "
            "--model, --devices and --cluster out"
        )
    try:
        run = SharedRun.load_json(request.plan)
    except ValueError as error:
        raise BadPlanError(str(error)) from None
    check_run(run)
    predicted = "no time" if run.predicted_s is None else f"{run.predicted_s:.3f} s"
    sys.stdout.write(
        f"{request.plan}: a run of {run.plan.model.name} on {run.plan.cluster.name}, complete\n"
        f"{run.completed} requests: predicted {predicted} (recomputed), measured "
        f"{run.total_s:.3f} s, {run.output_throughput:.1f} tokens/s\n"
    )
