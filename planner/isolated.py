"""Runs a solver in a child process, so that a crash inside it cannot take the command down.

Alone in its process the command forks, which costs milliseconds. With other threads about, a fork
could inherit a lock nobody will release; then a fresh interpreter solves (half a second more). The
solver never runs in the caller's process: not for a plan, a front of plans or the estimate of
offloading. Problem and answer travel as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from llmpq.child_lines import write_line
from llmpq.errors import LlmpqError
from llmpq.planner.methods import How
from llmpq.planner.outcome import Assignment, Infeasible, Outcome, Stage, Unfinished
from llmpq.planner.problem import Problem

if TYPE_CHECKING:
    from llmpq.planner.baselines.flexgen import OffloadEstimate
    from llmpq.planner.front.front import Front

CHILD = (sys.executable, "-m", "llmpq.planner.solver_child")
Task = Literal["plan", "front", "offload"]


class SolverCrashed(LlmpqError):
    """The solver's process died; nothing is known of the problem."""


def solve_isolated(problem: Problem, how: How) -> Outcome:
    """Return the outcome or raise what the solver raises; `SolverCrashed` if its process dies."""
    return _outcome(_answered(problem, "plan", asdict(how), what=how.method))


def front_isolated(problem: Problem, *, points: int, time_limit_s: float) -> Front:
    """Return the front of a problem, as `solve_isolated` its plan."""
    from llmpq.planner.front.front import Front, FrontPoint

    options = {"points": points, "time_limit_s": time_limit_s}
    answer = _answered(problem, "front", options, what="exact")
    listed = [
        FrontPoint(**{**point, "outcome": _outcome(point["outcome"])}) for point in answer["points"]
    ]
    return Front(**{**answer, "points": tuple(listed)})


def offload_isolated(problem: Problem) -> OffloadEstimate:
    """Return the estimate of offloading a problem's job."""
    from llmpq.planner.baselines.flexgen import OffloadEstimate

    return OffloadEstimate(**_answered(problem, "offload", {}, what="flexgen"))


def run_job(
    problem: Problem, job: Task, options: dict[str, Any]
) -> Outcome | Front | OffloadEstimate:
    """Do a job in this process: what the child does, who alone imports what solves."""
    if job == "plan":
        from llmpq.planner.methods import solve_as

        known = options.get("known")
        if isinstance(known, dict):
            options = {**options, "known": _assignment(known)}
        return solve_as(problem, How(**options))
    if job == "front":
        from llmpq.planner.front.front import pareto_front

        return pareto_front(problem, **options)
    from llmpq.planner.baselines.flexgen import estimate_flexgen

    return estimate_flexgen(problem)


def _answered(problem: Problem, job: Task, options: dict[str, Any], *, what: str) -> dict[str, Any]:
    if may_fork():
        return answer_forked(lambda: run_job(problem, job, options), what=what)
    return answer_spawned(problem, job, options, what=what)


def may_fork() -> bool:
    """Whether this process is alone with itself: a fork copies one thread, and every held lock."""
    return hasattr(os, "fork") and threading.active_count() == 1


def answer_forked(work: Callable[[], Any], *, what: str) -> dict[str, Any]:
    """Call `work` in a fork of this process; return its answer's fields."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer_and_exit(work, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            _get_ready()
            text = pipe.read()
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    return _fields(text, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, what)


def _get_ready() -> None:
    """Import what a command does with an answer, while the child solves."""
    import rich.console  # noqa: F401

    import llmpq.planner.build_plan
    import llmpq.planner.check
    import llmpq.planner.predict.step_by_step  # noqa: F401


def answer_spawned(
    problem: Problem,
    job: Task,
    options: dict[str, Any],
    *,
    what: str,
    child: Sequence[str] = CHILD,
) -> dict[str, Any]:
    """Do a job in a fresh interpreter, which reads it on stdin and answers on stdout."""
    from llmpq.planner.problem_form import problem_data

    request = json.dumps({"problem": problem_data(problem), "job": job, "options": options})
    done = subprocess.run(child, input=request.encode(), stdout=subprocess.PIPE, check=False)
    return _fields(done.stdout, max(0, -done.returncode), what)


def answer_of(work: Callable[[], Any]) -> dict[str, Any]:
    """Return what `work` returns, or the refusal it raises, as JSON types."""
    try:
        answer: dict[str, Any] = asdict(work())
    except Unfinished as error:
        answer = {"unfinished": str(error), "bound": error.bound}
    except Infeasible as error:
        answer = {"infeasible": str(error), "least": error.least}
    except (ValueError, LlmpqError) as error:
        answer = {"refused": str(error)}
    return answer


def _answer_and_exit(work: Callable[[], Any], writer: int) -> None:
    """Do the work, write the answer, leave without the parent's clean-up."""
    code = 0
    try:
        answer = answer_of(work)
        with os.fdopen(writer, "w", encoding="utf-8") as pipe:
            write_line(pipe, answer)
    except BaseException as error:
        sys.stderr.write(f"llmpq-algo: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        code = 1
    finally:
        os._exit(code)


def _fields(text: bytes, signal_number: int, what: str) -> dict[str, Any]:
    if signal_number or not text:
        cause = f"signal {signal_number}" if signal_number else "no answer"
        raise SolverCrashed(
            f"the solver of --method {what} died ({cause}); try --method exact, ilp with --solver "
            "cbc, or heuristic"
        )
    answer: dict[str, Any] = json.loads(text)
    if "unfinished" in answer:
        raise Unfinished(answer["unfinished"], bound=answer["bound"])
    if "infeasible" in answer:
        raise Infeasible(answer["infeasible"], least=answer["least"])
    if "refused" in answer:
        raise ValueError(answer["refused"])
    return answer


def _outcome(answer: dict[str, Any]) -> Outcome:
    return Outcome(**{**answer, "assignment": _assignment(answer["assignment"])})


def _assignment(a: dict[str, Any]) -> Assignment:
    stages = tuple(Stage(**{**s, "choices": tuple(s["choices"])}) for s in a["stages"])
    return Assignment(**{**a, "stages": stages})
