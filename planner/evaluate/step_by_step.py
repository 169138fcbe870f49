"""How long a plan takes step by step: what the closed form of the search leaves out.

The search takes a stage's mean time over all tokens, and a smaller last micro-batch where it counts
most (objective.py). Here every token has the slowest stage of its own cache length - a mean of
the slowest is not below the slowest mean - and the last micro-batch its true size everywhere.

    prefill  every chunk of every micro-batch through the stages, first come first served
    decode   for every token the larger of a round trip and the fullest stage's work for all; the
             last token of every micro-batch as chunks are
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmpq.planner.costs.links import Floats
from llmpq.planner.evaluate.objective import PhaseTimes, job_time
from llmpq.planner.evaluate.simulator import decode_ring, prefill_rings
from llmpq.planner.problem.microbatch import sizes_of
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem

REPORTED_DIFFERENCE = 0.005
"""Relative distance of the closed form above which a plan predicts its time step by step."""


def step_by_step_time(p: Problem, a: Assignment) -> PhaseTimes:
    """Return the times of an assignment with its true micro-batch sizes and cache lengths."""
    n, batch = p.workload.gen_len, p.workload.batch
    sizes = sizes_of(batch, a.prefill_microbatch)
    whole, last = (np.array(prefill_rings(p, a, size)) for size in (sizes[0], sizes[-1]))
    ways = slice(None) if n > 1 else slice(-1)
    prefill = _drained([*[whole[:, ways]] * (len(sizes) - 1), last[:, ways]])
    if n < 2:
        return PhaseTimes(prefill_s=prefill, decode_s=0.0)
    sizes = sizes_of(batch, a.decode_microbatch)
    whole_t, last_t = (_by_step(p, a, size) for size in (sizes[0], sizes[-1]))
    held = (len(sizes) - 1) * whole_t[..., 0] + last_t[..., 0]
    periods = np.maximum(held.max(axis=1), whole_t[..., 1].sum(axis=1))[:-1]
    drained = _drained([*[whole_t[-1:, :-1]] * (len(sizes) - 1), last_t[-1:, :-1]])
    return PhaseTimes(prefill_s=prefill, decode_s=float(periods.sum()) + drained)


def reported_time(p: Problem, a: Assignment) -> PhaseTimes:
    """Return what a plan predicts: the closed form, or where that is not true what is."""
    predicted, stepwise = job_time(p, a), step_by_step_time(p, a)
    far = abs(stepwise.total_s - predicted.total_s) > REPORTED_DIFFERENCE * predicted.total_s
    return stepwise if far else predicted


def step_note(p: Problem, a: Assignment, known: PhaseTimes | None = None) -> str:
    """Return what a plan says where it predicts another time than the search's, or nothing.

    `known`: what it predicts, where that was computed before.
    """
    closed, reported = job_time(p, a).total_s, (known or reported_time(p, a)).total_s
    if reported == closed:
        return ""
    above = reported > closed
    why = (
        "the slowest stage is not the same for all chunks of a prompt and all tokens"
        if above
        else "the last micro-batch or chunk is smaller"
    )
    return (
        f"the time is predicted step by step, {abs(reported / closed - 1):.1%} "
        f"{'more' if above else 'less'} than the search counts: {why}"
    )


def _by_step(p: Problem, a: Assignment, size: int) -> Floats:
    """[n-1, 2 J, 2] (occupied, total) of every stage and hop at every step t = 1..n-1."""
    rows, ways = decode_ring(p, a, size)
    ring = np.empty((rows.shape[1], 2 * len(rows), 2))
    ring[:, 0::2, :] = rows.T[:, :, None]
    ring[:, 1::2, :] = np.array(ways)[None]
    return ring


def _drained(rings: Sequence[Floats]) -> float:
    """Return when the last of many steps is through: each [steps, 2 J, 2] occupied and total.

    A resource is free again after step i at  max over j <= i of (j's arrival + occupied j to i).
    """
    steps = np.concatenate(rings)
    arrival = np.zeros(len(steps))
    for occupied, total in steps.transpose(1, 2, 0):
        until = np.cumsum(occupied)
        free = until + np.maximum.accumulate(arrival - until + occupied)
        arrival = free - occupied + total
    return float(arrival.max())
