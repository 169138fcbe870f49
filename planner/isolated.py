"""Runs a solver in a forked child, so that a crash inside it cannot take the command down.

A fork costs milliseconds (no interpreter is started, nothing imported again). The answer comes back
as JSON through a pipe. Where there is no fork, or another thread runs, the solver runs in place.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from llmpq.errors import LlmpqError
from llmpq.planner.outcome import Assignment, Infeasible, Outcome, Stage


class SolverCrashed(LlmpqError):
    """The solver's process died; nothing is known of the problem."""


def solve_isolated(solve: Callable[[], Outcome], *, what: str) -> Outcome:
    """Return what `solve` returns or raise what it raises; `SolverCrashed` if its process dies."""
    if not hasattr(os, "fork") or threading.active_count() > 1:
        return solve()
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(solve, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            text = pipe.read()
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) or not text:
        cause = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "no answer"
        raise SolverCrashed(
            f"the solver of --method {what} died ({cause}); try --method exact, ilp with --solver "
            "cbc, or heuristic"
        )
    return _outcome(json.loads(text))


def _answer(solve: Callable[[], Outcome], writer: int) -> None:
    """Solve, write the answer, leave without the parent's clean-up."""
    code = 0
    try:
        try:
            answer: dict[str, Any] = asdict(solve())
        except Infeasible as error:
            answer = {"infeasible": str(error)}
        except (ValueError, LlmpqError) as error:
            answer = {"refused": str(error)}
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    except BaseException as error:
        sys.stderr.write(f"llmpq-algo: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        code = 1
    finally:
        os._exit(code)


def _outcome(answer: dict[str, Any]) -> Outcome:
    if "infeasible" in answer:
        raise Infeasible(answer["infeasible"])
    if "refused" in answer:
        raise ValueError(answer["refused"])
    a = answer["assignment"]
    stages = tuple(Stage(**{**s, "choices": tuple(s["choices"])}) for s in a["stages"])
    return Outcome(**{**answer, "assignment": Assignment(**{**a, "stages": stages})})
