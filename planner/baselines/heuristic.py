"""`heuristic`: bitwidth transfer (Algorithm 2 of the paper), started from adabits.

Again and again, take the slowest stage and a faster one and shift layers from the first towards the
second (the stages between keep their length), lowering or raising precisions so that it fits; keep
the best such change; stop when none helps. Works on any number of orders and micro-batches; proves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmpq.planner.baselines.adabits import adabits_plans
from llmpq.planner.evaluate.fits import fits, spare_bytes
from llmpq.planner.evaluate.objective import keeps_budget, stage_times, value
from llmpq.planner.problem.outcome import Assignment, Infeasible, Outcome, Stage, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import Timer, now_s

SHIFTS = (1, 2, 4)
"""Layers moved at once."""


def solve_heuristic(
    p: Problem, *, time_limit_s: float = 60.0, budget: float | None = None
) -> Outcome:
    """Return the best plan that transfers reach from any start, within a `budget` of omega."""
    start, timer = now_s(), Timer()
    best: Assignment | None = None
    worth = float("inf")
    deadline = start + time_limit_s
    every = adabits_plans(p, start + time_limit_s / 2)
    plans = [plan for plan in every if keeps_budget(p, plan, budget)]
    if every and not plans:
        raise Infeasible(f"heuristic: its starts lose more than {budget:g}; use --method exact")
    for plan in plans:
        if value(p, plan) < worth:
            best, worth = plan, value(p, plan)
    for plan in plans:
        for pair in p.pairs:
            if now_s() > deadline:
                break
            moved = Assignment(
                prefill_microbatch=pair[0], decode_microbatch=pair[1], stages=plan.stages
            )
            if not fits(p, moved) or value(p, moved) > 1.5 * worth:
                continue
            found = _transfer(p, moved, deadline, budget)
            if value(p, found) < worth:
                best, worth = found, value(p, found)
    if best is None and now_s() > start + time_limit_s / 2:
        raise Unfinished(
            f"heuristic: no plan within {time_limit_s:g} s; give a longer --time-limit"
        )
    if best is None:
        raise Infeasible("heuristic: adabits found no start that fits; use --method exact")
    return Outcome(
        method="heuristic",
        status="heuristic",
        assignment=best,
        value=worth,
        bound=None,
        seconds=timer.seconds,
    )


def _transfer(p: Problem, a: Assignment, deadline: float, budget: float | None) -> Assignment:
    """Improve a plan until no transfer does."""
    worth = value(p, a)
    while now_s() < deadline:
        better = None
        for candidate in _neighbours(p, a):
            if now_s() > deadline:
                break
            if keeps_budget(p, candidate, budget) and fits(p, candidate):
                new = value(p, candidate)
                if new < worth - 1e-12:
                    better, worth = candidate, new
        if better is None:
            return a
        a = better
    return a


def _neighbours(p: Problem, a: Assignment) -> Iterator[Assignment]:
    """Yield shifts from the slowest stage, and single precision changes on every stage."""
    times = stage_times(p, a)
    stages = range(len(a.stages))
    for phase in (times.decode_s, times.prefill_s):
        straggler = max(stages, key=lambda j: phase[j])
        pioneers = sorted((j for j in stages if j != straggler), key=lambda j: phase[j])
        for pioneer in pioneers:
            for k in SHIFTS:
                if a.stages[straggler].end - a.stages[straggler].start > k:
                    yield _squeezed(p, _shifted(a, straggler, pioneer, k))
    for j in stages:
        for b in range(len(p.choices)):
            yield from _converted(p, a, j, b)


def _shifted(a: Assignment, straggler: int, pioneer: int, k: int) -> Assignment:
    """Move every boundary between the two stages by k layers; layers keep their precision."""
    bounds = [stage.start for stage in a.stages] + [a.stages[-1].end]
    low, high = sorted((straggler, pioneer))
    step = k if straggler > pioneer else -k
    for j in range(low + 1, high + 1):
        bounds[j] += step
    return _cut(a, bounds, list(a.choices))


def _cut(a: Assignment, bounds: list[int], choices: list[int]) -> Assignment:
    stages = tuple(
        Stage(cls=stage.cls, start=low, end=high, choices=tuple(choices[low:high]))
        for stage, low, high in zip(a.stages, bounds, bounds[1:], strict=False)
    )
    return Assignment(
        prefill_microbatch=a.prefill_microbatch,
        decode_microbatch=a.decode_microbatch,
        stages=stages,
    )


def _squeezed(p: Problem, a: Assignment) -> Assignment:
    """Lower precisions on stages that are too full, cheapest omega per byte first."""
    sizes = p.numbers(a.prefill_microbatch, a.decode_microbatch).layer_bytes
    choices = list(a.choices)
    bounds = [stage.start for stage in a.stages] + [a.stages[-1].end]
    for j, stage in enumerate(a.stages):
        short = -spare_bytes(p, a, j)
        while short > 0:
            options = [
                (float(p.omega[i, b] - p.omega[i, choices[i]]) / saved, saved, i, b)
                for i in range(stage.start, stage.end)
                for b in np.flatnonzero(p.open[i]).tolist()
                if (saved := int(sizes[i, choices[i]] - sizes[i, b])) > 0
            ]
            if not options:
                break
            _, saved, i, b = min(options)
            choices[i] = b
            short -= saved
    return _cut(a, bounds, choices)


def _converted(p: Problem, a: Assignment, j: int, b: int) -> Iterator[Assignment]:
    """Yield the plan with one layer of stage j, the one it suits best, at choice b."""
    stage = a.stages[j]
    bounds = [s.start for s in a.stages] + [a.stages[-1].end]
    for old in set(stage.choices) - {b}:
        layers = [i for i in range(stage.start, stage.end) if a.choices[i] == old and p.open[i, b]]
        if not layers:
            continue
        best = min(layers, key=lambda i: float(p.omega[i, b] - p.omega[i, old]))
        choices = list(a.choices)
        choices[best] = b
        yield _cut(a, bounds, choices)
