"""What `llmpq-algo plan` does: makes a plan, adds drafts, writes and prints what was asked."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from llmpq.devices.cluster import Cluster
from llmpq.devices.default_dtype import without_bfloat16
from llmpq.errors import DoesNotFitError
from llmpq.file_form import check_writable, save_text
from llmpq.pictures.plan_page import Beside, plan_page, topology_page
from llmpq.pictures.text_pictures import memory_bars, pipeline_lines
from llmpq.planner.cli.alternatives import MethodRow, Speed, bits_lines, left_out_lines
from llmpq.planner.cli.arguments import read_flag
from llmpq.planner.cli.certificates import (
    save_plan,
    write_certificate,
    write_topology_certificate,
)
from llmpq.planner.cli.own_dtype import beats, closer_refusal, in_own_dtype, of_unused
from llmpq.planner.cli.show_topology import print_topology, topology_lines
from llmpq.planner.evaluate.simulator import reported_time
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.outcome import OPTIMAL_GAP, Infeasible, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.problem.stored_precisions import stored_line
from llmpq.planner.solving.answer import (
    Answer,
    TopologyAnswer,
    answer,
    answer_topology,
    before_groups,
    in_waves,
    one_engine,
    pipeline_below,
    score,
    solve_options,
    solved,
    with_robustness,
    without_sending,
)
from llmpq.planner.solving.device_groups import may_group
from llmpq.planner.solving.methods import PLANNERS, SolveOptions, anew, within
from llmpq.planner.solving.plan_search import nothing_fits, variants_with_room
from llmpq.planner.solving.topology_search import TOPOLOGY_GAP
from llmpq.plans.plan import Plan
from llmpq.plans.prefix_states import prefix_notes
from llmpq.plans.speculation import SpeculationMode
from llmpq.plans.topology import Topology
from llmpq.precision import Precision, bits_of

if TYPE_CHECKING:
    from rich.console import Console


SEARCHES = ("exact", "ilp", "heuristic")
"""Methods that search until the time limit."""
SAME_VALUE = 1e-9
"""Relative difference of plans that are equally good: the one with the best proof is shown."""
COMPARED_GAP, COMPARED_S = 1e-3, 10.0
"""Relative gap to which a comparison's plans of the exact method are solved, and for how long."""


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """A request, checked: what to solve, how, and what to tell the user beside it."""

    problem: Problem
    options: SolveOptions
    path: str | None
    notes: list[str]


def read_job(request: PlanRequest) -> PlanJob:
    """Check a request and read its files; say which precisions a stored model keeps."""
    _check_mode(request.speculate)
    problem, path, notes = make_problem(request)
    options = solve_options(request, problem)
    if problem.offered and request.bits is None:
        line = stored_line(path or problem.spec.name, problem.offered)
        sys.stderr.write(f"llmpq-algo: {line}\n")
    if request.output == "":
        raise ValueError("--output is empty, expected a file's name; give one or leave it out")
    return PlanJob(problem=problem, options=options, path=path, notes=notes)


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """What a job is answered with: a plan of one engine, or several engines."""

    problem: Problem
    """The job, without the cards that are left out."""
    best: Answer
    several: TopologyAnswer | None = None
    left_out: str | None = None
    """What is said of cards that are left out for their dtype."""
    compared_with: str | None = None
    """What the plan's bound is of, where it is not of pipelines with a device a stage."""

    @property
    def plan(self) -> Plan | Topology:
        """The answer."""
        topology = None if self.several is None else self.several.topology
        return topology or self.best.plan


def find_plan(
    request: PlanRequest, problem: Problem, options: SolveOptions, path: str | None
) -> FoundPlan:
    """Return the answer to a job by the method that the options name."""
    best: Answer | None = None
    several: TopologyAnswer | None = None
    refused: DoesNotFitError | None = None
    try:
        best, several = best_answer(request, problem, options, path)
    except DoesNotFitError as error:
        refused = error
    at_once = best if best is not None and best.waves == 1 else None
    own = in_own_dtype(request, problem, at_once, path)
    lacking = without_bfloat16(problem.cluster)
    engines = None if several is None or not several.uses(lacking) else several.topology
    if own is not None and engines is not None and not beats(own[0], engines, options):
        own = None  # the engines that are best need these cards
    left_out = None
    if own is not None:
        best, left_out = own
        problem = best.problem
        if several is not None:  # of the job with all cards
            shared = _may_share(request, problem, options)
            several = _several(request, problem, best, options, path) if shared else None
    if best is None:
        assert refused is not None, "nothing was found"
        raise refused
    compared_with = None
    if several is not None and several.single is not None:
        best, several = several.single, replace(several, topology=None)
        compared_with = ANY_GROUPS if several.found.groups else None
    return FoundPlan(
        problem=problem,
        best=best,
        several=several,
        left_out=left_out,
        compared_with=compared_with,
    )


