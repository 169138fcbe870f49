"""Makes HiGHS solvers that print nothing: some versions greet on stdout, which is the answer's."""

from __future__ import annotations

import os
import sys
from typing import Any


def make_highs() -> Any:
    """Return a solver of one thread without output."""
    import highspy

    sys.stdout.flush()
    stdout, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        solver = highspy.Highs()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nothing)
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    return solver
