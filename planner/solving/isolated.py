"""Runs a solver in a child process, so that a crash inside it cannot take the command down.

Alone in its process the command forks, which costs milliseconds. With other threads about, a fork
could inherit a lock nobody will release; then a fresh interpreter solves (half a second more). The
solver never runs in the caller's process: not for a plan, a front of plans or the estimate of
offloading. Problem and answer travel as JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from llmpq.commands.child_lines import write_line
from llmpq.errors import LlmpqError
from llmpq.planner.problem.outcome import Assignment, Infeasible, Outcome, Stage, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.methods import How

if TYPE_CHECKING:
    from llmpq.planner.baselines.flexgen import OffloadEstimate
    from llmpq.planner.front.front import Front
    from llmpq.planner.solving.uniform_precision_search import Found as AloneFound

CHILD = (sys.executable, "-m", "llmpq.planner.solving.solver_child")
ALONE_AFTER_S = 0.2
"""Seconds after which plans of one precision alone are looked for, too."""
ALONE_AFTER_SHARE = 0.05
"""The same as a share of the time limit, if that is less."""
BESIDE_NICENESS = 10
"""Where no core is free after all, the whole search goes first."""
LATE_S = 0.3
"""Seconds that the choice of a precision may take beyond the time limit."""
ANSWER_S = 0.1
"""Seconds that the answer is waited for beyond that."""
Task = Literal["plan", "front", "offload"]


class SolverCrashed(LlmpqError):
    """The solver's process died; nothing is known of the problem."""


def solve_isolated(problem: Problem, how: How, beside: Beside | None = None) -> Outcome:
    """Return the outcome or raise what the solver raises; `SolverCrashed` if its process dies.

    `beside` begins once this search has run for a while.
    """
    if beside is None or beside.begun or not may_fork():
        return _outcome(_answered(problem, "plan", asdict(how), what=how.method))
    fork = Fork(lambda: run_job(problem, "plan", asdict(how)))
    try:
        _get_ready()
        if not fork.ends_within(beside.waits_s()):
            beside.begin()
        return _outcome(fork.answer(how.method))
    finally:
        fork.kill()


def has_spare_core() -> bool:
    """Whether a second process may search beside the first."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


class Beside:
    """A process that looks for plans of one precision alone, beside the exact method's searches.

    It takes all KV precisions at once (uniform_precision_search.py) and has all of the time: the
    smaller search finds such plans sooner. It needs a core of its own, and begins only where the
    searches take a while.
    """

    def __init__(self, problems: Sequence[Problem], how: How) -> None:
        self.problems, self.how = problems, how
        self._start = time.perf_counter()
        self._begun = self._start
        self._fork: Fork | None = None
        several = any(len(p.choices) > 1 for p in problems)
        self.wanted = how.method == "exact" and several and has_spare_core()

    @property
    def begun(self) -> bool:
        """Whether there is nothing to begin any more."""
        return self._fork is not None or not self.wanted

    def waits_s(self) -> float:
        """Return the seconds after which it is to begin."""
        waited = min(ALONE_AFTER_S, ALONE_AFTER_SHARE * self.how.time_limit_s)
        return max(0.0, self._start + waited - time.perf_counter())

    def begin(self) -> None:
        """Start the process, which has as much time as the searches, and is a little late."""
        self._begun = time.perf_counter()
        self._fork = Fork(lambda: _search_alone(self.problems, self.how))

    def found(self) -> tuple[int, Outcome] | None:
        """Return a plan and the number of its problem; wait for it, but not beyond its time."""
        if self._fork is None:
            return None
        used, limit = time.perf_counter() - self._begun, self.how.time_limit_s
        left = max(0.0, limit - used) if math.isfinite(limit) else 0.0
        if not self._fork.ends_within(left + LATE_S + ANSWER_S):
            return None
        try:
            answer = self._fork.answer(self.how.method)
        except (Infeasible, Unfinished, SolverCrashed):
            return None
        return answer["number"], _outcome(answer["outcome"])

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._fork is not None:
            self._fork.kill()


def _search_alone(problems: Sequence[Problem], how: How) -> AloneFound:
    from llmpq.planner.solving.uniform_precision_search import solve_alone

    os.nice(BESIDE_NICENESS)
    return solve_alone(problems, how, LATE_S)


def front_isolated(problem: Problem, *, points: int, time_limit_s: float) -> Front:
    """Return the front of a problem, as `solve_isolated` its plan."""
    from llmpq.planner.front.front import Front, FrontPoint

    options = {"points": points, "time_limit_s": time_limit_s}
    answer = _answered(problem, "front", options, what="exact")
    listed = [
        FrontPoint(**{**point, "outcome": _outcome(point["outcome"])}) for point in answer["points"]
    ]
    return Front(**{**answer, "points": tuple(listed)})


def offload_isolated(problem: Problem, budget: float | None = None) -> OffloadEstimate:
    """Return the estimate of offloading a problem's job, within a budget of the sum of omega."""
    from llmpq.planner.baselines.flexgen import OffloadEstimate

    return OffloadEstimate(**_answered(problem, "offload", {"budget": budget}, what="flexgen"))