def _best_of_methods(
    request: PlanRequest, problem: Problem, options: SolveOptions, path: str | None
) -> tuple[FoundPlan, Mapping[str, MethodRow | str]]:
    """Return the best plan of all methods, and what each of them found."""
    try:
        best, compared = _compare(request, problem, options, path)
    except DoesNotFitError:
        own = in_own_dtype(request, problem, None, path)
        if own is None:
            raise
        return FoundPlan(problem=own[0].problem, best=own[0], left_out=own[1]), {}
    return FoundPlan(problem=problem, best=best), compared


def make_and_show(request: PlanRequest, job: PlanJob) -> None:
    """Plan, check, write `-o`, and print."""
    problem, options, path, notes = job.problem, job.options, job.path, job.notes
    check_outputs(request)
    notes = [*notes, *one_pipeline_notes(request, options, problem)]
    changes = _changed(request, problem, notes)
    compared: Mapping[str, MethodRow | str] = {}
    try:
        if options.method == "all":
            found, compared = _best_of_methods(request, problem, options, path)
        else:
            found = find_plan(request, problem, options, path)
    except DoesNotFitError as error:
        for line in _what_if(changes, None, path):
            say(open_console(), line)
        raise closer_refusal(request, problem, error, path) from None
    if options.method == "all" and options.groups and may_group(problem):
        notes.append(NO_GROUPS)
    if found.left_out is not None:
        notes = of_unused(request, problem, notes, found.left_out)
    problem, best, several = found.problem, found.best, found.several
    job = replace(job, problem=problem, notes=notes)
    if several is not None and several.topology is not None:
        _show_topology(request, job, found, several, several.topology, changes)
        return
    from llmpq.planner.cli.report import mtp_notes, print_plan, remarks_of

    if request.speculate is None:
        others_s = 0.0 if several is None else several.found.work_s
        best = with_robustness(best, options, best.outcome.work_s + others_s)
    else:
        from llmpq.planner.evaluate.add_drafts import describe

        best = replace(best, plan=_drafting(best.plan, problem, request.speculate))
        notes = [*notes, describe(best.plan)]
    notes = [*notes, *mtp_notes(best.plan, problem.spec), *prefix_notes(best.plan, problem.spec)]
    proof: str | None = None
    if request.output:
        save_plan(request.output, best.plan)
        proof = write_certificate(request.output, best, options)
    if request.json:
        sys.stdout.write(best.plan.dump_json())
        if request.report is None:
            return
    from llmpq.planner.evaluate.simulator import step_note

    of_one = several is not None and request.engines != "1"
    beside = bits_lines(best, options, job.problem, of_one=of_one)
    if request.engines != "1" or several is not None:
        beside += topology_lines(best, several, num_engines(request.engines))
        if several is None and problem.workload.batch > 1:
            many = len(problem.cluster.devices) > 1
            beside += [ONE_FITS] if many and _may_ask(request, options) else []
    why = _why(best, options, whole=request.explain) if request.explain or request.report else []
    changed = _what_if(changes, found, path)
    said = [best.outcome.note, step_note(best.problem, best.outcome.assignment)]
    notes = [*notes, *filter(None, said)]
    if request.report:
        more = Beside(
            why=why,
            changes=[*beside, *changed],
            notes=notes,
            methods=method_data(compared),
        )
        write_report(request.report, plan_page(best.plan, more))
    if request.json:
        return
    console = open_console()
    seconds = best.outcome.seconds + (0.0 if several is None else several.found.seconds)
    print_plan(
        console,
        best.plan,
        seconds=seconds,
        alternatives=beside,
        notes=notes,
        compared_with=found.compared_with,
    )
    if request.explain:
        for drawn in (*memory_bars(best.plan), *pipeline_lines(best.plan)):
            console.print(drawn, soft_wrap=True)
        for line in why:
            say(console, f"- {line}")
    for line in changed:
        say(console, line)
    for line in remarks_of(notes):
        say(console, line)
    for path_written in filter(None, (request.output, proof, request.report)):
        say(console, f"wrote {path_written}")


