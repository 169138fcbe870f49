"""Whether an assignment fits memory, pins, device counts and what each layer may have.

And a plan that fits where one does: of the fewest bytes, without a search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, product

import numpy as np

from llmpq.planner.problem.numbers import small_chunks
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stage_memory import DENSE, MIXED, PACKED, sort_of_stage
from llmpq.planner.problem.work_clock import now_s, spend


def fits(p: Problem, a: Assignment) -> bool:
    """Whether every stage is allowed and has the memory."""
    spend(10 + p.num_layers)
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
        if number and now_s() > deadline:
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


def fitting_plan(p: Problem) -> tuple[Problem, Assignment] | None:
    """Return the job, with the chunks of prompts that it needs, and a plan of it that fits."""
    for of_size in in_each_chunk(p):
        found = least_bytes_plan(of_size)
        if found is not None:
            return of_size, found
    return None


def in_each_chunk(p: Problem) -> list[Problem]:
    """Return the job in its chunks of prompts, and in smaller ones, which mostly leave more room.

    Not always: a prompt of one chunk needs nothing of the cache's workspace.
    """
    smaller = small_chunks(p.workload.prompt_len)
    sizes = (p.chunk, *(size for size in smaller if size < p.chunk))
    return [p.with_changes(chunk=size) for size in sizes]


def longest_context(p: Problem, most: int) -> int:
    """Return the longest context at which a job fits, `most` at most; 0 where none does.

    Prompt and answer together: the last token of it is never cached.
    """
    base = p.prepared()
    return most if fits_context(base, most) else largest(partial(fits_context, base), most)


def fits_context(p: Problem, tokens: int) -> bool:
    """Whether a job fits with contexts of so many tokens, the answer's length as it is."""
    return fitting_plan(p.with_context(tokens)) is not None


def largest(fits: Callable[[int], bool], below: int) -> int:
    """Return the largest number under `below` that fits, 0 where none does; fewer fit better."""
    if below < 2 or not fits(1):
        return 0
    low, high = 1, below
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def least_bytes_plan(p: Problem) -> Assignment | None:
    """Return a plan of the fewest bytes, None where this way of filling stages finds none.

    Stages hold as many layers as they have room for, one after the other.
    """
    class_of = [index for index, cls in enumerate(p.classes) for _ in cls.devices]
    for choices in _least_choices(p):
        held = _layers_held(p, choices)
        for first, last in end_pairs(class_of):
            inner = [k for k in range(len(class_of)) if k not in (first, last)]
            inner = sorted(inner, key=lambda k: -held[class_of[k]])[: max(0, p.max_stages - 2)]
            inner.sort(key=lambda k: (p.classes[class_of[k]].pinned or (0, 0))[0])
            order = [class_of[k] for k in ([first] if first == last else [first, *inner, last])]
            found = _filled(p, choices, order) if len(order) <= p.max_stages else None
            if found is not None:
                return found
    return None


def _least_choices(p: Problem) -> Iterator[list[int]]:
    """Yield choices of all layers that take the fewest bytes, of each sort of weights.

    Where no choice is one that all layers may have, each layer has its own least.
    """
    sizes = p.all_layer_bytes
    common = [b for b in range(len(p.choices)) if p.open[:, b].all()]
    for packed in (True, False):
        some = [b for b in common if p.packed[b] == packed]
        if some:
            yield [min(some, key=lambda b: int(sizes[0, b]))] * p.num_layers
    if not common:
        own = np.where(p.open, sizes, np.iinfo(np.int64).max)
        yield [int(b) for b in own.argmin(axis=1)]


def _layers_held(p: Problem, choices: Sequence[int]) -> list[int]:
    """Return how many layers each class of devices holds between other stages, about."""
    sort = sort_of_stage(p.packed, choices)
    unit = max(int(p.all_layer_bytes[i, b]) for i, b in enumerate(choices))
    rooms = p.capacity(*smallest_microbatches(p))[:, 0, 0, sort]
    return [max(0, int(room) // unit) for room in rooms]


def _filled(p: Problem, choices: Sequence[int], order: Sequence[int]) -> Assignment | None:
    """Return the plan whose stages, of these classes in turn, hold all that they have room for."""
    eta, xi = smallest_microbatches(p)
    table, sizes = p.capacity(eta, xi), p.all_layer_bytes
    stages: list[Stage] = []
    start, total = 0, p.num_layers

    # Of the layers before each: their bytes, and how many of them are packed.
    taken = [0, *accumulate(int(sizes[i, b]) for i, b in enumerate(choices))]
    packed = [0, *accumulate(int(p.packed[b]) for b in choices)]

    def holds(cls: int, low: int, high: int, *, last: bool) -> bool:
        count = packed[high] - packed[low]
        sort = DENSE if count == 0 else PACKED if count == high - low else MIXED
        return taken[high] - taken[low] <= int(table[cls, int(low == 0), int(last), sort])

    final = order[-1]
    for cls in order[:-1]:
        if start and holds(final, start, total, last=True):
            break
        end = start
        while end < total - 1 and holds(cls, start, end + 1, last=False):
            end += 1
        if end > start:
            stages.append(Stage(cls=cls, start=start, end=end, choices=tuple(choices[start:end])))
            start = end
        elif not stages:
            return None
    if (len(order) > 1 and not stages) or not holds(final, start, total, last=True):
        return None
    stages.append(Stage(cls=final, start=start, end=total, choices=tuple(choices[start:])))
    if not all(p.allowed(stage.cls, stage.start, stage.end) for stage in stages):
        return None
    return Assignment(prefill_microbatch=eta, decode_microbatch=xi, stages=tuple(stages))


def smallest_microbatches(p: Problem) -> tuple[int, int]:
    """Return the micro-batch sizes that leave the most room: one, or what is fixed."""
    return p.prefill_microbatch or 1, p.decode_microbatch or 1


def end_pairs(class_of: list[int]) -> list[tuple[int, int]]:
    """Return which devices can be first and last stage, one pair of devices per pair of classes.

    A device that is both is the only stage, for which it may have more room than for either.
    """
    members: dict[int, list[int]] = {}
    for device, cls in enumerate(class_of):
        members.setdefault(cls, []).append(device)
    several = [
        (a[-1], b[-1] if a is not b else b[-2])
        for a, b in product(members.values(), repeat=2)
        if a is not b or len(a) > 1
    ]
    return several + [(a[-1], a[-1]) for a in members.values()]
