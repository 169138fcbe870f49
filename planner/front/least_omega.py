"""The least sum of omega that devices and precisions allow: what a quality budget is refused by.

With the smallest micro-batches, which leave the most room. Exact where the ways to fill a stage are
few enough for a table and the devices for a list of states; else a bound by the memory of all
devices together, layers cut into fractions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.exact.bounds.columns import Columns, KeptPairs, assigned
from llmpq.planner.exact.bounds.space import Space
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Floats, Problem

ROUNDING = 1e-9
"""Relative difference of sums in another order."""


@dataclass(frozen=True, kw_only=True)
class LeastOmega:
    """A sum of omega that no plan is below; infinite where no plan fits."""

    omega: float
    plan: Assignment | None = None
    """A plan that has it, where it was found."""


def least_omega(p: Problem) -> LeastOmega:
    """Return the least sum of omega, with a plan of it, where that is quick to tell."""
    space, kept = Space(p), KeptPairs.of(p)
    if kept is None or not space.listed:
        return LeastOmega(omega=least_by_memory(p))
    columns = kept.columns
    stage = _stage_table(p, columns, space)
    best = _least_ways(stage, space)
    omega = float(best[-1].min())
    if not np.isfinite(omega):
        return LeastOmega(omega=omega)
    return LeastOmega(omega=omega, plan=_walked(p, columns, space, stage, best))


def least_by_memory(p: Problem) -> float:
    """Return a sum of omega that no plan is below, by the memory of all devices together."""
    omega, sizes = p.open_omega, p.all_layer_bytes
    room = p.capacity(p.prefill_sizes[0], p.decode_sizes[0]).max(axis=(1, 2, 3))
    counts = np.array([min(cls.count, p.max_stages) for cls in p.classes])
    held = np.sort(np.repeat(np.clip(room, 0, None), counts))[::-1][: p.max_stages]
    left = float(held.sum())
    # max over rho >= 0 of  sum_i min_b (omega + rho bytes) - rho room: concave, and linear between
    # the prices at which some layer takes another choice.
    finite = np.where(np.isfinite(omega), omega, 1e300)
    best = float(omega.min(axis=1).sum())
    for rho in _turns(omega, sizes):
        best = max(best, float((finite + rho * sizes).min(axis=1).sum() - rho * left))
    return best


def _turns(omega: Floats, sizes: NDArray[np.int64]) -> Floats:
    """Return the prices of memory at which some layer is as well off with a smaller choice."""
    found: list[Floats] = [np.zeros(1)]
    for b in range(omega.shape[1]):
        for other in range(omega.shape[1]):
            saved = sizes[:, b] - sizes[:, other]
            some = (saved > 0) & np.isfinite(omega[:, b]) & np.isfinite(omega[:, other])
            rates = (omega[some, other] - omega[some, b]) / saved[some]
            found.append(rates[rates > 0])
    return np.unique(np.concatenate(found))


def _stage_table(p: Problem, columns: Columns, space: Space) -> Floats:
    """[C, L+1, L+1] the least omega of a stage of layers [a, e), infinite where nothing fits."""
    layers, capacity = p.num_layers, p.capacity(p.prefill_sizes[0], p.decode_sizes[0])
    table = np.full((len(p.classes), layers + 1, layers + 1), np.inf)
    for m in range(1, columns.most + 1):
        least = columns.least[m]
        for c, room in enumerate(capacity):
            for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
                starts = np.arange(len(least))
                starts = starts[((starts == 0) == first) & ((starts + m == layers) == last)]
                fits = columns.fitting(m, room[first, last])
                if len(starts) and fits.any():
                    table[c, starts, starts + m] = least[np.ix_(starts, fits)].min(axis=1)
    table[~space.allowed] = np.inf
    return table


def _least_ways(stage: Floats, space: Space) -> Floats:
    """[L+1, S] the least omega of the layers before a boundary, by the devices used."""
    layers, after = stage.shape[1] - 1, space.next_states
    best = np.full((layers + 1, len(after)), np.inf)
    best[0, 0] = 0.0
    for a in range(layers):
        for c in range(len(stage)):
            ends = np.flatnonzero(np.isfinite(stage[c, a]))
            rows = np.flatnonzero(np.isfinite(best[a]) & (after[:, c] >= 0))
            if len(ends) and len(rows):
                at = np.ix_(ends, after[rows, c])
                best[at] = np.minimum(best[at], best[a, rows][None] + stage[c, a, ends][:, None])
    return best


def _walked(
    p: Problem, columns: Columns, space: Space, stage: Floats, best: Floats
) -> Assignment | None:
    """Walk back from the last boundary."""
    capacity = p.capacity(p.prefill_sizes[0], p.decode_sizes[0])
    stages: list[Stage] = []
    end, state = p.num_layers, int(np.argmin(best[-1]))
    while end > 0:
        a, c, state = _before(space, stage, best, end, state)
        m = end - a
        fits = columns.fitting(m, capacity[c, int(a == 0), int(end == p.num_layers)])
        vector = int(np.argmin(np.where(fits, columns.least[m][a], np.inf)))
        choices = assigned(p.open_omega[a:end], columns.counts[m][vector])
        stages.append(Stage(cls=c, start=a, end=end, choices=choices))
        end = a
    return Assignment(
        prefill_microbatch=p.prefill_sizes[0],
        decode_microbatch=p.decode_sizes[0],
        stages=tuple(reversed(stages)),
    )


def _before(
    space: Space, stage: Floats, best: Floats, end: int, state: int
) -> tuple[int, int, int]:
    """Return start, class and state before of the last stage of the least way to a boundary."""
    found: tuple[float, int, int, int] | None = None
    for c in range(len(stage)):
        for row in np.flatnonzero(space.next_states[:, c] == state):
            ways = best[:end, row] + stage[c, :end, end]
            a = int(np.argmin(ways))
            if found is None or ways[a] < found[0]:
                found = float(ways[a]), a, c, int(row)
    assert found is not None, "a finite way has a last stage"
    return found[1:]