ANY_GROUPS = "pipelines with any of the groups searched"
"""Plans of which the bound of one is that was found among them."""
NO_GROUPS = (
    "--method all compares pipelines with a device a stage; without it stages that devices share "
    "and several engines are looked for, too"
)
ONE_PIPELINE = ("pin", "max_devices", "pareto")
"""Fields of a request that are of one pipeline, with a device a stage."""


ONE_FITS = "engines: one engine (no two groups of these devices each have room for the model)"

QUICK_S = 3.0
"""Seconds of work of the search for a pipeline that topologies are compared with first."""
LEAST_LEFT = 1 / 4
"""Share of the time that the search for a pipeline has behind them at least."""
AGAIN_SHARE = 1 / 12
"""Share of the time in which a pipeline is looked for that is better than the topology found."""


def best_answer(
    request: PlanRequest, problem: Problem, options: SolveOptions, path: str | None
) -> tuple[Answer, TopologyAnswer | None]:
    """Return the best pipeline, and the best topology where several engines may share the job.

    Engines that send nothing between devices are taken where a better plan is hardly better.
    """
    best, found = _best_of_all(request, problem, options, path)
    return best, None if found is None else without_sending(best, found, options)


def _best_of_all(
    request: PlanRequest, problem: Problem, options: SolveOptions, path: str | None
) -> tuple[Answer, TopologyAnswer | None]:
    """Return the best pipeline and the best topology.

    Engines that are better than any pipeline can be need no more of the search for one.
    """
    if not _may_share(request, problem, options):
        try:
            return answer(problem, options, path), None
        except DoesNotFitError as error:
            if num_engines(request.engines) == 1 or not _may_ask(request, options):
                raise
            best = in_waves(problem, options, path, error)
            return best, _topology(problem, best, options, path, None)
    exactly = num_engines(request.engines)
    if exactly == 1 or (exactly is None and not _may_divide(problem, options)):
        try:
            best = answer(problem, before_groups(options), path)
        except DoesNotFitError as error:
            best = in_waves(problem, before_groups(options), path, error)
            found = _several(request, problem, best, options, path)
            fits = None if found is None else found.single if exactly == 1 else found.topology
            if fits is None:
                raise
            return best, found
        return best, _several(request, problem, best, options, path)
    try:
        best = _quick(problem, options, path)
    except DoesNotFitError as error:
        best = in_waves(problem, options, path, error)
    found = _topology(problem, best, options, path, exactly)
    spent_s = best.outcome.work_s + found.found.work_s
    if best.waves > 1 and found.topology is None:
        raise nothing_fits(problem, options)
    if (
        best.waves > 1
        or exactly is not None
        or found.known.bound * (1 + TOPOLOGY_GAP) >= found.known.value
    ):
        return best, found
    if found.topology is not None:
        if found.found.value <= found.known.bound * (1 + TOPOLOGY_GAP):
            return best, found
        hurried = replace(options, time_limit_s=options.time_limit_s * AGAIN_SHARE)
        better = pipeline_below(problem, best, hurried, path, found)
        return (best, found) if better is None else (better, _without_engines(found, better))
    limit_s = options.time_limit_s  # of all, and topologies may be looked for once more
    left_s = max(LEAST_LEFT * limit_s, limit_s - 2 * spent_s)
    more = answer(problem, replace(options, time_limit_s=left_s), path)
    if _is_worse(more, best, options):  # the time ended the longer search on another way
        return best, found
    if more.outcome.value >= best.outcome.value * (1 - TOPOLOGY_GAP):
        return more, found
    return more, _topology(problem, more, options, path, exactly)


