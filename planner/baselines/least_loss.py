"""Cuts layers over a fixed order of devices, and chooses precisions, for the least sum of omega.

Device by device and layer by layer, every filling of a stage that may still be part of the best cut
is kept as (bytes, omega so far), the undominated ones only. Every device of the order holds a layer
at least. Exact while no list outgrows MOST_FILLINGS; then the list is thinned evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.problem.outcome import Stage
from llmpq.planner.problem.problem import Floats, Problem
from llmpq.planner.problem.stage_memory import choices_of
from llmpq.planner.problem.work_clock import now_s, spend

MOST_FILLINGS = 400
"""Fillings of a stage kept per boundary: a step of 0.25 % of what its bits can change."""


@dataclass(frozen=True, kw_only=True)
class _Fillings:
    """Undominated fillings of a stage that ends at a boundary, by ascending bytes."""

    num_bytes: NDArray[np.int64]
    loss: Floats
    parent: NDArray[np.int64]
    """Index in the list one layer before; its length where the stage begins with this layer."""
    choice: NDArray[np.int64]


NOTHING = _Fillings(
    num_bytes=np.zeros(0, dtype=np.int64),
    loss=np.zeros(0),
    parent=np.zeros(0, dtype=np.int64),
    choice=np.zeros(0, dtype=np.int64),
)


def least_loss(
    p: Problem, order: Sequence[int], capacity: NDArray[np.int64], sort: int, deadline: float
) -> tuple[Stage, ...] | None:
    """Return the stages of least sum of omega on an order of classes; None if none fits in time.

    Stages have weights of a sort (planner/problem/stage_memory.py), or of less.
    """
    layers, count = p.num_layers, len(order)
    omega = np.where(choices_of(p.choices, sort), p.open_omega, np.inf)
    enter = np.full(layers + 1, np.inf)
    enter[0] = 0.0
    tables: list[list[_Fillings]] = []
    for j, cls in enumerate(order):
        if now_s() > deadline:
            return None
        room = int(capacity[cls, int(j == 0), int(j == count - 1), sort])
        begins = np.where(np.arange(layers + 1) <= layers - (count - j), enter, np.inf)
        table = _stage_fillings(p, cls, begins, room, omega)
        enter = np.array([f.loss[-1] if len(f.loss) else np.inf for f in table])
        enter[[not _may_end(p, cls, end) for end in range(layers + 1)]] = np.inf
        enter[~p.cuts] = np.inf
        tables.append(table)
    if not np.isfinite(enter[layers]):
        return None
    return _stages(order, tables, layers)


def _stage_fillings(
    p: Problem, cls: int, begins: Floats, room: int, omega: Floats
) -> list[_Fillings]:
    """Return the fillings of a stage by the boundary it ends at; it may begin at finite losses."""
    sizes = p.all_layer_bytes
    table = [NOTHING]
    for i in range(p.num_layers):
        before = table[-1]
        if _blocked(p, cls, i) or not (len(before.loss) or np.isfinite(begins[i])):
            table.append(NOTHING)
            continue
        held = np.append(before.num_bytes, 0)
        lost = np.append(before.loss, begins[i] if _may_begin(p, cls, i) else np.inf)
        table.append(_undominated(held, lost, sizes[i], omega[i], room))
    return table


def _undominated(
    held: NDArray[np.int64], lost: Floats, sizes: NDArray[np.int64], omega: Floats, room: int
) -> _Fillings:
    """Add a layer at every choice; keep what fits, loses less than all smaller ones."""
    num_bytes = (held[:, None] + sizes[None, :]).ravel()
    spend(20, 30 * len(num_bytes))
    loss = (lost[:, None] + omega[None, :]).ravel()
    fine = np.flatnonzero((num_bytes <= room) & np.isfinite(loss))
    order = fine[np.lexsort((loss[fine], num_bytes[fine]))]
    if not len(order):
        return NOTHING
    least = np.minimum.accumulate(loss[order])
    better = np.ones(len(order), dtype=bool)
    better[1:] = loss[order[1:]] < least[:-1]
    kept = order[better]
    if len(kept) > MOST_FILLINGS:
        kept = kept[np.linspace(0, len(kept) - 1, MOST_FILLINGS).astype(np.int64)]
    parent, choice = np.divmod(kept, len(sizes))
    return _Fillings(num_bytes=num_bytes[kept], loss=loss[kept], parent=parent, choice=choice)


def _blocked(p: Problem, cls: int, layer: int) -> bool:
    """Whether a pin gives the layer to another device."""
    return any(
        other.pinned is not None and index != cls and other.pinned[0] <= layer < other.pinned[1]
        for index, other in enumerate(p.classes)
    )


def _may_begin(p: Problem, cls: int, start: int) -> bool:
    pinned = p.classes[cls].pinned
    return pinned is None or start <= pinned[0]


def _may_end(p: Problem, cls: int, end: int) -> bool:
    pinned = p.classes[cls].pinned
    return pinned is None or end >= pinned[1]


def _stages(
    order: Sequence[int], tables: Sequence[Sequence[_Fillings]], layers: int
) -> tuple[Stage, ...]:
    """Walk back from the last boundary."""
    stages: list[Stage] = []
    end = layers
    for cls, table in zip(reversed(order), reversed(tables), strict=True):
        at, start, choices = len(table[end].loss) - 1, end, []
        begun = False
        while not begun:
            fillings = table[start]
            choices.append(int(fillings.choice[at]))
            at = int(fillings.parent[at])
            start -= 1
            begun = at == len(table[start].loss)
        stages.append(Stage(cls=cls, start=start, end=end, choices=tuple(reversed(choices))))
        end = start
    return tuple(reversed(stages))
