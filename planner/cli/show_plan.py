"""What `llmpq-algo plan` does: makes a plan, adds drafts, writes and prints what was asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from llmpq.errors import DoesNotFitError
from llmpq.file_form import check_writable
from llmpq.plan import Plan
from llmpq.planner.alternatives import bits_lines
from llmpq.planner.answer import Answer, Wish, answer, read_wish
from llmpq.planner.formulation.outcome import Infeasible, Unfinished
from llmpq.planner.formulation.problem import Problem
from llmpq.planner.inputs.make_problem import make_problem
from llmpq.planner.inputs.requests import PlanRequest
from llmpq.planner.inputs.stored_precisions import stored_line
from llmpq.planner.predict.advice import explain_infeasible, too_big
from llmpq.planner.solving.methods import PLANNERS
from llmpq.sizes.stated_pool import with_pool
from llmpq.speculation import SpeculationMode

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """A request, checked: what to solve, how, and what to tell the user beside it."""

    problem: Problem
    wish: Wish
    path: str | None
    notes: list[str]


def read_job(request: PlanRequest) -> PlanJob:
    """Check a request and read its files; say which precisions a stored model keeps."""
    _check_mode(request.speculate)
    problem, path, notes = make_problem(request)
    wish = read_wish(request, problem.cluster)
    if problem.offered and request.bits is None:
        stored = [precisions[0] for precisions in problem.offered]
        sys.stderr.write(f"llmpq-algo: {stored_line(str(path), stored)}\n")
    if request.output == "":
        raise ValueError("--output is empty, expected a file's name; give one or leave it out")
    return PlanJob(problem=problem, wish=wish, path=path, notes=notes)


def make_and_show(request: PlanRequest, job: PlanJob) -> None:
    """Plan, check, write `-o`, and print."""
    problem, wish, path, notes = job.problem, job.wish, job.path, job.notes
    if request.output:
        check_writable(request.output)
    _check_changes(request, problem)
    everything = wish.method == "all"
    best = answer(problem, wish, path) if not everything else _compare(request, problem, wish, path)
    if request.speculate is not None:
        best = replace(best, plan=_drafting(best.plan, problem, request.speculate))
        from llmpq.planner.predict.add_drafts import describe

        notes = [*notes, describe(best.plan)]
    if request.kv_pool:
        best = replace(best, plan=with_pool(best.plan, problem.spec))
    if request.output:
        best.plan.save_json(request.output)
    if request.json:
        sys.stdout.write(best.plan.dump_json())
        return
    console = open_console()
    from llmpq.planner.cli.report import print_plan
    from llmpq.planner.predict.step_by_step import step_note

    beside = bits_lines(best, wish)
    print_plan(console, best.plan, seconds=best.outcome.seconds, alternatives=beside)
    if request.explain:
        _explain(console, best, wish.budget)
    for change in request.what_if:
        _what_if(console, change, best, wish, path)
    own = [best.outcome.note, step_note(best.problem, best.outcome.assignment)]
    for note in [*notes, *filter(None, own)]:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
    if request.output:
        console.print(f"wrote {request.output}", highlight=False, soft_wrap=True, markup=False)


def _check_changes(request: PlanRequest, problem: Problem) -> None:
    """Refuse a change that cannot be, before anything is solved."""
    if request.what_if:
        from llmpq.planner.predict.what_if import changed_problem

        for change in request.what_if:
            changed_problem(problem, change)


def _check_mode(speculate: str | None) -> None:
    modes = ("auto", *get_args(SpeculationMode))
    if speculate is not None and speculate not in modes:
        raise ValueError(f"--speculate {speculate}: expected one of {', '.join(modes)}")


def _drafting(plan: Plan, problem: Problem, wish: str) -> Plan:
    from llmpq.planner.predict.add_drafts import with_speculation

    costs = problem.costs.estimate
    costs = costs if problem.costs.profile is None else costs.merged(problem.costs.profile)
    return with_speculation(plan, problem.spec, problem.cluster, costs, wish)


def open_console() -> Console:
    """Return the console of results: wide where no terminal says how wide it is."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def _compare(request: PlanRequest, problem: Problem, wish: Wish, path: str | None) -> Answer:
    """Solve with every method, print them side by side, return the best."""
    from llmpq.planner.cli.report import comparison_table
    from llmpq.planner.solving.isolated import offload_isolated

    answers: dict[str, Answer | str] = {}
    unfinished: Unfinished | None = None
    works = [problem.workload.model_copy(update={"kv": kv}) for kv in wish.kvs]
    may_fit = not all(too_big(problem.with_changes(workload=work)) for work in works)
    for method in PLANNERS:
        try:
            answers[method] = answer(problem, replace(wish, method=method), path)
        except Unfinished as error:
            unfinished = error
            answers[method] = "no plan in time"
        except DoesNotFitError:
            answers[method] = "found no plan" if may_fit else "does not fit"
    found = [a for a in answers.values() if isinstance(a, Answer)]
    if not found and unfinished is not None:
        raise unfinished
    if not found:
        raise DoesNotFitError(explain_infeasible(problem))
    if not request.json:
        try:
            offload = offload_isolated(problem)
        except Infeasible:  # no precision that all layers may have
            offload = None
        rows = {m: a.plan if isinstance(a, Answer) else a for m, a in answers.items()}
        seconds = {m: a.outcome.seconds for m, a in answers.items() if isinstance(a, Answer)}
        open_console().print(comparison_table(rows, seconds, offload))
    return min(found, key=lambda a: a.outcome.value)


def _explain(console: Console, best: Answer, budget: float | None) -> None:
    from llmpq.planner.cli.explain import cost_error_study, explain_plan, regret_lines

    names = [stage.device for stage in best.plan.stages]
    lines = explain_plan(best.problem, best.outcome.assignment, names)
    lines += regret_lines(cost_error_study(best.problem, best.outcome, budget=budget))
    for line in lines:
        console.print(f"- {line}", highlight=False, soft_wrap=True, markup=False)


def _what_if(console: Console, change: str, best: Answer, wish: Wish, path: str | None) -> None:
    """Print what a change would do, planned by the same method: of all, by the best one."""
    from llmpq.planner.predict.what_if import changed_problem, compared

    if wish.method == "all":
        wish = replace(wish, method=best.outcome.method)
    try:
        other = answer(changed_problem(best.problem, change), wish, path)
    except DoesNotFitError as error:
        console.print(f"what if {change}: {error}", highlight=False, soft_wrap=True, markup=False)
        return
    before, after = best.plan.predicted, other.plan.predicted
    assert before is not None and after is not None, "the planner always predicts"
    line = f"what if {change}: {compared(before, after)}"
    console.print(line, highlight=False, soft_wrap=True, markup=False)
