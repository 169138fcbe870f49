"""`pipeedge`: one precision for all layers and PipeEdge's exact partition, any device order.

PipeEdge minimises the slowest stage of a single-phase pipeline by dynamic programming over (devices
used, last device, layers done); it may leave devices out. It knows nothing of generation: here it
balances prefill and, alternatively, decode, with equal micro-batches in both phases, and the better
of all these plans is kept. With more sets of devices than MAX_SETS the devices stay in a row, equal
ones together, in which any may be skipped.
"""

from __future__ import annotations

import math

import numpy as np

from llmpq.planner.baselines.device_sets import DeviceSets, every_set, in_a_row, num_sets
from llmpq.planner.baselines.uniform import by_precision, fastest_of
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.problem.numbers import PairNumbers
from llmpq.planner.problem.outcome import Assignment, Infeasible, Outcome, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stage_memory import DENSE, PACKED
from llmpq.planner.problem.work_clock import Timer, now_s, spend

MAX_SETS = 1500


def solve_pipeedge(
    p: Problem, *, time_limit_s: float = math.inf, budget: float | None = None
) -> Outcome:
    """Return the balanced plan at the highest precision that fits.

    With a `budget` of the sum of omega, at the precision within it that is the fastest.
    """
    timer, deadline = Timer(), now_s() + time_limit_s
    sets = every_set(p) if num_sets(p) <= MAX_SETS else in_a_row(p)
    allowed = _allowed(p)
    equal = [pair for pair in p.pairs if pair[0] == pair[1]] or list(p.pairs)
    found: list[Assignment] = []
    for b in by_precision(p, budget):
        if found and budget is None:
            break
        for eta, xi in equal:
            for phase in ("prefill", "decode"):
                if now_s() > deadline:
                    break
                plan = _balanced(p, sets, allowed, p.numbers(eta, xi), b, phase, deadline)
                if plan is not None and fits(p, plan):
                    found.append(plan)
    if best := fastest_of("pipeedge", p, found, timer, time_limit_s):
        return best
    raise Infeasible("pipeedge: no precision fits; use --method exact")


def _allowed(p: Problem) -> np.ndarray:
    """[C, L+1, L+1] whether pins and shared caches let a stage of a class hold layers [a, a')."""
    size = p.num_layers + 1
    table = np.repeat(np.triu(np.ones((1, size, size), dtype=bool), 1), len(p.classes), axis=0)
    if p.is_restricted:
        for c, a, end in zip(*np.nonzero(table), strict=True):
            table[c, a, end] = p.allowed(int(c), int(a), int(end))
    return table


def _balanced(
    p: Problem,
    sets: DeviceSets,
    allowed: np.ndarray,
    x: PairNumbers,
    b: int,
    phase: str,
    deadline: float = math.inf,
) -> Assignment | None:
    """Cut the layers so that the slowest stage or hop of a phase is as fast as possible.

    None if nothing fits, or at the deadline.
    """
    hops = (x.hop_prefill if phase == "prefill" else x.hop_decode).busy_s
    stage = _stage_table(p, allowed, x, b, phase)
    states, classes = sets.after.shape
    worst = np.full((states, classes, p.num_layers + 1), np.inf)
    worst[:, :, p.num_layers] = 0.0
    for s in range(states - 1, -1, -1):
        if s % 64 == 0 and now_s() > deadline:
            return None
        spend(6 * classes, 2 * stage.size)
        for c in range(classes):
            after = sets.after[s, c]
            if after >= 0:
                enter = np.maximum(stage[c], worst[after, c][None, :]).min(axis=1)
                worst[s] = np.minimum(worst[s], np.maximum(hops[:, c, None], enter[None, :]))
    return _walk(p, sets, x, b, (stage, worst, hops))


def _stage_table(p: Problem, allowed: np.ndarray, x: PairNumbers, b: int, phase: str) -> np.ndarray:
    """[C, L+1, L+1] time of a stage of layers [a, a'), infinite where it does not fit."""
    prefill = phase == "prefill"
    times = (x.prefill_s if prefill else x.decode_s)[:, :, b]
    ends = x.ends_prefill_s if prefill else x.ends_decode_s
    layers = p.num_layers
    until = np.concatenate([np.zeros((1, times.shape[1])), np.cumsum(times, axis=0)])
    held = np.concatenate([[0], np.cumsum(x.layer_bytes[:, b])])
    needed = held[None, :] - held[:, None]
    stage = np.full(allowed.shape, np.inf)
    capacity = x.capacity[..., PACKED if p.choices[b].weight_bits < 16 else DENSE]
    for c in range(len(p.classes)):
        room = np.full(needed.shape, capacity[c, 0, 0])
        room[0, :], room[:, layers] = capacity[c, 1, 0], capacity[c, 0, 1]
        room[0, layers] = capacity[c, 1, 1]
        cost = until[None, :, c] - until[:, None, c]
        cost[0, :] += ends[c, 0]
        cost[:, layers] += ends[c, 1]
        fine = allowed[c] & (needed <= room)
        stage[c][fine] = cost[fine]
    return stage


def _walk(
    p: Problem,
    sets: DeviceSets,
    x: PairNumbers,
    b: int,
    tables: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> Assignment | None:
    stage, worst, hops = tables
    state, last, a = 0, -1, 0
    stages: list[Stage] = []
    while a < p.num_layers:
        best = (math.inf, -1, -1)
        for c in range(len(p.classes)):
            after = sets.after[state, c]
            if after >= 0:
                cost = np.maximum(stage[c, a], worst[after, c])
                if last >= 0:
                    cost = np.maximum(cost, hops[last, c])
                best = min(best, (float(cost.min()), c, int(np.argmin(cost))))
        if not math.isfinite(best[0]):
            return None
        stages.append(Stage(cls=best[1], start=a, end=best[2], choices=(b,) * (best[2] - a)))
        state, last, a = int(sets.after[state, best[1]]), best[1], best[2]
    return Assignment(prefill_microbatch=x.eta, decode_microbatch=x.xi, stages=tuple(stages))
