"""Certificates of plans: written beside a plan, and checked by `llmpq-algo verify`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.errors import BadPlanError
from llmpq.file_form import read_json, save_text
from llmpq.planner.check.verify import SCHEMA, Refused, Verified, verify
from llmpq.planner.cli.report import shown_proven
from llmpq.planner.problem.requests import VerifyRequest
from llmpq.planner.solving.answer import Answer, TopologyAnswer
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import variants_with_room
from llmpq.planner.solving.robustness import NEAR, bound_only
from llmpq.planner.solving.worker import (
    SolverCrashed,
    certificate_in_child,
    engine_proofs_in_child,
)
from llmpq.plans.topology import read_plan

if TYPE_CHECKING:
    from llmpq.planner.problem.problem import Problem
    from llmpq.plans.plan import Plan
    from llmpq.plans.topology import Topology


def certificate_path(plan_path: str) -> Path:
    """Return where the certificate of a plan file is."""
    path = Path(plan_path)
    return path.with_name(path.name.removesuffix(".json") + ".certificate.json")


def save_plan(output: str, plan: Plan | Topology) -> None:
    """Write a plan file; the certificate beside it, which is of the plan before, goes first."""
    beside = certificate_path(output)
    if beside.is_file() and _is_certificate(beside):
        beside.unlink()
    plan.save_json(output)


def _is_certificate(path: Path) -> bool:
    """Whether a file was written as a plan's certificate, of this version or another."""
    try:
        held: Any = json.loads(path.read_text())
    except ValueError:  # not JSON, or not text
        return False
    return isinstance(held, dict) and {"schema", "plan_sha256", "bound"} <= set(held)


def write_certificate(output: str, best: Answer, options: SolveOptions) -> str | None:
    """Write the certificate of a written plan; say where it is, and what it shows.

    None where such plans have none.
    """
    if options.method != "exact":
        return None
    variants = variants_with_room(best.problem, options)
    try:
        data = certificate_in_child(
            best.plan, best.problem, best.outcome.assignment, variants, options.budget
        )
    except (ValueError, SolverCrashed):  # the plan is as good without; a crash has been said
        return None
    shared = any(stage.shares for stage in best.plan.stages)
    return _written(output, data, "one engine", shared=shared)


def write_topology_certificate(
    output: str,
    topology: Topology,
    found: TopologyAnswer,
    problem: Problem,
    options: SolveOptions,
    exactly: int | None,
) -> str | None:
    """Do so of a written plan of several engines; `exactly`: how many were to be there."""
    from llmpq.planner.solving.certificate import topology_certificate
    from llmpq.planner.solving.device_groups import with_places
    from llmpq.planner.solving.engine_floors import engine_variants

    bounded = found.found
    shared = any(stage.shares for stage in topology.stages)
    if shared:  # the proof is of these groups
        problem = with_places(problem, [one.places for one in bounded.engines], options.kvs)
        bounded = replace(bounded, bound=bounded.value, most=())
    engines = [(own.problem, own.outcome.assignment) for own in found.plans]
    variants = engine_variants(problem, options.kvs)
    priced = problem.with_changes(theta=topology.solver.theta)
    try:
        proofs = engine_proofs_in_child(priced, options, bounded)
        data = topology_certificate(
            topology, problem, engines, variants, options.budget, proofs, exactly
        )
    except (ValueError, SolverCrashed):  # the plan is as good without; a crash has been said
        return None
    what = "these devices" if exactly is None else f"{exactly} engines"
    return _written(output, data, what, shared=shared)


def _written(output: str, data: dict[str, Any], what: str, *, shared: bool) -> str:
    """Write it; say of what plans it is a proof. `shared`: devices share stages as planned."""
    path, value, bound = certificate_path(output), data["value"], data["bound"]
    save_text(path, json.dumps(data, separators=(",", ":")) + "\n")
    if bound <= 0:
        return str(path)
    of = f"{what} whose devices share stages as here" if shared else f"{what} without shared stages"
    better = f"{value / bound - 1:.2%}"
    return f"{path}: by itself it shows that no plan of {of} is better by more than {better}"


