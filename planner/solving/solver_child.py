"""`python -m llmpq.planner.solving.solver_child`: jobs as JSON lines on stdin, answers on stdout.

Started by planner/solving/isolated.py where a fork would not be safe.
"""

from __future__ import annotations

import sys
from functools import partial

from llmpq.commands.child_lines import read_lines, take_answers, write_line
from llmpq.planner.problem.problem_form import parse_problem
from llmpq.planner.solving.isolated import answer_of, run_job


def main() -> int:
    """Solve and answer; what a solver prints goes to stderr, for stdout is the answer's."""
    answers = take_answers()
    for request in read_lines(sys.stdin):
        problem, job = parse_problem(request["problem"]), request["job"]
        write_line(answers, answer_of(partial(run_job, problem, job, request["options"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
