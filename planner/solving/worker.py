"""The one child process in which solvers run, so that a crash inside one cannot end the command.

A job (a plan, a front, the estimate of offloading) is one child from begin to end. Where this
process has no other thread the child is a fork, which costs milliseconds; else a fork could copy a
lock that is never released, and a fresh interpreter solves (half a second more): it reads the job
as a JSON line on stdin and answers on stdout (`python -m llmpq.planner.solving.worker`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from llmpq.child import read_lines, take_answers, write_line
from llmpq.errors import DoesNotFitError, LlmpqError
from llmpq.planner.check.refusal import NothingFitsError
from llmpq.planner.problem.outcome import Assignment, Infeasible, Outcome, Stage, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.problem_json import parse_problem, problem_data
from llmpq.precision import KVPrecision

if TYPE_CHECKING:
    from llmpq.planner.front.front import Front
    from llmpq.planner.ilp.flexgen import OffloadEstimate
    from llmpq.planner.solving.plan_search import Solved
    from llmpq.planner.solving.topologies import FoundTopology
    from llmpq.planner.solving.topology_search import KnownPipeline
    from llmpq.plans.plan import Plan, Robustness

CHILD = (sys.executable, "-m", "llmpq.planner.solving.worker")
_PR_SET_PDEATHSIG = 1
"""Of prctl(2): which signal a process gets when its parent ends."""
Job = Literal["plan", "topology", "certificate", "engine_proofs", "robustness", "front", "offload"]


class SolverCrashed(LlmpqError):
    """The solver's process died; nothing is known of the problem."""


def plan_in_child(problem: Problem, options: SolveOptions, *, ceiling: float = math.inf) -> Solved:
    """Return the best plan of a job; raise what the search raises, `SolverCrashed` if it dies.

    `Unfinished` where none is found below `ceiling`.
    """
    from llmpq.planner.solving.plan_search import nothing_fits

    asked = {"options": _options_data(options), "ceiling": ceiling}
    answer = run_in_child(problem, "plan", asked, method=options.method)
    if "nothing_fits" in answer:
        raise nothing_fits(problem.with_changes(theta=answer["theta"]), options)
    return _solved(problem, answer)


def topology_in_child(
    problem: Problem, options: SolveOptions, known: KnownPipeline, *, exactly: int | None = None
) -> FoundTopology:
    """Return the best topology of a batch job, and what simple ones would give.

    `known`: the best plan of one engine; `exactly`: how many engines, any number where none.
    """
    from llmpq.planner.solving.device_groups import on_places
    from llmpq.planner.solving.topologies import FoundEngine, FoundTopology

    asked = {"options": _options_data(options), "known": asdict(known), "exactly": exactly}
    answer = run_in_child(problem, "topology", asked, method="exact")

    def read(engines: Sequence[dict[str, Any]]) -> tuple[FoundEngine, ...]:
        return tuple(
            FoundEngine(
                places=(places := tuple(map(_place, one["places"]))),
                rows=one["rows"],
                waves=one["waves"],
                solved=_solved(
                    on_places(problem, places, options.kvs).with_job(batch=one["batch"]),
                    one["solved"],
                ),
            )
            for one in engines
        )

    engines, alone = read(answer.pop("engines")), read(answer.pop("alone"))
    simple = {name: None if one is None else tuple(one) for name, one in answer["simple"].items()}
    most = tuple((tuple(v), rows) for v, rows in answer["most"])
    return FoundTopology(**{**answer, "simple": simple, "most": most}, engines=engines, alone=alone)


def _place(data: Any) -> Any:
    """Return a device's name, or the names and shares of several."""
    return data if isinstance(data, str) else (tuple(data[0]), tuple(data[1]))


def certificate_in_child(
    plan: Plan,
    problem: Problem,
    assignment: Assignment,
    variants: Sequence[Problem],
    budget: float | None,
) -> dict[str, Any]:
    """Return the certificate of a plan; `ValueError` says why it has none."""
    asked = {
        "plan": json.loads(plan.dump_json()),
        "assignment": asdict(assignment),
        "variants": [[one.kv.value, one.chunk] for one in variants],
        "budget": budget,
    }
    return run_in_child(problem, "certificate", asked, method="exact")


