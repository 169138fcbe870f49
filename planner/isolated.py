"""Runs a solver in a child process, so that a crash inside it cannot take the command down.

Alone in its process the command forks, which costs milliseconds. With other threads about, a fork
could inherit a lock nobody will release; then a fresh interpreter solves (half a second more). The
solver never runs in the caller's process. Problem and answer travel as JSON.
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
from typing import Any

from llmpq.errors import LlmpqError
from llmpq.planner.methods import How, solve_as
from llmpq.planner.outcome import Assignment, Infeasible, Outcome, Stage, Unfinished
from llmpq.planner.problem import Problem
from llmpq.planner.problem_form import problem_data

CHILD = (sys.executable, "-m", "llmpq.planner.solver_child")


class SolverCrashed(LlmpqError):
    """The solver's process died; nothing is known of the problem."""


def solve_isolated(problem: Problem, how: How) -> Outcome:
    """Return the outcome or raise what the solver raises; `SolverCrashed` if its process dies."""
    if may_fork():
        return solve_forked(lambda: solve_as(problem, how), what=how.method)
    return solve_spawned(problem, how)


def may_fork() -> bool:
    """Whether this process is alone with itself: a fork copies one thread, and every held lock."""
    return hasattr(os, "fork") and threading.active_count() == 1


def solve_forked(solve: Callable[[], Outcome], *, what: str) -> Outcome:
    """Call `solve` in a fork of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer_and_exit(solve, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            text = pipe.read()
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    return _outcome(text, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, what)


def solve_spawned(problem: Problem, how: How, *, child: Sequence[str] = CHILD) -> Outcome:
    """Solve in a fresh interpreter, which reads the problem on stdin and answers on stdout."""
    request = json.dumps({"problem": problem_data(problem), "how": asdict(how)})
    done = subprocess.run(child, input=request.encode(), stdout=subprocess.PIPE, check=False)
    return _outcome(done.stdout, max(0, -done.returncode), how.method)


def answer_of(solve: Callable[[], Outcome]) -> str:
    """Return what `solve` returns, or the refusal it raises, as JSON."""
    try:
        answer: dict[str, Any] = asdict(solve())
    except Unfinished as error:
        answer = {"unfinished": str(error)}
    except Infeasible as error:
        answer = {"infeasible": str(error)}
    except (ValueError, LlmpqError) as error:
        answer = {"refused": str(error)}
    return json.dumps(answer)


def _answer_and_exit(solve: Callable[[], Outcome], writer: int) -> None:
    """Solve, write the answer, leave without the parent's clean-up."""
    code = 0
    try:
        text = answer_of(solve)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(text.encode())
    except BaseException as error:
        sys.stderr.write(f"llmpq-algo: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        code = 1
    finally:
        os._exit(code)


def _outcome(text: bytes, signal_number: int, what: str) -> Outcome:
    if signal_number or not text:
        cause = f"signal {signal_number}" if signal_number else "no answer"
        raise SolverCrashed(
            f"the solver of --method {what} died ({cause}); try --method exact, ilp with --solver "
            "cbc, or heuristic"
        )
    answer = json.loads(text)
    if "unfinished" in answer:
        raise Unfinished(answer["unfinished"])
    if "infeasible" in answer:
        raise Infeasible(answer["infeasible"])
    if "refused" in answer:
        raise ValueError(answer["refused"])
    a = answer["assignment"]
    stages = tuple(Stage(**{**s, "choices": tuple(s["choices"])}) for s in a["stages"])
    return Outcome(**{**answer, "assignment": Assignment(**{**a, "stages": stages})})
