"""`pipeedge`: one precision for all layers and PipeEdge's exact partition, any device order.

PipeEdge minimises the slowest stage of a single-phase pipeline by dynamic programming over (devices
used, last device, layers done); it may leave devices out. It knows nothing of generation: here it
balances prefill and, alternatively, decode, with equal micro-batches in both phases, and the better
of all these plans is kept.
"""

from __future__ import annotations

import math
import time

import numpy as np

from llmpq.planner.baselines import by_precision
from llmpq.planner.exact.completion import MAX_STATES, ChainSpace, Space, num_states
from llmpq.planner.fits import fits
from llmpq.planner.outcome import Assignment, Infeasible, Outcome, Stage
from llmpq.planner.pipeline_time import job_time, value
from llmpq.planner.problem import PairNumbers, Problem


def solve_pipeedge(p: Problem) -> Outcome:
    """Return the balanced plan at the highest precision that fits."""
    start = time.perf_counter()
    small = num_states(p) <= MAX_STATES
    space = Space(p) if small else ChainSpace(p, range(len(p.classes)))
    equal = [pair for pair in p.pairs if pair[0] == pair[1]] or list(p.pairs)
    for b in by_precision(p):
        found = [
            plan
            for eta, xi in equal
            for phase in ("prefill", "decode")
            if (plan := _balanced(p, space, p.numbers(eta, xi), b, phase)) and fits(p, plan)
        ]
        if found:
            best = min(found, key=lambda a: job_time(p, a).total_s)
            return Outcome(
                method="pipeedge",
                status="baseline",
                assignment=best,
                value=value(p, best),
                bound=None,
                seconds=time.perf_counter() - start,
            )
    raise Infeasible("pipeedge: no precision fits; use --method exact")


def _balanced(p: Problem, space: Space, x: PairNumbers, b: int, phase: str) -> Assignment | None:
    """Cut the layers so that the slowest stage or hop of a phase is as fast as possible."""
    prefill = phase == "prefill"
    table = (x.prefill_s if prefill else x.decode_s)[0, :, b]
    ends = x.ends_prefill_s if prefill else x.ends_decode_s
    hops = x.hop_prefill_s if prefill else x.hop_decode_s
    layers, classes = p.num_layers, len(p.classes)
    length = np.arange(layers + 1)
    span = length[None, :] - length[:, None]
    stage = np.full((classes, layers + 1, layers + 1), np.inf)
    for c in range(classes):
        room = x.capacity[c] // int(x.layer_bytes[0, b])
        most = np.full(span.shape, room[0, 0])
        most[0, :], most[:, layers] = room[1, 0], room[0, 1]
        most[0, layers] = room[1, 1]
        cost = span * table[c]
        cost[0, :] += ends[c, 0]
        cost[:, layers] += ends[c, 1]
        fine = (span >= 1) & (span <= most) & space.allowed[c]
        stage[c][fine] = cost[fine]
    worst = np.full((len(space.used), classes, layers + 1), np.inf)
    worst[space.complete, :, layers] = 0.0
    for s in range(len(space.used) - 1, -1, -1):
        for c in range(classes):
            after = space.after[s, c]
            if after >= 0:
                enter = np.maximum(stage[c], worst[after, c][None, :]).min(axis=1)
                worst[s] = np.minimum(worst[s], np.maximum(hops[:, c, None], enter[None, :]))
    return _walk(p, space, x, b, (stage, worst, hops))


def _walk(
    p: Problem,
    space: Space,
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
            after = space.after[state, c]
            if after >= 0:
                cost = np.maximum(stage[c, a], worst[after, c])
                if last >= 0:
                    cost = np.maximum(cost, hops[last, c])
                best = min(best, (float(cost.min()), c, int(np.argmin(cost))))
        if not math.isfinite(best[0]):
            return None
        stages.append(Stage(cls=best[1], start=a, end=best[2], choices=(b,) * (best[2] - a)))
        state, last, a = int(space.after[state, best[1]]), best[1], best[2]
    return Assignment(prefill_microbatch=x.eta, decode_microbatch=x.xi, stages=tuple(stages))