def engine_proofs_in_child(
    problem: Problem, options: SolveOptions, found: FoundTopology
) -> list[dict[str, Any]]:
    """Return what engines take for their rows at least, as far as it bounds a topology found."""
    asked = {"options": _options_data(options), "aim": found.bound, "most": found.most}
    return list(run_in_child(problem, "engine_proofs", asked, method="exact")["proofs"])


def robustness_in_child(
    problem: Problem,
    outcome: Outcome,
    variants: Sequence[Problem],
    options: SolveOptions,
    work_s: float,
) -> Robustness:
    """Return by how much costs may be wrong with a plan near the best."""
    from llmpq.plans.plan import Robustness

    asked = {
        "options": _options_data(options),
        "assignment": asdict(outcome.assignment),
        "variants": [[one.kv.value, one.chunk] for one in variants],
        "bound": outcome.bound,
        "work_s": work_s,
    }
    answer = run_in_child(problem, "robustness", asked, method="exact")
    return Robustness.parse_data(answer, where="robustness")


def _options_data(options: SolveOptions) -> dict[str, Any]:
    assert options.known is None, "known plans are for solvers in this process"
    return {**asdict(options), "kvs": [kv.value for kv in options.kvs]}


def _parsed_options(data: dict[str, Any]) -> SolveOptions:
    kvs = tuple(KVPrecision(kv) for kv in data["kvs"])
    return SolveOptions(**{**data, "kvs": kvs})


def _solved_data(found: Solved) -> dict[str, Any]:
    return {
        "kv": found.problem.kv.value,
        "chunk": found.problem.chunk,
        "theta": found.problem.theta,
        "head_of_16_bits": found.problem.quantization.head_bits == 16,
        "outcome": asdict(found.outcome),
    }


def _solved(problem: Problem, answer: dict[str, Any]) -> Solved:
    """Return a solved job of its data, and of the problem that was solved."""
    from llmpq.planner.solving.plan_search import Solved, with_head_of_16_bits

    if answer["head_of_16_bits"] and problem.quantization.head_bits is None:
        problem = with_head_of_16_bits(problem)
    work = problem.workload.model_copy(update={"kv": KVPrecision(answer["kv"])})
    solved = problem.with_changes(workload=work, chunk=answer["chunk"], theta=answer["theta"])
    return Solved(problem=solved, outcome=_outcome(answer["outcome"]))


def front_in_child(
    problem: Problem, *, points: int, time_limit_s: float, ends_at: float = math.inf
) -> Front:
    """Return the front of a problem."""
    from llmpq.planner.front.front import Front, FrontPoint

    options = {"points": points, "time_limit_s": time_limit_s, "ends_at": ends_at}
    answer = run_in_child(problem, "front", options, method="exact")
    listed = [
        FrontPoint(**{**point, "outcome": _outcome(point["outcome"])}) for point in answer["points"]
    ]
    return Front(**{**answer, "points": tuple(listed)})


def offload_in_child(problem: Problem, budget: float | None = None) -> OffloadEstimate:
    """Return the estimate of offloading a problem's job, within a budget of the sum of omega."""
    from llmpq.planner.ilp.flexgen import OffloadEstimate

    answer = run_in_child(problem, "offload", {"budget": budget}, method="flexgen")
    return OffloadEstimate(**answer)


def run_in_child(
    problem: Problem, job: Job, options: dict[str, Any], *, method: str, child: Sequence[str] = ()
) -> dict[str, Any]:
    """Do a job in a child process and return its answer's fields.

    `child`: start this command, whatever threads there are.
    """
    if child or not may_fork():
        return _spawned(problem, job, options, method, child or CHILD)
    return _forked(partial(_do, problem, job, options), method)