def _is_worse(one: Answer, than: Answer, options: SolveOptions) -> bool:
    """Whether a plan is worse than another of as many rows, by what the options state."""
    other = score(than, than.plan.predicted, options)
    return score(one, one.plan.predicted, options) > _least_worse(other)


def _quick(problem: Problem, options: SolveOptions, path: str | None) -> Answer:
    """Return the best pipeline that a short search finds; of the whole time where it finds none."""
    with suppress(Unfinished):
        hurried = replace(options, time_limit_s=min(QUICK_S, options.time_limit_s))
        return answer(problem, hurried, path)
    return answer(problem, options, path)


def _without_engines(found: TopologyAnswer, better: Answer) -> TopologyAnswer:
    """Return what topologies are worth where a pipeline was found that is better."""
    known = replace(found.known, value=better.outcome.value)
    return replace(found, topology=None, plans=(), known=known, pipeline=better)


def asked_of_one(request: PlanRequest) -> list[str]:
    """Return the flags of a request that are of one pipeline."""
    return [f"--{name.replace('_', '-')}" for name in ONE_PIPELINE if getattr(request, name)]


def one_pipeline_notes(request: PlanRequest, options: SolveOptions, problem: Problem) -> list[str]:
    """Return that a plan is one pipeline for a flag's sake, where more may be better.

    What may be: several engines, or stages that devices share.
    """
    flags = asked_of_one(request)
    if not flags or _is_alone(request, options):
        return []
    more = more_than_pipelines(request, options, problem)
    if not more:
        return []
    plans, them = ("plan", "them") if len(flags) > 1 else ("plans", "it")
    return [
        f"{' and '.join(flags)} {plans} one pipeline; without {them} {' and '.join(more.values())} "
        f"are looked for, too (not with {' '.join(more)})"
    ]


def more_than_pipelines(
    request: PlanRequest, options: SolveOptions, problem: Problem
) -> dict[str, str]:
    """Return what is looked for beside pipelines with a device a stage, by the flag against it."""
    found: dict[str, str] = {}
    rows = min(len(problem.cluster.devices), request.batch)
    if rows > 1 and num_engines(request.engines) is None:
        found["--engines 1"] = "several engines"
    if options.groups and may_group(problem.with_changes(pins={}, max_devices=None)):
        found["--tensor-parallel 1"] = "stages that devices share"
    return found


def _may_share(request: PlanRequest, problem: Problem, options: SolveOptions) -> bool:
    """Whether several engines are asked for, or may be better; `ValueError` where they cannot."""
    exactly = num_engines(request.engines)
    devices, rows = len(problem.cluster.devices), problem.workload.batch
    if exactly is None:
        several = devices > 1 and _may_ask(request, options)
        groups = options.groups and may_group(problem)
        return several and (groups or _may_divide(problem, options))
    if exactly > 1 and _is_alone(request, options):
        raise ValueError(
            f"--engines {exactly} needs --method exact and --objective makespan; leave the others "
            "out"
        )
    if exactly > min(devices, rows):
        raise ValueError(
            f"--engines {exactly} needs as many devices and rows, got {devices} devices and "
            f"--batch {rows}; ask for fewer"
        )
    if exactly == 1:
        alone = _is_alone(request, options) or bool(asked_of_one(request))
        return not alone and options.groups and may_group(problem)
    return min(devices, rows) > 1


def _may_ask(request: PlanRequest, options: SolveOptions) -> bool:
    """Whether a request that leaves the number of engines open may be answered with several.

    Or, on one device, with one that runs the rows in waves.
    """
    return not (_is_alone(request, options) or asked_of_one(request))


def _may_divide(problem: Problem, options: SolveOptions) -> bool:
    """Whether engines may divide the rows: two have room for the model."""
    from llmpq.planner.solving.topologies import two_fit

    return problem.workload.batch > 1 and two_fit(problem, options)


def _several(
    request: PlanRequest, problem: Problem, best: Answer, options: SolveOptions, path: str | None
) -> TopologyAnswer | None:
    """Return the best topology of so many engines as are asked for, beside the best pipeline."""
    exactly = num_engines(request.engines)
    if exactly == 1:
        return one_engine(problem, best, options, path)
    return _topology(problem, best, options, path, exactly)


