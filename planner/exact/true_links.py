"""Puts a plan of the problem with the nearest links onto devices with their true ones."""

from __future__ import annotations

from dataclasses import replace

from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem


def with_true_links(true: Problem, nearest: Problem, a: Assignment) -> Assignment:
    """Return the plan with a true class for each stage: the one nearest to the stage before."""
    members: dict[int, list[int]] = {}
    of_device = {i: c for c, devices in enumerate(nearest.members) for i in devices}
    for c, devices in enumerate(true.members):
        members.setdefault(of_device[devices[0]], []).append(c)
    unused = [cls.count for cls in true.classes]
    hop = true.numbers(a.prefill_microbatch, a.decode_microbatch).hop_decode.total_s
    stages, last = [], -1
    for position, stage in enumerate(a.stages):
        options = [c for c in members[stage.cls] if unused[c]]
        ahead = {d for s in a.stages[position:] for d in members[s.cls]}
        hops = [float(hop[last, c]) if last >= 0 else 0.0 for c in options]
        near = [-_beside(true, unused, c, ahead) for c in options]
        # A short hop, then a node that has most of what comes next.
        chosen = min(zip(hops, near, options, strict=True))[2]
        unused[chosen] -= 1
        stages.append(replace(stage, cls=chosen))
        last = chosen
    return replace(a, stages=tuple(stages))


def _beside(true: Problem, unused: list[int], c: int, ahead: set[int]) -> int:
    """Return how many unused devices of the classes ahead are on a class's node."""
    node = true.classes[c].first.node
    return sum(unused[d] for d in ahead if true.classes[d].first.node == node)