def may_fork() -> bool:
    """Whether this process has one thread: a fork copies that one, and every lock that is held."""
    return hasattr(os, "fork") and threading.active_count() == 1


def _do(problem: Problem, job: Job, options: dict[str, Any]) -> dict[str, Any]:
    """Do a job in this process (the child: only it solves); the answer as JSON."""
    if job == "plan":
        from llmpq.planner.solving.plan_search import search_plan

        try:
            found = search_plan(
                problem, _parsed_options(options["options"]), ceiling=options["ceiling"]
            )
        except NothingFitsError as error:
            return {"nothing_fits": True, "theta": error.problem.theta}
        return _solved_data(found)
    if job == "topology":
        return _topology(problem, options)
    if job == "certificate":
        return _certificate(problem, options)
    if job == "engine_proofs":
        from llmpq.planner.solving.certificate import engine_proofs

        most = [(tuple(v), rows) for v, rows in options["most"]]
        options_of = _parsed_options(options["options"])
        return {"proofs": engine_proofs(problem, options_of, options["aim"], most)}
    if job == "robustness":
        return _robustness(problem, options)
    if job == "front":
        from llmpq.planner.front.front import pareto_front

        return asdict(pareto_front(problem, **options))
    from llmpq.planner.ilp.flexgen import estimate_flexgen

    return asdict(estimate_flexgen(problem, **options))


def _variants(problem: Problem, asked: dict[str, Any]) -> list[Problem]:
    return [
        problem.with_job(kv=KVPrecision(kv)).with_changes(chunk=chunk)
        for kv, chunk in asked["variants"]
    ]


def _robustness(problem: Problem, asked: dict[str, Any]) -> dict[str, Any]:
    """Look for the shares of a plan."""
    from llmpq.planner.solving.robustness import robustness

    found = robustness(
        _variants(problem, asked),
        asked["variants"].index([problem.kv.value, problem.chunk]),
        _assignment(asked["assignment"]),
        _parsed_options(asked["options"]),
        work_s=asked["work_s"],
        bound=asked["bound"],
    )
    return found.model_dump(mode="json")


def _certificate(problem: Problem, asked: dict[str, Any]) -> dict[str, Any]:
    """Make the certificate of a plan."""
    from llmpq.planner.solving.certificate import certificate
    from llmpq.plans.plan import Plan

    variants = _variants(problem, asked)
    plan = Plan.parse_data(asked["plan"], where="plan")
    return certificate(plan, problem, _assignment(asked["assignment"]), variants, asked["budget"])


def _topology(problem: Problem, asked: dict[str, Any]) -> dict[str, Any]:
    """Search the topologies of a problem; the answer as JSON."""
    from llmpq.planner.solving.topologies import best_topology
    from llmpq.planner.solving.topology_search import KnownPipeline

    found = best_topology(
        problem,
        _parsed_options(asked["options"]),
        KnownPipeline(**asked["known"]),
        exactly=asked["exactly"],
    )
    engines, alone = (
        [
            {
                "places": one.places,
                "rows": one.rows,
                "waves": one.waves,
                "batch": one.solved.problem.workload.batch,
                "solved": _solved_data(one.solved),
            }
            for one in own
        ]
        for own in (found.engines, found.alone)
    )
    return {
        "engines": engines,
        "alone": alone,
        "alone_value": found.alone_value,
        "value": found.value,
        "bound": found.bound,
        "seconds": found.seconds,
        "work_s": found.work_s,
        "cut": found.cut,
        "simple": found.simple,
        "groups": found.groups,
        "groups_measured": found.groups_measured,
        "groups_left_out": found.groups_left_out,
        "most": found.most,
    }