def _topology(
    problem: Problem, best: Answer, options: SolveOptions, path: str | None, exactly: int | None
) -> TopologyAnswer:
    """Return the best topology of the job."""
    found = answer_topology(problem, best, options, path, exactly=exactly)
    if exactly is not None and found.topology is None:
        if math.isinf(found.found.bound):
            raise DoesNotFitError(
                f"no {exactly} engines have room for the job, each with the whole model; ask for "
                "fewer with --engines"
            )
        raise DoesNotFitError(
            f"no {exactly} engines were found that have room for the job, each with the whole "
            "model; ask for fewer with --engines, or for more time with --time-limit"
        )
    return found


def _is_alone(request: PlanRequest, options: SolveOptions) -> bool:
    """Whether the way to solve is of one pipeline."""
    return options.method != "exact" or request.objective != "makespan"


def num_engines(text: str) -> int | None:
    """Return how many engines `--engines` asks for; None: as many as are best."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--engines must be auto, 1 or another number of engines, got {text}")
    return int(text)


def _show_topology(
    request: PlanRequest,
    job: PlanJob,
    whole: FoundPlan,
    found: TopologyAnswer,
    topology: Topology,
    changes: Sequence[ChangedJob],
) -> None:
    """Write a plan of several engines, and print it."""
    best = whole.best
    if request.speculate is not None:
        topology = _drafting_engines(topology, found, request.speculate)
    proof: str | None = None
    if request.output:
        save_plan(request.output, topology)
        proof = write_topology_certificate(
            request.output,
            topology,
            found,
            job.problem,
            job.options,
            num_engines(request.engines),
        )
    lines = topology_lines(best, found, num_engines(request.engines))
    changed = _what_if(changes, whole, job.path)
    if request.report:
        write_report(request.report, topology_page(topology, [*lines, *changed, *job.notes]))
    if request.json:
        sys.stdout.write(topology.dump_json())
        return
    from llmpq.planner.cli.report import remarks_of

    console = open_console()
    seconds = best.outcome.seconds + found.found.seconds
    print_topology(console, topology, lines, job.notes, seconds=seconds)
    for number, own in enumerate(found.plans if request.explain else ()):
        for line in _why(own, job.options, whole=False):
            say(console, f"- engine {number}: {line}")
    for line in changed:
        say(console, line)
    for line in remarks_of(job.notes):
        say(console, line)
    for path_written in filter(None, (request.output, proof, request.report)):
        say(console, f"wrote {path_written}")


def _drafting_engines(topology: Topology, found: TopologyAnswer, mode: str) -> Topology:
    """Return the topology with drafts in each engine's plan that has room for them."""
    pairs = zip(topology.engines, found.plans, strict=True)
    engines = tuple(
        one.model_copy(update={"plan": _drafting(one.plan, own.problem, mode)})
        for one, own in pairs
    )
    return topology.model_copy(update={"engines": engines})


def check_outputs(request: PlanRequest) -> None:
    """`ValueError` where `-o` or `--report` can never be written, or are no files of their kind."""
    report = request.report
    if report is not None and not report.lower().endswith((".html", ".htm")):
        raise ValueError(
            f"--report {report}: expected a name that ends in .html (a page); -o writes the plan "
            "as JSON"
        )
    for name in filter(None, (request.output, report)):
        check_writable(name)


def write_report(path: str, page: str) -> None:
    """Write a page, creating its folder."""
    save_text(path, page)


def method_data(rows: Mapping[str, MethodRow | str]) -> list[dict[str, Any]]:
    """Return the methods side by side as a page takes them."""
    return [
        {"method": name, **({"why_not": row} if isinstance(row, str) else asdict(row))}
        for name, row in rows.items()
    ]


ChangedJob = tuple[str, PlanRequest, Problem, SolveOptions]
"""What is said of a change, and the job after it."""


