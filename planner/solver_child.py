"""`python -m llmpq.planner.solver_child`: one job as JSON on stdin, its answer on stdout.

Started by planner/isolated.py where a fork would not be safe.
"""

from __future__ import annotations

import json
import os
import sys

from llmpq.planner.isolated import answer_of, run_job
from llmpq.planner.problem_form import parse_problem


def main() -> int:
    """Solve and answer; what a solver prints goes to stderr, for stdout is the answer's."""
    answers = os.dup(1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.read())
    problem = parse_problem(request["problem"])
    text = answer_of(lambda: run_job(problem, request["job"], request["options"]))
    with os.fdopen(answers, "wb") as pipe:
        pipe.write(text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
