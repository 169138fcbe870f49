"""A first good plan of a part, with few labels: the better it is, the fewer labels its proof takes.

The label search of labels.py, but of each state at each boundary only the labels with the smallest
bounds go on (a beam). It proves nothing.
"""

from __future__ import annotations

import contextlib

from llmpq.planner.exact.labels import GaveUp, LabelSearch, SearchLimits
from llmpq.planner.exact.search_state import Part
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem

WINDOWS = (0.004, 0.02, 0.1)
"""Widths of the windows above the part's bound, relative, in which labels are set."""
MOST_WORK = 2.5e5
"""Label-column pairs that may be looked at in one."""
BEAM = 24
"""Labels kept of each state at each boundary."""


def quick_plan(
    p: Problem, part: Part, target: float, deadline: float, budget: float | None
) -> Assignment | None:
    """Return a plan of the part with a worth below the target, None where few labels find none."""
    limits = SearchLimits(deadline=deadline, max_work=MOST_WORK, beam=BEAM)
    for width in WINDOWS:
        below = min(target, part.bound + abs(part.bound) * width)
        search = LabelSearch(p, part.completions, limits, budget)
        with contextlib.suppress(GaveUp):
            search.run(below)
        found = search.found()
        if found is not None or below >= target or search.work > MOST_WORK:
            return found
    return None
