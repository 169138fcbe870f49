"""Takes engines of one device each where a better plan sends between devices and is hardly better.

Both are valued by the runtime's scheduler over their predicted step times, with what a plan's
closed form leaves out: how the stages fill and drain, and the rows that follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from llmpq.plan import Plan
from llmpq.planner.answer import Answer, TopologyAnswer, score
from llmpq.planner.solving.methods import SolveOptions
from llmpq.topology import TopologyPredicted

MOST_TOKENS = 300_000
"""Answers' tokens of a job up to which it is simulated; of more, plans' own times are taken."""


def without_sending(best: Answer, found: TopologyAnswer, options: SolveOptions) -> TopologyAnswer:
    """Return the engines that send nothing where they are as good within `SolveOptions.tie`."""
    alone, topology = found.alone, found.topology
    if not options.tie or alone is None or alone.topology is None:
        return found
    engines = [(best.plan, best.plan.workload.batch)]
    if topology is not None:
        engines = [(one.plan, one.rows) for one in topology.engines]
    sends = _score(best, engines, options)
    other = _score(best, [(one.plan, one.rows) for one in alone.topology.engines], options)
    quicker = math.expm1(other - sends) if options.prefer else other / sends - 1
    if quicker > options.tie:
        return found
    return replace(alone, found=replace(alone.found, quicker=quicker))


def _score(best: Answer, engines: Sequence[tuple[Plan, int]], options: SolveOptions) -> float:
    """Return what is made smallest, of engines with their rows as they would run."""
    tokens = sum(rows * plan.workload.gen_len for plan, rows in engines)
    total_s = max(_seconds(plan, rows, tokens <= MOST_TOKENS) for plan, rows in engines)
    predicted = TopologyPredicted(
        total_s=total_s,
        output_tokens_per_s=tokens / total_s,
        sum_omega=max(plan.predicted.sum_omega for plan, _ in engines if plan.predicted),
    )
    return score(best, predicted, options)


def _seconds(plan: Plan, rows: int, simulated: bool) -> float:
    if simulated:
        from llmpq.planner.traffic.simulated import simulate_batch

        return simulate_batch(plan, rows)
    assert plan.predicted is not None, "the planner always predicts"
    return -(-rows // plan.workload.batch) * plan.predicted.total_s
