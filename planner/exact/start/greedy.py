"""The plan that a completion's bound is made of."""

from __future__ import annotations

import numpy as np

from llmpq.planner.exact.bounds.columns import assigned, column_costs, layer_costs, priced
from llmpq.planner.exact.bounds.completion import Completion
from llmpq.planner.problem.outcome import Assignment, Stage


def greedy_plan(bound: Completion) -> Assignment | None:
    """Return the plan that a completion's bound is made of, None if it is a dead end."""
    p, numbers = bound.p, bound.form.numbers
    found = bound.greedy()
    if not found:
        return None
    stages = tuple(
        Stage(cls=c, start=a, end=e, choices=_filled(bound, c, a, e)) for c, a, e in found
    )
    assert stages[-1].end == p.num_layers
    return Assignment(prefill_microbatch=numbers.eta, decode_microbatch=numbers.xi, stages=stages)


def _filled(bound: Completion, c: int, a: int, e: int) -> tuple[int, ...]:
    """Return choices of a stage near the cheapest that fits: what does not fit is repaired."""
    p, columns, m = bound.p, bound.columns, e - a
    if columns is not None:
        room = bound.form.numbers.capacity[c, int(a == 0), int(e == p.num_layers)]
        fits = columns.fitting(m, room)
        cost = column_costs(bound.form, bound.weights, bound.box, columns.counts[m], c)
        cost = np.where(fits, cost + priced(columns.least[m][a], p.theta), np.inf)
        return assigned(p.open_omega[a:e], columns.counts[m][int(np.argmin(cost))])
    cost = layer_costs(p, bound.form, bound.weights, c)[a:e]
    return tuple(int(b) for b in cost.argmin(axis=1))
