"""Makes a plan: by names, as `llmpq-algo` does (`make_plan`), or from values (`plan_workload`).

`plan_workload` is what a run without a plan asks for. With `prefer="quality"`, its default, layers
keep the precision they are stored in where they fit; where they do not, they lose as little as
they must (planner/front/preference.py).
"""

from __future__ import annotations

import logging
import operator
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmpq.checkpoints.gguf_file import is_model
from llmpq.checkpoints.hub import at_revision
from llmpq.commands.command_line import token_count
from llmpq.costs.cost_model import CostModel
from llmpq.devices.cluster import Cluster
from llmpq.devices.default_dtype import dtype_note
from llmpq.errors import DoesNotFitError, unknown_name
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.check.build_plan import build_plan
from llmpq.planner.check.refusal import NothingFitsError
from llmpq.planner.evaluate.objective import value as objective_of
from llmpq.planner.evaluate.simulator import step_note
from llmpq.planner.problem.known_plan import KnownPlan, PlanSearch
from llmpq.planner.problem.limits import positions_note
from llmpq.planner.problem.make_problem import (
    BuiltProblem,
    ProblemInputs,
    build_problem,
    make_problem,
)
from llmpq.planner.problem.outcome import Outcome
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import DTYPES, PREFERENCES, FitsRequest, PlanRequest
from llmpq.planner.solving.answer import (
    Answer,
    answer,
    one_engine,
    solve_options,
    with_robustness,
)
from llmpq.planner.solving.methods import PLANNERS, SolveOptions, within
from llmpq.plans.plan import Plan, Prefer
from llmpq.precision import Precision
from llmpq.workload import Workload

_log = logging.getLogger("llmpq.planner")


def make_plan(
    model: str | Path,
    *,
    revision: str | None = None,
    devices: str | Sequence[str] | None = None,
    cluster: str | Path | None = None,
    batch: int = 16,
    prompt_len: int | str | None = None,
    gen_len: int | str = 100,
    context: int | str | None = None,
    bits: str | int | Sequence[int | str] | None = None,
    kv: str | int | Sequence[int | str] = "16",
    dtype: str = "auto",
    gpu_memory_utilization: float | None = None,
    costs: str | Path | None = None,
    omega_file: str | Path | None = None,
    prefer: Prefer | None = None,
    theta: float | None = None,
    quality_budget: float | None = None,
    reserve: str | int | None = None,
    method: str | None = None,
    tensor_parallel: int | str | None = None,
    time_limit_s: float = 60.0,
) -> Plan:
    """Return the best plan of one engine, as `llmpq-algo --engines 1` and the flags of these names.

    The devices are `devices` ("4090,3090:2,cpu", or a list of such), those of a cluster file, or
    this machine's. Of `prompt_len` (512 tokens unless said) and `context`, prompt and answer
    together, one is given; lengths may be texts, "32k". `bits` and `kv`: "4,8", 8 or [4, 8].
    What the command prints as a warning is one of the logger `llmpq.planner`.
    """
    for name, value, allowed in (
        ("dtype", dtype, DTYPES),
        ("prefer", prefer, PREFERENCES),
        ("method", method, PLANNERS),
    ):
        if (value is not None or name == "dtype") and value not in allowed:
            raise unknown_name(name, str(value), allowed)
    aims = {"--prefer": prefer, "--theta": theta, "--quality-budget": quality_budget}
    stated = [flag for flag, value in aims.items() if value is not None]
    if len(stated) > 1:
        raise ValueError(f"{' and '.join(stated)} both say which plan is best: give one of them")
    if context is not None and prompt_len is not None:
        raise ValueError("--context is prompt and answer together: give it or --prompt-len")
    given = {"devices": devices, "bits": bits, "kv": kv, "reserve": reserve}
    texts = {name: _joined(value) for name, value in given.items()}
    for name, value in texts.items():
        if not isinstance(value, str if name == "kv" else str | None):
            raise ValueError(f"--{name} must be text, such as {EXAMPLES[name]}, got {value!r}")
    request = PlanRequest(
        model=at_revision(model, revision),
        devices=texts["devices"],
        cluster=None if cluster is None else str(cluster),
        batch=_plain(batch),
        prompt_len=512 if prompt_len is None else _length(prompt_len),
        gen_len=_length(gen_len),
        context=_length(context),
        bits=texts["bits"],
        kv=texts["kv"],
        dtype=dtype,
        gpu_memory_utilization=gpu_memory_utilization,
        costs=None if costs is None else str(costs),
        omega_file=None if omega_file is None else str(omega_file),
        prefer=prefer,
        theta=theta,
        quality_budget=quality_budget,
        reserve=texts["reserve"],
        method=method,
        tensor_parallel=None if tensor_parallel is None else str(tensor_parallel),
        time_limit=time_limit_s,
    )
    from llmpq.planner.cli.own_dtype import closer_refusal, in_own_dtype
    from llmpq.planner.cli.report import WARNING, warnings_of

    problem, path, notes = make_problem(request)
    for note in warnings_of(notes):
        _log.warning("%s", note.removeprefix(WARNING))
    best, refused = None, ""
    options = solve_options(request, problem)
    try:
        best = answer(problem, options, path)
    except NothingFitsError as error:
        refused = str(error)  # worked out here, so that its flags become arguments
    own = in_own_dtype(request, problem, best, path)
    if own is not None:
        best, _ = own
        problem = best.problem
    if best is None:
        closer = closer_refusal(request, problem, DoesNotFitError(refused), path)
        raise DoesNotFitError(str(closer))
    best, spent_s = _with_shared_stages(problem, best, options, path)
    return with_robustness(best, options, spent_s).plan