def _changed(request: PlanRequest, problem: Problem, known: Sequence[str]) -> list[ChangedJob]:
    """Return the job after every `--what-if`, which says what is assumed of devices it adds.

    A change that cannot be is refused. `known`: notes of the job as it is.
    """
    from llmpq.planner.cli.what_if import changed_devices, changed_request, parts_of

    found = []
    for change in request.what_if:
        changed, other, devices, notes = request, problem, None, []
        for part in parts_of(change):
            if part[:1] in ("+", "-") and not part.startswith("--"):
                changed, devices = changed_devices(changed, other.cluster, part)
                notes += _where_added(other.cluster, devices)
            else:
                changed = changed_request(changed, part, read_flag)
            other, _, made = make_problem(changed, devices)
            notes += made
        notes = list(dict.fromkeys(notes))
        new = [n for n in notes if n.startswith("assumed: ") and n not in known]
        own = [n for n in new if "stay free" not in n]
        said = f"{change} ({'; '.join(own)})" if own else change
        options = solve_options(changed, other)
        _may_share(changed, other, options)  # says where so many engines cannot be
        found.append((said, changed, other, options))
    return found


def _where_added(before: Cluster, after: Cluster | None) -> list[str]:
    """Return in which of several machines a change puts devices; none where the user says all."""
    if after is None or len(after.nodes) == 1:
        return []
    there = Counter(device.node for device in before.devices)
    more = Counter(device.node for device in after.devices) - there
    return [f"assumed: in {n if n in there else 'a machine of its own'}" for n in more]


def _check_mode(speculate: str | None) -> None:
    modes = ("auto", *get_args(SpeculationMode))
    if speculate is not None and speculate not in modes:
        raise ValueError(f"--speculate {speculate}: expected one of {', '.join(modes)}")


def _drafting(plan: Plan, problem: Problem, options: str) -> Plan:
    from llmpq.planner.evaluate.add_drafts import with_speculation

    costs = problem.costs.estimate
    costs = costs if problem.costs.profile is None else costs.merged(problem.costs.profile)
    return with_speculation(plan, problem.spec, problem.cluster, costs, options)


def say(console: Console, line: str) -> None:
    """Print a line as it is, however long."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def open_console() -> Console:
    """Return the console of results: wide where no terminal says how wide it is."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def _compare(
    request: PlanRequest, problem: Problem, options: SolveOptions, path: str | None
) -> tuple[Answer, Mapping[str, MethodRow | str]]:
    """Solve with every method, print them side by side; return the best, and all of them.

    After a preference all of them minimise time + theta omega at the exact method's theta.
    """
    answers: dict[str, Answer | str] = {}
    unfinished: Unfinished | None = None
    may_fit = bool(variants_with_room(problem, options))
    for method in PLANNERS:
        limit = f", {options.asked_s:g} s at most" if method in SEARCHES else ""
        sys.stderr.write(f"llmpq-algo: --method {method}{limit}\n")
        try:
            own = within(replace(options, method=method), options.asked_s)
            answers[method] = found = answer(problem, own, path)
        except Unfinished as error:
            unfinished = error
            answers[method] = "no plan in time"
        except DoesNotFitError:
            answers[method] = "found no plan" if may_fit else "does not fit"
        else:
            if options.prefer is not None:
                problem = problem.with_changes(theta=found.problem.theta)
                options = replace(options, prefer=None)
    made = {method: a for method, a in answers.items() if isinstance(a, Answer)}
    if not made and unfinished is not None:
        raise unfinished
    if not made:
        raise nothing_fits(problem, options)
    named: dict[str, MethodRow | str] = {}
    if not request.json or request.report:
        from llmpq.planner.cli.report import comparison_table

        rows = [
            a if isinstance(a, str) else _row(a.plan, a.outcome.seconds) for a in answers.values()
        ]
        named = dict(zip(answers, rows, strict=True))
        named |= _offloading(problem, options)
        exact = made.get("exact")
        reference = None if exact is None else _row(exact.plan, exact.outcome.seconds)
        seen: dict[str, MethodRow] = {}
        for name, row in named.items():
            if isinstance(row, MethodRow):
                loss = f"{row.omega:.9g}"
                seen[loss] = seen.get(loss) or _beside_exact(row, reference, problem, options)
                named[name] = replace(row, exact_s=seen[loss].exact_s)
        if not request.json:
            open_console().print(comparison_table(named, budget=options.budget))
    least = min(a.outcome.value for a in made.values())
    best = [a for a in made.values() if a.outcome.value <= least + SAME_VALUE * abs(least)]
    return min(best, key=_unproven), named