def run_job(
    problem: Problem, job: Task, options: dict[str, Any]
) -> Outcome | Front | OffloadEstimate:
    """Do a job in this process: what the child does, who alone imports what solves."""
    if job == "plan":
        from llmpq.planner.solving.methods import solve_as

        known = options.get("known")
        if isinstance(known, dict):
            options = {**options, "known": _assignment(known)}
        return solve_as(problem, How(**options))
    if job == "front":
        from llmpq.planner.front.front import pareto_front

        return pareto_front(problem, **options)
    from llmpq.planner.baselines.flexgen import estimate_flexgen

    return estimate_flexgen(problem, **options)


def _answered(problem: Problem, job: Task, options: dict[str, Any], *, what: str) -> dict[str, Any]:
    if may_fork():
        return answer_forked(lambda: run_job(problem, job, options), what=what)
    return answer_spawned(problem, job, options, what=what)


def may_fork() -> bool:
    """Whether this process is alone with itself: a fork copies one thread, and every held lock."""
    return hasattr(os, "fork") and threading.active_count() == 1


def answer_forked(work: Callable[[], Any], *, what: str) -> dict[str, Any]:
    """Call `work` in a fork of this process; return its answer's fields."""
    child = Fork(work)
    try:
        _get_ready()
        return child.answer(what)
    except KeyboardInterrupt:
        child.kill()
        raise


class Fork:
    """Work in a fork of this process, whose answer comes through a pipe."""

    def __init__(self, work: Callable[[], Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        self._child: int | None = os.fork()
        if self._child == 0:
            os.close(reader)
            _answer_and_exit(work, writer)
        os.close(writer)
        self._pipe = os.fdopen(reader, "rb")

    def ends_within(self, seconds: float) -> bool:
        """Return whether it has answered, or died, after at most so long."""
        return bool(select.select([self._pipe], [], [], seconds)[0])

    def answer(self, what: str) -> dict[str, Any]:
        """Wait for it; return its answer's fields, or raise what it raised."""
        assert self._child is not None
        with self._pipe:
            text = self._pipe.read()
        _, status = os.waitpid(self._child, 0)
        self._child = None
        return _fields(text, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, what)

    def kill(self) -> None:
        """End it, whatever it does; nothing where it has been waited for."""
        self._pipe.close()
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)
            self._child = None


def _get_ready() -> None:
    """Import what a command does with an answer, while the child solves."""
    import rich.console  # noqa: F401

    import llmpq.planner.check.build_plan
    import llmpq.planner.check.check
    import llmpq.planner.evaluate.step_by_step  # noqa: F401


def answer_spawned(
    problem: Problem,
    job: Task,
    options: dict[str, Any],
    *,
    what: str,
    child: Sequence[str] = CHILD,
) -> dict[str, Any]:
    """Do a job in a fresh interpreter, which reads it on stdin and answers on stdout."""
    from llmpq.planner.problem.problem_form import problem_data

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
    except KeyboardInterrupt:  # of the whole group: the parent says it
        code = 1
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
