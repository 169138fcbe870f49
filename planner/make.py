"""Makes a plan from the command line's wishes, checks it, writes and prints it."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from llmpq.errors import DoesNotFitError, unknown_name
from llmpq.file_form import check_writable
from llmpq.plan import Plan
from llmpq.planner import limits
from llmpq.planner.advice import explain_infeasible, too_big
from llmpq.planner.arguments import PlanRequest
from llmpq.planner.build_plan import build_plan
from llmpq.planner.check import check_plan
from llmpq.planner.ilp_backends import Backend
from llmpq.planner.methods import NO_PLAN, PLANNERS, How
from llmpq.planner.outcome import OPTIMAL_GAP, Infeasible, Outcome, Unfinished
from llmpq.planner.problem import Problem
from llmpq.planner.request import make_problem, parse_kv
from llmpq.planner.speculation import describe, with_speculation
from llmpq.planner.stored_precisions import stored_line
from llmpq.planner.what_if import changed_problem
from llmpq.precision import KVPrecision
from llmpq.speculation import SpeculationMode

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How to solve, from the flags."""

    method: str
    time_limit_s: float
    gap: float
    backend: Backend
    budget: float | None
    kvs: tuple[KVPrecision, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A solved problem and its checked plan."""

    problem: Problem
    outcome: Outcome
    plan: Plan


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
    wish = read_wish(request)
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
    for change in request.what_if:
        changed_problem(problem, change)
    everything = wish.method == "all"
    best = answer(problem, wish, path) if not everything else _compare(request, problem, wish, path)
    if request.speculate is not None:
        best = replace(best, plan=_drafting(best.plan, problem, request.speculate))
        notes = [*notes, describe(best.plan)]
    if request.output:
        best.plan.save_json(request.output)
    if request.json:
        sys.stdout.write(best.plan.dump_json())
        return
    console = open_console()
    from llmpq.planner.report import print_plan

    print_plan(console, best.plan, seconds=best.outcome.seconds)
    if request.explain:
        _explain(console, best, wish.budget)
    for change in request.what_if:
        _what_if(console, change, best, wish, path)
    for note in notes + ([best.outcome.note] if best.outcome.note else []):
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
    if request.output:
        console.print(f"wrote {request.output}", highlight=False, soft_wrap=True, markup=False)


def _check_mode(speculate: str | None) -> None:
    modes = ("auto", *get_args(SpeculationMode))
    if speculate is not None and speculate not in modes:
        raise ValueError(f"--speculate {speculate}: expected one of {', '.join(modes)}")


def read_wish(request: PlanRequest) -> Wish:
    """Return how to solve, from the flags."""
    method, budget = "heuristic" if request.shaq_efficient else request.method or "exact", None
    if method == "flexgen":
        raise ValueError(NO_PLAN)
    if request.quality_budget is not None:
        budget = limits.within("--quality-budget", request.quality_budget, limits.MAX_BUDGET)
    if budget is not None and method not in ("exact", "ilp"):
        raise ValueError(
            f"--quality-budget is for --method exact or ilp, not {method}: the others cannot "
            "keep a budget"
        )
    return Wish(
        method=method,
        time_limit_s=limits.within("--time-limit", request.time_limit, math.inf),
        gap=limits.within("--gap", request.gap, 1.0),
        backend=request.solver or "highs",
        budget=budget,
        kvs=parse_kv(request.kv),
    )


def answer(problem: Problem, wish: Wish, path: str | None) -> Answer:
    """Return the best plan over the KV precisions allowed; explain it when nothing fits.

    The time is shared out among the precisions, and the bound is the least of all of them.
    """
    best: tuple[Problem, Outcome] | None = None
    bounds: list[float] = []
    unfinished: Unfinished | None = None
    refusal = ""
    deadline = time.perf_counter() + wish.time_limit_s
    for number, kv in enumerate(wish.kvs):
        priced = problem.with_changes(workload=problem.workload.model_copy(update={"kv": kv}))
        if too_big(priced):
            continue
        left = max(0.0, deadline - time.perf_counter())
        share = wish.time_limit_s if math.isinf(left) else left / (len(wish.kvs) - number)
        ceiling = math.inf if best is None else best[1].value
        try:
            outcome = _solve(priced, replace(wish, time_limit_s=share), ceiling)
        except Unfinished as error:
            unfinished = error
            bounds.append(error.bound)
            continue
        except Infeasible as error:
            refusal = str(error)
            continue
        bounds.append(-math.inf if outcome.bound is None else outcome.bound)
        if best is None or outcome.value < best[1].value:
            best = priced, outcome
    if best is None and unfinished is not None:
        raise unfinished
    if best is None:
        if wish.method not in ("exact", "ilp") or wish.budget is not None:
            _raise_unless_smaller(problem, refusal)
        raise DoesNotFitError(explain_infeasible(problem)) from None
    priced, outcome = best
    outcome = _over_all(outcome, min(bounds))
    # Under a budget the value is time alone.
    valued = priced if wish.budget is None else priced.with_changes(theta=0.0)
    return Answer(problem=priced, outcome=outcome, plan=checked_plan(valued, outcome, path))


def _over_all(outcome: Outcome, bound: float) -> Outcome:
    """Return an outcome with the bound over every KV precision in place of its own."""
    if outcome.bound is None:
        return outcome
    if not math.isfinite(bound):
        return replace(outcome, bound=None, status="feasible")
    bound = min(bound, outcome.value)
    proven = outcome.value - bound <= OPTIMAL_GAP * abs(outcome.value)
    return replace(outcome, bound=bound, status="optimal" if proven else "feasible")


def _drafting(plan: Plan, problem: Problem, wish: str) -> Plan:
    costs = problem.costs.estimate
    costs = costs if problem.costs.profile is None else costs.merged(problem.costs.profile)
    return with_speculation(plan, problem.spec, problem.cluster, costs, wish)


def _raise_unless_smaller(problem: Problem, refusal: str) -> None:
    """Report a method's own refusal when the model as such would fit."""
    if not too_big(problem):
        raise DoesNotFitError(refusal)


def _solve(problem: Problem, wish: Wish, ceiling: float) -> Outcome:
    """Solve in a child process: a crash there is an error here."""
    from llmpq.planner.isolated import solve_isolated

    how = How(
        method=wish.method,
        time_limit_s=wish.time_limit_s,
        gap=wish.gap,
        backend=wish.backend,
        budget=wish.budget,
        ceiling=ceiling,
    )
    return solve_isolated(problem, how)


def checked_plan(problem: Problem, outcome: Outcome, path: str | None) -> Plan:
    """Build the plan and have it checked by code that shares nothing with the solver."""
    plan = build_plan(problem, outcome, model_path=path)
    check_plan(plan, spec=problem.spec, cluster=problem.cluster, costs=problem.costs)
    return plan


def open_console() -> Console:
    """Return the console of results: wide where no terminal says how wide it is."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def _compare(request: PlanRequest, problem: Problem, wish: Wish, path: str | None) -> Answer:
    """Solve with every method, print them side by side, return the best."""
    from llmpq.planner.isolated import offload_isolated
    from llmpq.planner.report import comparison_table

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
    from llmpq.planner.explain import cost_error_study, explain_plan, regret_lines

    names = [stage.device for stage in best.plan.stages]
    lines = explain_plan(best.problem, best.outcome.assignment, names)
    lines += regret_lines(cost_error_study(best.problem, best.outcome, budget=budget))
    for line in lines:
        console.print(f"- {line}", highlight=False, soft_wrap=True, markup=False)


def _what_if(console: Console, change: str, best: Answer, wish: Wish, path: str | None) -> None:
    """Print what a change would do, planned by the same method: of all, by the best one."""
    from llmpq.planner.what_if import compared

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


def make_plan(
    model: str | Path,
    *,
    devices: str | None = None,
    cluster: str | Path | None = None,
    batch: int = 16,
    prompt_len: int = 512,
    gen_len: int = 100,
    bits: str | None = None,
    kv: str = "16",
    dtype: str = "auto",
    costs: str | Path | None = None,
    omega_file: str | Path | None = None,
    theta: float | None = None,
    quality_budget: float | None = None,
    method: str | None = None,
    time_limit_s: float = 60.0,
) -> Plan:
    """Return the best plan of a job, as `llmpq-algo` makes it with the flags of these names.

    The devices are `devices` ("4090,3090:2,cpu"), those of a cluster file, or this machine's.
    """
    from llmpq.planner.arguments import DTYPES, METHODS, plan_request

    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if method is not None and method not in METHODS:
        raise unknown_name("method", method, METHODS)
    wishes: dict[str, object] = {
        "--model": model,
        "--devices": devices,
        "--cluster": cluster,
        "--batch": batch,
        "--prompt-len": prompt_len,
        "--gen-len": gen_len,
        "--bits": bits,
        "--kv": kv,
        "--dtype": dtype,
        "--costs": costs,
        "--omega-file": omega_file,
        "--theta": theta,
        "--quality-budget": quality_budget,
        "--method": method,
        "--time-limit": time_limit_s,
    }
    words = [str(word) for pair in wishes.items() if pair[1] is not None for word in pair]
    request = plan_request(words)
    problem, path, _ = make_problem(request)
    return answer(problem, read_wish(request), path).plan