def _with_shared_stages(
    problem: Problem, best: Answer, options: SolveOptions, path: str | None
) -> tuple[Answer, float]:
    """Return the best plan of one engine, and the work of the searches for it.

    It is the best pipeline, or one whose stages GPUs share.
    """
    shared = one_engine(problem, best, options, path)
    if shared is None:
        return best, best.outcome.work_s
    best = shared.single or best
    return best, best.outcome.work_s + shared.found.work_s


def _joined(given: Any) -> Any:
    """Return names or bits that are a list, or one number, as the text that flags have."""
    if isinstance(given, (list, tuple)):
        return ",".join(map(str, given))
    return str(_plain(given)) if type(_plain(given)) is int else given


def _plain(given: Any) -> Any:
    """Return NumPy's integers as Python's; what is none stays."""
    is_whole = hasattr(given, "__index__") and not isinstance(given, (bool, int))
    return operator.index(given) if is_whole else given


def _length(given: Any) -> Any:
    """Return a length in tokens that is a text, such as "32k", as a number; what is none stays."""
    if isinstance(given, str):
        with suppress(ArgumentTypeError):
            return token_count(given)
    return _plain(given)


EXAMPLES = {"devices": '"4090,3090:2,cpu"', "bits": '"4,8"', "kv": '"16,8"', "reserve": '"1GiB"'}


@dataclass(frozen=True, kw_only=True)
class MadePlan:
    """A plan and what to say about it."""

    plan: Plan
    seconds: float
    notes: tuple[str, ...]
    known: Plan | None = None
    """The plan that was known, at the same costs; None without one."""

    def with_notes(self, notes: Sequence[str]) -> MadePlan:
        """Return it with more to say."""
        return replace(self, notes=(*notes, *self.notes))

    def text(self, width: int = 110) -> str:
        """Return the plan's table as `llmpq-algo` prints it, and the notes."""
        from io import StringIO

        from rich.console import Console

        from llmpq.planner.cli.report import print_plan, remarks_of

        console = Console(file=StringIO(), width=width)
        print_plan(console, self.plan, seconds=self.seconds, notes=self.notes)
        for line in remarks_of(self.notes):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text


@dataclass(frozen=True, kw_only=True)
class FitHere:
    """What of a model fits the devices that there are."""

    data: dict[str, Any]
    """As `llmpq-algo fits --json` prints it."""
    text: str
    """As it prints for a person."""
    refusal: str | None
    """What is short and what fits, in one sentence; None where the model fits."""


def fit_here(
    model: str,
    *,
    from_ray: str | None = None,
    context: int | None = None,
    batch: int = 1,
    probe_cpu: bool = False,
) -> FitHere:
    """Return whether a model fits this machine's devices, or a Ray's, as they are now.

    Memory that others hold is left to them. Times are of costs and rates that were measured here
    before, where there are some; `probe_cpu` measures this machine's CPU now.
    """
    from llmpq.planner.cli.fit_report import fit_answer
    from llmpq.planner.cli.show_fits import as_json, fits_text

    request = FitsRequest(
        model=model, from_ray=from_ray, context=context, batch=batch, probe_cpu=probe_cpu
    )
    found = fit_answer(request)
    return FitHere(data=as_json(found.report), text=fits_text(found.report), refusal=found.refusal)


