"""Whether an assignment fits memory, pins, device counts and what each layer may have."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from llmpq.planner.costs.stage_memory import sort_of_stage
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem


def fits(p: Problem, a: Assignment) -> bool:
    """Whether every stage is allowed and has the memory."""
    used = Counter(stage.cls for stage in a.stages)
    if any(count > p.classes[cls].count for cls, count in used.items()):
        return False
    if len(a.stages) > p.max_stages:
        return False
    if not all(p.open[i, b] for i, b in enumerate(a.choices)):
        return False
    return all(
        spare_bytes(p, a, position) >= 0 and p.allowed(stage.cls, stage.start, stage.end)
        for position, stage in enumerate(a.stages)
    )


def fitting(p: Problem, plans: Iterable[Assignment], deadline: float) -> list[Assignment]:
    """Return the plans that fit; past the deadline only the first is looked at."""
    found: list[Assignment] = []
    for number, a in enumerate(plans):
        if number and time.perf_counter() > deadline:
            break
        if fits(p, a):
            found.append(a)
    return found


def spare_bytes(p: Problem, a: Assignment, position: int) -> int:
    """Return the memory a stage leaves free; negative when it is short."""
    x = p.numbers(a.prefill_microbatch, a.decode_microbatch)
    stage = a.stages[position]
    first, last = int(position == 0), int(position == len(a.stages) - 1)
    layers = range(stage.start, stage.end)
    used = sum(int(x.layer_bytes[i, b]) for i, b in zip(layers, stage.choices, strict=True))
    return int(x.capacity[stage.cls, first, last, sort_of_stage(p.packed, stage.choices)]) - used
