"""Layers in proportion to cards' rates, as people deal them out by hand ("water-filling").

By memory rate or by FLOPS, whichever is quicker; moved only for want of room; one precision, and
the micro-batches that are fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.planner.baselines.uniform import by_precision
from llmpq.planner.evaluate.fits import fits, spare_bytes
from llmpq.planner.evaluate.objective import job_time, value
from llmpq.planner.problem.outcome import Assignment, Infeasible, Outcome, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import Timer


def water_filled(
    variants: Sequence[Problem], budget: float | None = None
) -> tuple[Problem, Outcome] | None:
    """Return the fastest plan with layers in proportion to all cards' rates; None where none fits.

    `variants`: the job at each KV precision and prefill chunk; `budget`: of the sum of omega.
    """
    timer = Timer()
    found: list[tuple[float, Problem, Assignment]] = []
    for own in variants:
        try:
            precisions = by_precision(own, budget)
        except Infeasible:
            continue
        order = [c for c, cls in enumerate(own.classes) for _ in cls.devices]
        specs = [own.classes[c].first.spec for c in order]
        for rates in ([s.mem_gbps for s in specs], [s.fp16_tflops for s in specs]):
            for b in precisions:
                for eta, xi in own.pairs:
                    a = _moved_for_room(own, _in_proportion(own, order, rates, b, eta, xi))
                    if a is not None:
                        found.append((job_time(own, a).total_s, own, a))
    if not found:
        return None
    _, own, best = min(found, key=lambda one: one[0])
    return own, Outcome(
        method="water-filling",
        status="baseline",
        assignment=best,
        value=value(own, best),
        bound=None,
        seconds=timer.seconds,
    )


def _in_proportion(
    p: Problem, order: Sequence[int], rates: Sequence[float], b: int, eta: int, xi: int
) -> Assignment:
    ends = [round(p.num_layers * sum(rates[:j]) / sum(rates)) for j in range(len(order) + 1)]
    return _cut(order, p.nearest_cuts(ends), b, eta, xi)


def _cut(order: Sequence[int], ends: Sequence[int], b: int, eta: int, xi: int) -> Assignment:
    stages = tuple(
        Stage(cls=c, start=low, end=high, choices=(b,) * (high - low))
        for c, low, high in zip(order, ends, ends[1:], strict=False)
        if high > low
    )
    return Assignment(prefill_microbatch=eta, decode_microbatch=xi, stages=stages)


def _moved_for_room(p: Problem, a: Assignment) -> Assignment | None:
    """Move layers, one by one, from the stage that lacks most to the one with most room."""
    b = a.stages[0].choices[0]
    for _ in range(4 * p.num_layers):
        if fits(p, a):
            return a
        spare = [spare_bytes(p, a, k) for k in range(len(a.stages))]
        worst, best = spare.index(min(spare)), spare.index(max(spare))
        if spare[worst] >= 0 or spare[best] <= 0:
            return None
        sizes = [stage.end - stage.start for stage in a.stages]
        sizes[worst], sizes[best] = sizes[worst] - 1, sizes[best] + 1
        ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
        order = [stage.cls for stage in a.stages]
        a = _cut(order, p.nearest_cuts(ends), b, a.prefill_microbatch, a.decode_microbatch)
    return None