def verify_file(request: VerifyRequest) -> None:
    """Check a plan file against the certificate beside it; results on stdout."""
    path = Path(request.certificate or certificate_path(request.plan))
    plan: Any = read_json(request.plan)
    if not path.exists():
        if any(own.traffic is not None for own in read_plan(request.plan).plans):
            raise ValueError(
                f"'{request.plan}' is of live traffic, whose rate is simulated: such plans have no "
                "certificate; llmpq-algo simulate shows what it gives"
            )
        raise ValueError(
            f"'{path}' is not there: llmpq-algo -o writes it beside a plan of --method exact and "
            "--objective makespan without drafts; plan again, or name it with --certificate"
        )
    certificate: Any = read_json(path)
    schema = certificate.get("schema") if isinstance(certificate, dict) else None
    if isinstance(schema, int) and schema != SCHEMA:
        which = "an older" if schema < SCHEMA else "a newer"
        raise BadPlanError(
            f"'{path}' was written by {which} llmpq-algo (schema {schema}, this one checks schema "
            f"{SCHEMA}): plan again, or check it with that version"
        )
    try:
        found = verify(plan, certificate)
    except Refused as error:
        raise BadPlanError(f"'{request.plan}' does not agree with '{path}': {error}") from None
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise BadPlanError(
            f"'{path}' is no certificate of '{request.plan}': {type(error).__name__}: {error}"
        ) from None
    lines = verified_lines(request.plan, plan, found, certificate["most_waves"])
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def verified_lines(name: str, plan: dict[str, Any], found: Verified, most_waves: int) -> list[str]:
    """Return what was found to hold, a line each; `most_waves`: those of an engine's rows."""
    plans = [one["plan"] for one in plan["engines"]] if "engines" in plan else [plan]
    own = f"{len(plans)} engines on devices of their own, all rows dealt; "
    of = own if len(plans) > 1 else ""
    what, loss = "plan", found.value - found.time_s
    shared = any(stage.get("shares") for one in plans for stage in one["stages"])
    if shared:
        what = "plan of these devices, grouped as they are,"
    if "engines" in plan:
        stages = "the groups that share stages as they are" if shared else "stages of one device"
        what = f"grouping of these devices into engines ({stages}, {most_waves} waves at most)"
    lines = [
        f"{name}: {of}every layer once, at bits that it may have, within memory",
        f"value {found.value:.6g} s, as its costs give it"
        + (f" ({found.time_s:.6g} s, and {loss:.4g} s for quality loss)" if loss > 0 else ""),
        f"bound {found.bound:.6g} s: no {what} has less; computed from {found.parts:,} "
        f"part{'s' * (found.parts != 1)} of the proof",
    ]
    stated = plan["solver"].get("gap")
    if found.bound > 0:
        who = "the search, of all groups looked at," if shared else "the search, which knows more,"
        said = "" if stated is None else f" ({who} says {stated:.4%})"
        lines.append(f"gap {found.value / found.bound - 1:.4%}{said}")
    lines.append(robust_line(found, plan["solver"].get("robustness")))
    return lines


def robust_line(found: Verified, stated: dict[str, Any] | None) -> str:
    """Return by how much all costs may be wrong at least for the plan to stay near the best.

    By the certificate's bound alone; `stated`: what the plan says, by searches with other costs.
    """
    share = bound_only(found.value, found.time_s, found.bound)
    more = "it may be with more, where plans share costs"
    if stated is not None:
        of_search = shown_proven(stated["proven"])
        says = "shows none either" if of_search == shown_proven(0) else f"says {of_search}"
        more = f"the search, which knows what plans share, {says}"
    if share <= 0:
        near = f"within {NEAR:.0%} of the best"
        return f"the bound shows no cost error that keeps the plan {near}; {more}"
    return (
        f"robust: with every cost off by up to {share:.2%} either way, each by itself, the plan is "
        f"within {NEAR:.0%} of the best; {more}"
    )
