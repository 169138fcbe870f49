"""Values every plan of a small problem in arrays: an oracle quick enough for thousands of them.

Shares no code with the solvers, nor with the closed form they minimise (evaluate/objective.py),
which it writes out a second time. Only where all layers take equal time and memory: of the fillings
of a stage with equal counts of every choice one of the least omega stands for all. The plain loop
over everything, tests/reference/brute_force.py, is its own oracle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.costs.cost_model import Phase
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import StageTimes, stage_times
from llmpq.planner.ilp.solve import device_orders
from llmpq.planner.problem.outcome import BUDGET_ROUNDING, Assignment, Stage
from llmpq.planner.problem.problem import Floats, Problem

Key = tuple[int, int, int, bool, bool]
"""Class, first layer, end, whether it is the first stage, whether the last."""


@dataclass(frozen=True, kw_only=True)
class _Fillings:
    """The ways to fill a stage, K of them."""

    choices: tuple[tuple[int, ...], ...]
    omega: Floats
    """[K]"""
    prefill_s: Mapping[int, Floats]
    """Prefill micro-batch size -> [K]."""
    decode_s: Mapping[int, Floats]
    held_prefill_s: Mapping[int, Floats]
    """The mean over micro-batches, the last one at its own size, as the slowest stage counts."""
    held_decode_s: Mapping[int, Floats]


def best_of_all(p: Problem, budget: float | None = None) -> tuple[float, Assignment | None]:
    """Return the least objective of all plans: with a `budget` of the sum of omega, of time."""
    assert p.numbers(*p.pairs[0]).uniform, "layers differ: use tests/reference/brute_force.py"
    tables: dict[Key, _Fillings] = {}
    best: tuple[float, Assignment | None] = (math.inf, None)
    for order in device_orders(p):
        last = len(order) - 1
        for cuts in itertools.combinations(range(1, p.num_layers), last):
            bounds = (0, *cuts, p.num_layers)
            keys = [
                (cls, bounds[j], bounds[j + 1], j == 0, j == last) for j, cls in enumerate(order)
            ]
            if not all(p.allowed(*key[:3]) for key in keys):
                continue
            for key in keys:
                if key not in tables:
                    tables[key] = _fillings(p, key)
            found = _best_cut(p, keys, [tables[key] for key in keys], budget, best[0])
            best = best if found is None else found
    return best


def _fillings(p: Problem, key: Key) -> _Fillings:
    """Return one filling of the least omega for every count of choices that layers may have."""
    cls, start, end, first, last = key
    least: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
    for choices in itertools.product(range(len(p.choices)), repeat=end - start):
        omega = sum(float(p.open_omega[start + i, b]) for i, b in enumerate(choices))
        counts = tuple(choices.count(b) for b in range(len(p.choices)))
        if math.isfinite(omega) and (counts not in least or omega < least[counts][0]):
            least[counts] = (omega, choices)
    table = np.array(list(least), dtype=np.float64).reshape(len(least), len(p.choices))
    prefill, decode, held_prefill, held_decode = {}, {}, {}, {}

    for eta, xi in p.pairs:
        prefill[eta] = _stage_s(p, key, table, Phase.PREFILL, eta)
        decode[xi] = _stage_s(p, key, table, Phase.DECODE, xi)
        held_prefill[eta] = _held_s(p, key, table, Phase.PREFILL, eta)
        held_decode[xi] = _held_s(p, key, table, Phase.DECODE, xi)
    return _Fillings(
        choices=tuple(choices for _, choices in least.values()),
        omega=np.array([omega for omega, _ in least.values()]),
        prefill_s=prefill,
        decode_s=decode,
        held_prefill_s=held_prefill,
        held_decode_s=held_decode,
    )


def _stage_s(p: Problem, key: Key, table: Floats, phase: Phase, size: int) -> Floats:
    """[K] time of a stage for one micro-batch, `table` [K, B] layers at every choice."""
    x, (cls, _, _, first, last) = p.size_numbers(phase, size), key
    ends = (x.ends_s[cls, 0] if first else 0.0) + (x.ends_s[cls, 1] if last else 0.0)
    return np.asarray(table @ x.layer_s[0, cls] + ends)


def _held_s(p: Problem, key: Key, table: Floats, phase: Phase, size: int) -> Floats:
    """[K] mean time of a stage for a micro-batch, the last one at its own size."""
    whole = _stage_s(p, key, table, phase, size)
    count, rest = divmod(p.workload.batch, size)
    passes = p.chunks_of_prompt if phase is Phase.PREFILL else p.workload.gen_len - 1
    if not (count and rest and passes) or p.objective == "paper":
        return whole
    # Of all passes, one whole micro-batch less: it is in the sum over stages.
    spent = passes * (count * whole + _stage_s(p, key, table, phase, rest)) - whole
    return np.asarray(spent / (passes * (count + 1) - 1))


def _best_cut(
    p: Problem,
    keys: Sequence[Key],
    tables: Sequence[_Fillings],
    budget: float | None,
    known: float,
) -> tuple[float, Assignment] | None:
    """Return the best plan of one cut of the layers that is better than `known`, if any."""
    which = np.meshgrid(*[np.arange(len(t.omega)) for t in tables], indexing="ij")
    index = [w.ravel() for w in which]
    omega = sum(t.omega[i] for t, i in zip(tables, index, strict=True))
    best: tuple[float, Assignment] | None = None
    for eta, xi in p.pairs:
        tp, td, slow_p, slow_d = (
            np.stack([by_size[size][i] for by_size, i in zip(own, index, strict=True)])
            for size, own in (
                (eta, [t.prefill_s for t in tables]),
                (xi, [t.decode_s for t in tables]),
                (eta, [t.held_prefill_s for t in tables]),
                (xi, [t.held_decode_s for t in tables]),
            )
        )
        plan = _plan(keys, tables, [0] * len(keys), eta, xi)
        seconds = _seconds(
            p,
            stage_times(p, plan),
            (tp, td),
            (slow_p.max(axis=0), slow_d.max(axis=0)),
            p.counts(eta, xi),
        )
        if budget is None:
            worth = seconds + p.theta * omega
        else:
            worth = np.where(omega <= budget * (1 + BUDGET_ROUNDING), seconds, np.inf)
        for k in np.argsort(worth, kind="stable"):
            if not worth[k] < known:
                break
            plan = _plan(keys, tables, [int(i[k]) for i in index], eta, xi)
            if fits(p, plan):
                known = float(worth[k])
                best = (known, plan)
                break
    return best


def _plan(
    keys: Sequence[Key], tables: Sequence[_Fillings], at: Sequence[int], eta: int, xi: int
) -> Assignment:
    stages = tuple(
        Stage(cls=key[0], start=key[1], end=key[2], choices=table.choices[k])
        for key, table, k in zip(keys, tables, at, strict=True)
    )
    return Assignment(prefill_microbatch=eta, decode_microbatch=xi, stages=stages)


def _seconds(
    p: Problem,
    hops: StageTimes,
    stages: tuple[Floats, Floats],
    slow: tuple[Floats, Floats],
    counts: tuple[int, int],
) -> NDArray[np.float64]:
    """[K] time of the job, given [stages, K] times of stages and the hops between them.

    slow: [K] the slowest stage of either phase.
    """
    (mp, md), n = counts, p.workload.gen_len
    (tp, td), (slow_p, slow_d) = stages, slow
    way_p, way_d = sum(hops.hop_prefill_s), sum(hops.hop_decode_s)
    ways_p, ways_d = (held[len(tp) :] for held in (hops.held_prefill_s, hops.held_decode_s))
    busy_p, busy_d = (max(ways[:-1], default=0.0) for ways in (ways_p, ways_d))
    if p.objective == "paper":
        first = (mp - 1) * np.maximum(slow_p, busy_p) + tp.sum(axis=0)
        again = (md - 1) * np.maximum(slow_d, busy_d) + td.sum(axis=0)
        return np.asarray(first + max(0, n - 1) * again)
    if n == 1:
        slowest = np.maximum(slow_p, busy_p)
        return np.asarray((mp - 1) * slowest + tp.sum(axis=0) + way_p)
    back_p, back_d = hops.back_prefill_s, hops.back_decode_s
    slowest = np.maximum(slow_p, max(busy_p, ways_p[-1]))
    first = (mp - 1) * slowest + tp.sum(axis=0) + way_p + back_p
    token = td.sum(axis=0) + way_d
    slowest = np.maximum(slow_d, max(busy_d, ways_d[-1] if n > 2 else 0.0))
    rest = (n - 2) * np.maximum(md * slowest, token + back_d)
    return np.asarray(first + rest + token + (md - 1) * slowest)