def plan_workload(
    model_dir: str | Path,
    cluster: Cluster,
    workload: Workload,
    *,
    costs: CostModel | None = None,
    head_bits: Literal[8, 16] | None = None,
    spec: ModelSpec | None = None,
    search: PlanSearch | None = None,
) -> MadePlan:
    """Return a plan of a job on the devices of a cluster; `DoesNotFitError` says what is short.

    `spec`: the model, where it has been read from the directory, or is none that has one.
    `costs`: measured, of some kinds of device or all; the others are estimated. `head_bits`: of
    the output matrix.
    """
    search = search or PlanSearch()
    path = str(Path(model_dir))
    inputs = ProblemInputs(
        spec=spec or ModelSpec.from_directory(path),
        cluster=cluster,
        workload=workload,
        source=path if is_model(path) else None,
        bits=None if search.bits is None else tuple(search.bits),
        profile=costs,
        head_bits=head_bits,
    )
    options = SolveOptions(
        kvs=(workload.kv,),
        prefer=search.prefer,
        names_flags=False,
        chunk=search.chunk,
        in_child=search.in_child,
        known=search.known,
        groups=search.groups and search.in_child,
    )
    options = within(options, search.time_limit_s)
    usual = build_problem(inputs)
    ways = [
        way.slowed(search.slowdowns).capped(search.at_most)
        for way in _ways(inputs, usual, search.prefer)
    ]
    best = _first_that_fits(ways, search.windows or (workload.batch,), options, path)
    work = best.problem.workload
    notes = [
        dtype_note(inputs.spec, cluster, work.dtype),
        positions_note(inputs.spec, work),
        best.outcome.note,
        step_note(best.problem, best.outcome.assignment),
        *usual.left_out,
        *usual.cost_notes(work),
    ]
    return MadePlan(
        plan=best.plan,
        seconds=best.outcome.seconds,
        notes=tuple(note for note in notes if note),
        known=None if search.known is None else _known_plan(best, search.known),
    )


def _known_plan(best: Answer, known: KnownPlan) -> Plan | None:
    """Return a known plan with the costs of the best one; None where it has no room there."""
    assignment = known.in_numbers_of(best.problem)
    if assignment is None:
        return None
    outcome = Outcome(
        method="known",
        status="heuristic",
        assignment=assignment,
        value=objective_of(best.problem, assignment),
        bound=None,
        seconds=0.0,
    )
    try:
        return build_plan(best.problem, outcome)
    except DoesNotFitError:
        return None


@dataclass(frozen=True, kw_only=True)
class _Way:
    """The job with one way to choose precisions, and the smallest window worth taking for it."""

    problem: Problem
    least_window: int = 1

    def slowed(self, slowdowns: Mapping[str, float]) -> _Way:
        """Return it with devices that take longer than their costs say."""
        costs = self.problem.costs
        scale = {**costs.scale, **slowdowns}
        problem = self.problem.with_changes(costs=replace(costs, scale=scale))
        return replace(self, problem=problem) if slowdowns else self

    def capped(self, at_most: Sequence[Precision]) -> _Way:
        """Return it without choices of more bits than a layer may have, if there are others."""
        p = self.problem
        if not at_most:
            return self
        offered = p.offered or (p.choices,) * len(at_most)
        lowest = min(p.choices, key=lambda choice: choice.weight_bits)
        kept = [
            tuple(choice for choice in own if choice.weight_bits <= most.weight_bits) or (lowest,)
            for own, most in zip(offered, at_most, strict=True)
        ]
        return replace(self, problem=p.with_changes(offered=tuple(kept)))


def _ways(inputs: ProblemInputs, usual: BuiltProblem, prefer: Prefer) -> list[_Way]:
    """Return how precisions may be chosen, best first: for quality, all 16 bits before others."""
    problem = usual.problem
    chosen = problem.offered or inputs.bits is not None
    if chosen or prefer != "quality" or Precision.W16A16 not in problem.choices:
        return [_Way(problem=problem)]
    whole = build_problem(replace(inputs, bits=(Precision.W16A16,))).problem
    return [_Way(problem=whole, least_window=8), _Way(problem=problem)]


def _first_that_fits(
    ways: Sequence[_Way], windows: Sequence[int], options: SolveOptions, path: str | None
) -> Answer:
    refusal: DoesNotFitError | None = None
    for way in ways:
        for batch in windows:
            if batch < min(way.least_window, windows[0]):
                continue
            work = way.problem.workload.model_copy(update={"batch": batch})
            try:
                problem = way.problem.with_changes(workload=work)
                best = answer(problem, options, path)
                return _with_shared_stages(problem, best, options, path)[0]
            except DoesNotFitError as error:
                refusal = error
    assert refusal is not None, "there is a window at least"
    raise refusal
