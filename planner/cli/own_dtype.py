"""A plan in the checkpoint's dtype where the cards that lack it are left out.

In float16 cards compute as fast as in bfloat16: cards are left out only where they are of no use.
In float32 they do not: a plan without them may be the better one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmpq.devices.default_dtype import dtype_note, without_bfloat16
from llmpq.errors import DoesNotFitError
from llmpq.planner.check.refusal import too_big_in_any_chunks
from llmpq.planner.cli.what_if import without
from llmpq.planner.evaluate.fits import longest_context
from llmpq.planner.problem.make_problem import dense_note, kv_left_out, make_problem
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.answer import Answer, answer, score, solve_options
from llmpq.planner.solving.methods import SolveOptions
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.workload import Dtype


def in_own_dtype(
    request: PlanRequest, problem: Problem, best: Answer | None, path: str | None
) -> tuple[Answer, str] | None:
    """Return the plan over the cards that have bfloat16, and what to say of the others.

    All stages compute in one dtype, which every device of the cluster can: cards without bfloat16
    decide it even where the best plan does not use them. `best`: the plan of all, None where none
    fits. None where the plan with them is better, or where the dtype is asked for or is the
    checkpoint's.
    """
    cluster = problem.cluster
    lacking = without_bfloat16(cluster)
    places = () if best is None else best.plan.places
    used = any(place.kind in lacking for place in places)
    pinned = any(cluster.device(name).kind in lacking for name in problem.pins)
    slower = problem.workload.dtype == "float32"
    if pinned or ((used or best is None) and not slower):
        return None
    alone = over_own_dtype(request, problem)
    if alone is None:
        return None
    options = solve_options(request, alone)
    try:
        found = answer(alone, options, path)
    except DoesNotFitError:
        return None
    cards, with_them = _cards(lacking), LEFT_OUT
    if best is None:
        return found, f"{cards} {with_them}, and the model would not fit"
    if not used:
        return found, _unused(lacking, alone)
    if score(found, found.plan.predicted, options) >= score(best, best.plan.predicted, options):
        return None
    return found, (
        f"{cards} {with_them}, and the best plan would take {_seconds(best):.3f} instead of "
        f"{_seconds(found):.3f} s"
    )


def closer_refusal(
    request: PlanRequest, problem: Problem, refused: DoesNotFitError, path: str | None
) -> DoesNotFitError:
    """Return a refusal, or that of the cards that have bfloat16 where less is short with those."""
    alone = over_own_dtype(request, problem) if problem.workload.dtype == "float32" else None
    if alone is None or not _reaches(alone, problem):
        return refused
    try:
        answer(alone, solve_options(request, alone), path)
    except DoesNotFitError as closer:
        cards = _cards(without_bfloat16(problem.cluster))
        return DoesNotFitError(f"{closer}; {cards} {LEFT_OUT}")
    return refused


LEFT_OUT = "left out: with them all stages would compute in float32"


def _cards(kinds: Sequence[str]) -> str:
    """Return the subject and the verb of what becomes of them."""
    has, is_ = ("has", "is") if len(kinds) == 1 else ("have", "are")
    return f"{', '.join(kinds)}, which {has} no bfloat16, {is_}"


def over_own_dtype(
    request: PlanRequest, problem: Problem, *, usual_context: int | None = None
) -> Problem | None:
    """Return the job over the cards that have bfloat16, in the checkpoint's own dtype.

    None where all cards have it or none does, or where the dtype is asked for.
    """
    cluster = problem.cluster
    lacking = without_bfloat16(cluster)
    others = any(d.kind not in lacking and not d.spec.is_cpu for d in cluster.devices)
    if request.dtype != "auto" or not lacking or not others:
        return None
    names = {device.name: device.name for device in cluster.devices}
    while gone := [device for device in cluster.devices if device.kind in lacking]:
        cluster, moved = without(cluster, gone[-1])
        names = {old: moved[new] for old, new in names.items() if new in moved}
    if any(name not in names for name in problem.pins):
        return None
    pins = [_moved(pin, problem, names) for pin in request.pin]
    alone, _, _ = make_problem(replace(request, pin=pins), cluster, usual_context=usual_context)
    return None if alone.workload.dtype == problem.workload.dtype else alone


def instead_of_float32(
    request: PlanRequest,
    problem: Problem,
    notes: Sequence[str],
    *,
    usual_context: int | None = None,
) -> tuple[Problem, list[str]]:
    """Return the job to plan where plans of both are not held against each other, and its notes.

    Float32 is several times slower on cards that have bfloat16: those that lack it are left out,
    if the model fits the others, or if it fits neither way and the others hold a longer context.
    """
    if problem.workload.dtype == "float32":
        alone = over_own_dtype(request, problem, usual_context=usual_context)
        if alone is not None and (not too_big_in_any_chunks(alone) or _reaches(alone, problem)):
            said = f"{_cards(without_bfloat16(problem.cluster))} {LEFT_OUT}"
            return alone, of_unused(request, problem, notes, said)
    return problem, list(notes)


def where_unused(
    request: PlanRequest,
    problem: Problem,
    plan: Plan | Topology,
    notes: Sequence[str],
    *,
    usual_context: int | None = None,
) -> tuple[Dtype, list[str]]:
    """Return the dtype of a counted plan, and its notes: the checkpoint's own in place of float16
    where the plan uses none of the cards that lack it. Bytes and rates of both are the same, and
    other requests may need these cards: what they cost is still said.
    """
    dtype, lacking = problem.workload.dtype, without_bfloat16(problem.cluster)
    if dtype == "float32" or any(place.kind in lacking for place in plan.places):
        return dtype, list(notes)
    alone = over_own_dtype(request, problem, usual_context=usual_context)
    if alone is None:
        return dtype, list(notes)
    note, said = _dtype_note(problem), _unused(lacking, alone)
    return alone.workload.dtype, [said if n == note else n for n in notes]


def in_dtype(plan: Plan | Topology, dtype: Dtype) -> Plan | Topology:
    """Return a plan in another dtype of as many bytes, in which its devices are as fast."""
    if isinstance(plan, Plan):
        return _engine_in_dtype(plan, dtype)
    engines = tuple(
        one.model_copy(update={"plan": _engine_in_dtype(one.plan, dtype)}) for one in plan.engines
    )
    workload = plan.workload.model_copy(update={"dtype": dtype})
    return plan.model_copy(update={"engines": engines, "workload": workload})


def _engine_in_dtype(plan: Plan, dtype: Dtype) -> Plan:
    assert plan.inputs is not None, "the planner always writes the entries"
    costs = tuple(
        entry.model_copy(update={"dtype": dtype}) if entry.dtype == plan.workload.dtype else entry
        for entry in plan.inputs.costs
    )
    inputs = plan.inputs.model_copy(update={"costs": costs})
    workload = plan.workload.model_copy(update={"dtype": dtype})
    return plan.model_copy(update={"workload": workload, "inputs": inputs})


def of_unused(request: PlanRequest, problem: Problem, notes: Sequence[str], said: str) -> list[str]:
    """Return a job's notes where cards that lack bfloat16 have no part in it, as `said` says.

    `problem`: the job with these cards, of which the notes are.
    """
    note, dense = _dtype_note(problem), dense_note(problem.spec, problem.cluster)
    untrue = [dense, *kv_left_out(problem, request.kv)]
    return [said if n == note else n for n in notes if n not in untrue]


def _dtype_note(problem: Problem) -> str | None:
    return dtype_note(problem.spec, problem.cluster, problem.workload.dtype)


def _unused(lacking: Sequence[str], alone: Problem) -> str:
    own = alone.workload.dtype
    return f"{_cards(lacking)} not used: all stages compute in {own}, the checkpoint's dtype"


def _reaches(alone: Problem, problem: Problem) -> bool:
    """Whether a job that fits neither way fits with a context as long without cards as with."""
    most = problem.spec.max_positions
    return too_big_in_any_chunks(problem) and (
        longest_context(alone, most) >= max(1, longest_context(problem, most))
    )


def beats(own: Answer, topology: Topology, options: SolveOptions) -> bool:
    """Whether a plan of the cards that have bfloat16 is better than engines of all cards."""
    alone = score(own, own.plan.predicted, options)
    return alone < score(own, topology.predicted, options)


def _seconds(one: Answer) -> float:
    assert one.plan.predicted is not None, "the planner always predicts"
    return one.plan.predicted.total_s


def _moved(pin: str, problem: Problem, names: dict[str, str]) -> str:
    """Return a `--pin` with its device's name among those that are left."""
    layers, _, device = pin.partition("=")
    return f"{layers}={names[problem.cluster.device(device).name]}"
