"""What `llmpq-algo` does after its flags are read; results on stdout."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.errors import BadPlanError, DoesNotFitError
from llmpq.planner.problem.requests import (
    CheckRequest,
    CostsRequest,
    ExportRequest,
    FitsRequest,
    ListRequest,
    ModelsRequest,
    PlanRequest,
    SimulateRequest,
    VerifyRequest,
)

if TYPE_CHECKING:
    from llmpq.plan import Plan
    from llmpq.topology import Topology


def run(command: str, request: Any) -> None:
    """Do what a request asks for; results on stdout."""
    logging.basicConfig(
        level=logging.DEBUG if getattr(request, "debug", False) else logging.WARNING,
        format="%(message)s",
        stream=sys.stderr,
    )
    commands: dict[str, Callable[[Any], None]] = {
        "plan": _plan,
        "fits": _fits,
        "costs": _costs,
        "simulate": _simulate,
        "check": _check,
        "verify": _verify,
        "export": _export,
        "devices": _devices,
        "models": _models,
    }
    commands[command](request)


def _plan(request: PlanRequest) -> None:
    from llmpq.planner.cli.show_plan import make_and_show, read_job
    from llmpq.planner.cli.show_traffic import check_objective, show_traffic
    from llmpq.planner.traffic.named_traffic import has_traffic

    if has_traffic(request):
        show_traffic(request)
        return
    check_objective(request.objective)
    job = read_job(request)
    try:
        if request.pareto:
            from llmpq.planner.cli.show_front import show_front

            show_front(request, job.problem, job.options, job.path)
        else:
            make_and_show(request, job)
    except DoesNotFitError:
        for note in job.notes:
            if note.startswith("assumed: "):
                sys.stderr.write(f"llmpq-algo: {note}\n")
        raise


def _fits(request: FitsRequest) -> None:
    from llmpq.planner.cli.show_fits import show_fits

    show_fits(request)


def _costs(request: CostsRequest) -> None:
    from llmpq.planner.cli.import_costs import import_costs

    import_costs(request)


def _simulate(request: SimulateRequest) -> None:
    from llmpq.planner.cli.show_simulation import show_simulation

    show_simulation(request)


def _check(request: CheckRequest) -> None:
    from llmpq.topology import Topology, read_plan

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
    from llmpq.planner.check.check import RELATIVE_TOLERANCE

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
    from llmpq.planner.check.check import check_alone, check_plan
    from llmpq.planner.problem.named_inputs import model_of_plan, names_devices, read_cluster

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
    from llmpq.shared_run import is_shared_run

    try:
        return is_shared_run(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False  # said where a plan is read


def _check_shared(request: CheckRequest) -> None:
    from llmpq.planner.check.check_run import check_run
    from llmpq.planner.problem.named_inputs import names_devices
    from llmpq.shared_run import SharedRun

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


def _verify(request: VerifyRequest) -> None:
    from llmpq.planner.cli.certificates import verify_file

    verify_file(request)


def _export(request: ExportRequest) -> None:
    from llmpq.planner.export import export_plan

    export_plan(request)


def _devices(request: ListRequest) -> None:
    from llmpq.planner.problem.discovery import show_devices

    show_devices(request)


def _models(request: ModelsRequest) -> None:
    from llmpq.planner.cli.show_models import show_models

    show_models(as_json=request.json)