def _forked(work: Callable[[], dict[str, Any]], method: str) -> dict[str, Any]:
    """Call `work` in a fork of this process, whose answer comes through a pipe."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(reader)
        _answer_and_exit(work, writer, parent)
    os.close(writer)
    ended = False
    try:
        with os.fdopen(reader, "rb") as pipe:
            _import_what_comes_next()
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        ended = True
    finally:
        if not ended:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return _fields(text, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, method)


def start_fork(work: Callable[[], object]) -> int:
    """Start a fork of this process that does some work, silently, and ends with it at the latest.

    Return its number, for `end_fork`, or to be waited for. Only where it `may_fork`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    try:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        _end_with(parent)
        work()
    finally:
        os._exit(0)


def end_fork(child: int) -> None:
    """End a fork that is still to be waited for."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _import_what_comes_next() -> None:
    """Import what a command does with an answer, and the solvers that a next fork then has."""
    import rich.console  # noqa: F401

    import llmpq.planner.check.build_plan
    import llmpq.planner.check.check
    import llmpq.planner.evaluate.simulator
    import llmpq.planner.exact.search
    import llmpq.planner.solving.topologies  # noqa: F401


def _answer_and_exit(work: Callable[[], dict[str, Any]], writer: int, parent: int) -> None:
    """Do the work, write the answer, leave without the parent's clean-up."""
    code = 0
    try:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # of the whole group: the parent says it
            if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
                signal.signal(getattr(signal, name), signal.SIG_DFL)
        _end_with(parent)
        answer = _answer_of(work)
        with os.fdopen(writer, "w", encoding="utf-8") as pipe:
            write_line(pipe, answer)
    except BaseException as error:
        sys.stderr.write(f"llmpq-algo: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        code = 1
    finally:
        os._exit(code)


def _end_with(parent: int) -> None:
    """Have the system end this process with its parent, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before this call
            os._exit(1)


def _spawned(
    problem: Problem, job: Job, options: dict[str, Any], method: str, child: Sequence[str]
) -> dict[str, Any]:
    """Do a job in a fresh interpreter."""
    request = json.dumps(
        {"problem": problem_data(problem), "job": job, "options": options, "parent": os.getpid()}
    )
    done = subprocess.run(child, input=request.encode(), stdout=subprocess.PIPE, check=False)
    return _fields(done.stdout, max(0, -done.returncode), method)


def _answer_of(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` returns, or the refusal it raises, as JSON types."""
    try:
        return work()
    except Unfinished as error:
        return {"unfinished": str(error), "bound": error.bound}
    except Infeasible as error:
        return {"infeasible": str(error), "least": error.least}
    except DoesNotFitError as error:
        return {"does_not_fit": str(error)}
    except (ValueError, LlmpqError) as error:
        return {"refused": str(error)}


def _fields(text: bytes, signal_number: int, method: str) -> dict[str, Any]:
    if signal_number or not text:
        cause = f"signal {signal_number}" if signal_number else "no answer"
        raise SolverCrashed(
            f"the solver of --method {method} died ({cause}); try --method exact, ilp with "
            "--solver cbc, or heuristic"
        )
    answer: dict[str, Any] = json.loads(text)
    if "unfinished" in answer:
        raise Unfinished(answer["unfinished"], bound=answer["bound"])
    if "infeasible" in answer:
        raise Infeasible(answer["infeasible"], least=answer["least"])
    if "does_not_fit" in answer:
        raise DoesNotFitError(answer["does_not_fit"])
    if "refused" in answer:
        raise ValueError(answer["refused"])
    return answer


def _outcome(answer: dict[str, Any]) -> Outcome:
    return Outcome(**{**answer, "assignment": _assignment(answer["assignment"])})


def _assignment(data: dict[str, Any]) -> Assignment:
    stages = tuple(Stage(**{**s, "choices": tuple(s["choices"])}) for s in data["stages"])
    return Assignment(**{**data, "stages": stages})


def main() -> int:
    """Solve and answer; what a solver prints goes to stderr, for stdout is the answer's."""
    answers = take_answers()
    for request in read_lines(sys.stdin):
        _end_with(request["parent"])
        problem = parse_problem(request["problem"])
        work = partial(_do, problem, request["job"], request["options"])
        write_line(answers, _answer_of(work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
