"""A plan that runs, as a plan of another problem: of fewer or more devices, or other costs.

And what other plans are looked for with then (`PlanSearch`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.plans.plan import Prefer
from llmpq.precision import Precision


@dataclass(frozen=True, kw_only=True)
class KnownStage:
    """What a device of a problem's cluster holds."""

    device: str
    layers: tuple[int, int]
    precisions: tuple[Precision, ...]


@dataclass(frozen=True, kw_only=True)
class KnownPlan:
    """Stages on devices of a cluster; together they hold all layers."""

    stages: tuple[KnownStage, ...]
    prefill_microbatch: int
    decode_microbatch: int

    def without(self, devices: Sequence[str | None]) -> KnownPlan | None:
        """Return it on some of its devices, each by its name there, or None of one that is gone.

        Half of what was on a device goes to either neighbour. None where no device is left.
        """
        kept = [i for i, device in enumerate(devices) if device is not None]
        if not kept:
            return None
        bits = [precision for stage in self.stages for precision in stage.precisions]
        ends = [0]
        for left, right in zip(kept, kept[1:], strict=False):
            gap = (self.stages[left].layers[1], self.stages[right].layers[0])
            ends.append(sum(gap) // 2)
        ends.append(len(bits))
        stages = []
        for place, (start, end) in zip(kept, zip(ends, ends[1:], strict=False), strict=True):
            name, own = devices[place], tuple(bits[start:end])
            assert name is not None
            stages.append(KnownStage(device=name, layers=(start, end), precisions=own))
        return KnownPlan(
            stages=tuple(stages),
            prefill_microbatch=self.prefill_microbatch,
            decode_microbatch=self.decode_microbatch,
        )

    def in_numbers_of(self, p: Problem) -> Assignment | None:
        """Return it as a solver of a problem has it; None where it has no such device or groups.

        A precision that is not offered there becomes the next one below, or else the lowest;
        micro-batches become the nearest sizes that are looked at there.
        """
        class_of = {d.name: i for i, own in enumerate(p.classes) for d in own.devices}
        starts = {group[0]: i for i, group in enumerate(p.groups)} | {
            p.spec.num_layers: p.num_layers
        }
        stages = []
        for stage in self.stages:
            start, end = (starts.get(edge) for edge in stage.layers)
            cls = class_of.get(stage.device)
            if start is None or end is None or cls is None:
                return None
            firsts = [p.groups[group][0] - stage.layers[0] for group in range(start, end)]
            choices = tuple(_choice(p, stage.precisions[first]) for first in firsts)
            stages.append(Stage(cls=cls, start=start, end=end, choices=choices))
        sizes = (self.prefill_microbatch, self.decode_microbatch)
        prefill, decode = min(p.pairs, key=lambda pair: (math.dist(pair, sizes), pair))
        return Assignment(
            prefill_microbatch=prefill, decode_microbatch=decode, stages=tuple(stages)
        )


def _choice(p: Problem, precision: Precision) -> int:
    if precision in p.choices:
        return p.choices.index(precision)
    below = [c for c in p.choices if c.weight_bits <= precision.weight_bits]
    best = max(below or p.choices, key=lambda c: c.weight_bits if below else -c.weight_bits)
    return p.choices.index(best)


@dataclass(frozen=True, kw_only=True)
class PlanSearch:
    """Which plans of a job are looked for, and how."""

    bits: Sequence[Precision] | None = None
    """What layers may have; None: whatever the planner offers."""
    at_most: Sequence[Precision] = ()
    """Bits that each layer may not have more than."""
    prefer: Prefer = "quality"
    windows: Sequence[int] = ()
    """Batch sizes that will do instead of the workload's, best first: the first that fits is
    taken."""
    chunk: int | None = None
    """Of prompts, where it has room."""
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    """By device, how many times as long as by the costs it takes."""
    known: KnownPlan | None = None
    """A plan to start from, and to compare with, where it is not `in_child`."""
    in_child: bool = True
    """Whether to solve in a child process, which takes half a second to start where this one has
    threads."""
    groups: bool = True
    """Whether GPUs of a node may share stages where that is better; not found but `in_child`."""
    time_limit_s: float = 60.0
