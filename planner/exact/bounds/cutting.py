"""Cuts what is known of P and D into smaller ranges, in which bounds are tight.

First the range is shrunk: where the relaxation is not below the best plan, no plan is better. Then
it is cut where a stage may have one layer more, since times move in steps, or evenly.
"""

from __future__ import annotations

import math

import numpy as np

from llmpq.planner.evaluate.objective import Form
from llmpq.planner.exact.bounds.plan_cases import Box
from llmpq.planner.exact.bounds.relaxation import ClassRelaxation
from llmpq.planner.problem.problem import Problem

MANY_STEPS = 40
"""Numbers of layers within a range from which on it is cut evenly."""
PIECES = 6
"""Parts a range of D (or P) is cut into."""
MANY_STAGES = 8
FEW_LAYERS = 6
"""Layers a stage, below which times move in steps, and cutting by them comes before labels."""
RANGE_STEPS = 9
"""Bisections to shrink a range before it is cut."""


def in_steps(p: Problem) -> bool:
    """Whether many stages have few layers each."""
    return p.max_stages >= MANY_STAGES and p.num_layers < FEW_LAYERS * p.max_stages


def cut_boxes(
    relaxation: ClassRelaxation, form: Form, box: Box, target: float, *, decode: bool
) -> list[Box]:
    """Return boxes of D (`decode`) or P that hold every plan of the box below the target."""
    names = ("d_low", "d_high") if decode else ("p_low", "p_high")
    low, high = _range(relaxation, form, box, target, names)
    ends = [low, *_cuts(form, low, high, decode=decode), high]
    return [
        box.with_limits({names[0]: start, names[1]: end})
        for start, end in zip(ends, ends[1:], strict=False)
    ]


def _cuts(form: Form, low: float, high: float, *, decode: bool) -> list[float]:
    """Return where to cut a range.

    A little below the time of so many layers: a stage that has them is above the cut.
    """
    x = form.numbers
    layer = (x.held_decode_s if decode else x.held_prefill_s)[0].min(axis=1)
    times = np.outer(np.arange(1, len(x.decode_s) + 1), layer) * (1 - 1e-7)
    steps = np.unique(times[(times > low) & (times < high)])
    if not len(steps) or len(steps) > MANY_STEPS:
        return [low + (high - low) * k / PIECES for k in range(1, PIECES)]
    chosen = np.unique(np.linspace(0, len(steps) - 1, PIECES).astype(int))
    return [float(t) for t in steps[chosen]]


def _range(
    relaxation: ClassRelaxation, form: Form, box: Box, target: float, names: tuple[str, str]
) -> tuple[float, float]:
    """Shrink a range by the relaxation: outside it no plan is better than the target."""

    def open_within(limits: dict[str, float]) -> bool:
        return relaxation.bound(form, box.with_limits(limits)) < target

    low, high = getattr(box, names[0]), getattr(box, names[1])
    if math.isinf(high):
        weight = form.d_weight(1.0) if names[0] == "d_low" else form.a
        high = target / weight if weight > 0 and math.isfinite(target) else 1e6
    inside, outside = high, low  # smallest upper bound with room for a better plan
    for _ in range(RANGE_STEPS):
        middle = (inside + outside) / 2
        if open_within({names[1]: middle}):
            inside = middle
        else:
            outside = middle
    least = outside
    inside, outside = least, high  # largest lower bound with room for a better plan
    for _ in range(RANGE_STEPS):
        middle = (inside + outside) / 2
        if open_within({names[0]: middle}):
            inside = middle
        else:
            outside = middle
    return least, outside