def _unproven(one: Answer) -> float:
    """Return how far a plan is from what is proven, 0 where it is proven optimal."""
    gap = one.plan.solver.gap or 0.0 if one.outcome.bound else 1.0
    return 0.0 if gap <= OPTIMAL_GAP else gap


def _row(plan: Plan, seconds: float) -> MethodRow:
    predicted = plan.predicted
    assert predicted is not None, "the planner always predicts"
    return MethodRow(
        bits=bits_of(plan.precisions),
        omega=predicted.sum_omega,
        time_s=predicted.total_s,
        tokens_per_s=predicted.output_tokens_per_s,
        solved_in_s=seconds,
    )


def _offloading(problem: Problem, options: SolveOptions) -> dict[str, MethodRow | str]:
    """Return the row of what FlexGen would take; none where no precision is one of all layers."""
    from llmpq.planner.solving.worker import offload_in_child

    try:
        found = offload_in_child(problem, options.budget)
    except Infeasible:
        return {}
    work = problem.workload
    row = MethodRow(
        bits=Precision(found.precision).title,
        omega=found.sum_omega,
        time_s=found.total_s,
        tokens_per_s=work.batch * work.gen_len / found.total_s,
    )
    return {"flexgen (estimate)": row}


def _beside_exact(
    row: MethodRow, exact: MethodRow | None, problem: Problem, options: SolveOptions
) -> MethodRow:
    """Return a row with the time of the exact method at no more loss: within a budget, its plan's.

    Without a budget methods lose more or less than the exact one's plan: it is then solved again,
    within what this method's plan loses.
    """
    if exact is not None and (options.budget is not None or row.omega == exact.omega):
        return replace(row, exact_s=exact.time_s)
    how = replace(
        options,
        method="exact",
        budget=row.omega,
        gap=max(options.gap, COMPARED_GAP),
    )
    try:
        priced, outcome = solved(problem, anew(how, COMPARED_S))
    except DoesNotFitError:
        return row
    return replace(row, exact_s=reported_time(priced, outcome.assignment).total_s)


def _why(best: Answer, options: SolveOptions, *, whole: bool) -> list[str]:
    """Return why this plan; `whole`: also what costs planning again, and how sure it is."""
    from llmpq.planner.cli.explain import (
        cost_error_study,
        explain_plan,
        is_balanced,
        regret_lines,
    )

    names = [stage.device for stage in best.plan.stages]
    lines = explain_plan(best.problem, best.outcome.assignment, names, best.outcome.gap)
    if whole:
        lines += left_out_lines(best, options)
        p, outcome = best.problem, best.outcome
        study = cost_error_study(p, outcome, budget=options.budget)
        lines += regret_lines(study, balanced=is_balanced(p, outcome.assignment))
    return lines


def _what_if(
    changes: Sequence[ChangedJob], before: FoundPlan | None, path: str | None
) -> list[str]:
    """Return what each change would do: what the command answers with for the changed job.

    Of all methods, by the best one. Without a plan of the job as it is: what a change would make
    possible.
    """
    from llmpq.planner.cli.what_if import compared, made_possible, only_adds

    lines = []
    for change, request, problem, options in changes:
        own = anew(options)
        try:
            if options.method == "all":
                method = "exact" if before is None else before.best.outcome.method
                found = answer(problem, replace(own, method=method), path)
                after = FoundPlan(problem=problem, best=found)
            else:
                after = find_plan(request, problem, own, path)
        except DoesNotFitError as error:
            closer = closer_refusal(request, problem, error, path)
            lines.append(f"what if {change}: {closer}")
            continue
        if before is None:
            said = made_possible(after.plan)
        elif only_adds(change) and _scored(after, own) > _least_worse(_scored(before, own)):
            said = (
                f"no better plan was found with it: {Speed.of_found(before.plan).text} as without "
                "it (a longer --time-limit may find one)"
            )
        else:
            said = compared(before.plan, after.plan)
        lines.append(f"what if {change}: {said}")
    return lines


def _scored(found: FoundPlan, options: SolveOptions) -> float:
    """Return what the options make smallest."""
    return score(found.best, found.plan.predicted, options)


def _least_worse(value: float) -> float:
    """Return the value above which another one is worse, not equal."""
    return value + SAME_VALUE * max(1.0, abs(value))
