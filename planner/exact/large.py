"""Problems too large for the whole search: part of the plans are searched, the bound holds for all.

Short stages: where a stage has too many fillings, stages of more than so many layers are left out
of the search, and a relaxation bounds what a plan with such a stage could reach.
Chains: where there are too many device orders, each class's devices stay in a row, in two sequences
of classes; the bound is the class relaxation's.
Groups: where neither is enough, neighbouring layers share a device and a choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from llmpq.planner.exact.columns import TooManyColumns
from llmpq.planner.exact.completion import ChainSpace, Space
from llmpq.planner.exact.form import Box, Form, make_form
from llmpq.planner.exact.relaxation import ClassRelaxation, relaxed_or_quick
from llmpq.planner.exact.search import OVERTIME_S, Search, solve_exact
from llmpq.planner.ilp import solve_ilp
from llmpq.planner.outcome import Assignment, Infeasible, Outcome, Stage
from llmpq.planner.pipeline_time import value
from llmpq.planner.problem import Problem

CHAIN_NOTE = "searched in part (each class's devices in a row); the bound holds for every plan"
CHAIN_GAP = 1e-3
"""The relaxation's bound is looser than this, so a closer search of the chains proves nothing."""


def solve_short_stages(p: Problem, start: float, deadline: float, gap: float) -> Outcome:
    """Search plans without long stages over all orders; bound the others by a relaxation."""
    found = _short_search(p, Space(p), deadline, gap)
    if found is None:
        return solve_grouped(p, start, deadline, gap)
    search, longest = found
    bound = search.run()
    if search.best is None:
        return solve_grouped(p, start, deadline, gap)
    forms = [make_form(p, *pair) for pair in p.pairs]
    late = deadline + OVERTIME_S
    beyond = min(_with_long_stage(p, form, longest, search.relaxation, late) for form in forms)
    note = "" if beyond >= bound else f"stages of more than {longest} layers were not searched"
    return search.outcome(min(bound, beyond), start, note)


def _short_search(
    p: Problem, space: Space, deadline: float, gap: float
) -> tuple[Search, int] | None:
    """Return a search with the longest stages its table has room for."""
    share = -(-p.num_layers // p.max_stages)
    for factor in (6, 4, 3, 2):
        longest = min(p.num_layers, max(4, factor * share))
        try:
            return Search(p, space, deadline, gap, longest=longest), longest
        except TooManyColumns:
            continue
    return None


def _with_long_stage(
    p: Problem, form: Form, longest: int, relaxation: ClassRelaxation, deadline: float
) -> float:
    """Bound of plans that have a stage of more than `longest` layers: P and D are at least its."""
    if longest >= p.num_layers:
        return math.inf
    x = form.numbers
    slow_p = (longest + 1) * float(x.prefill_s[0].min())
    slow_d = (longest + 1) * float(x.decode_s[0].min())
    return relaxed_or_quick(relaxation, form, deadline, Box(p_low=slow_p, d_low=slow_d))


def solve_chains(p: Problem, start: float, deadline: float, gap: float) -> Outcome:
    """Search chains of classes; bound by the relaxation over all plans."""
    best: Search | None = None
    relaxed = math.inf
    for sequence in _sequences(p):
        now = time.perf_counter()
        until = now + (deadline - now) / 4
        found = _short_search(p, ChainSpace(p, sequence), until, max(gap, CHAIN_GAP))
        if found is None:
            continue
        part, _ = found
        if best is not None and best.best is not None:
            part.offer(best.best)
        part.run()
        relaxed = min(relaxed, part.relaxed)
        if best is None or part.value < best.value:
            best = part
    if best is None or best.best is None:
        return solve_grouped(p, start, deadline, gap)
    return best.outcome(min(relaxed, best.value), start, CHAIN_NOTE)


def _sequences(p: Problem) -> list[Sequence[int]]:
    """Two sequences of classes: by speed, fast first and slow first."""
    x = p.numbers(*p.pairs[0])
    speed = sorted(range(len(p.classes)), key=lambda c: float(x.decode_s[0, c].min()))
    return [speed, speed[::-1]]


def solve_grouped(p: Problem, start: float, deadline: float, gap: float) -> Outcome:
    """Let neighbouring layers share a choice; bound by the relaxation of single layers."""
    relaxation = ClassRelaxation(p)
    bound = min(relaxed_or_quick(relaxation, make_form(p, *pair), deadline) for pair in p.pairs)
    for size in (2, 3, 4, 6, 8):
        if p.group > 1 or p.spec.num_layers % size:
            continue
        left = max(1.0, deadline - time.perf_counter())
        try:
            found = solve_exact(p.with_changes(group=size), time_limit_s=left, gap=gap)
        except Infeasible:
            continue
        a = _ungrouped(found.assignment, size)
        worth = value(p, a)
        return Outcome(
            method="exact",
            status="feasible",
            assignment=a,
            value=worth,
            bound=min(bound, worth),
            seconds=time.perf_counter() - start,
            note=f"searched in part (groups of {size} layers); the bound holds for every plan",
        )
    left = max(1.0, deadline - time.perf_counter())
    return solve_ilp(p, time_limit_s=left, gap=gap)


def _ungrouped(a: Assignment, size: int) -> Assignment:
    stages = tuple(
        Stage(
            cls=s.cls,
            start=s.start * size,
            end=s.end * size,
            choices=tuple(b for b in s.choices for _ in range(size)),
        )
        for s in a.stages
    )
    return Assignment(
        prefill_microbatch=a.prefill_microbatch,
        decode_microbatch=a.decode_microbatch,
        stages=stages,
    )
