"""The device orders a pipeline can have: arrangements of any sub-multiset of the classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmpq.planner.problem.problem import Problem


def device_orders(p: Problem) -> Iterator[tuple[int, ...]]:
    """Yield each sequence of classes with at most the devices there are, longest first.

    Equal devices are not told apart. A pinned device is in every order.
    """
    counts = [cls.count for cls in p.classes]
    required = {index for index, cls in enumerate(p.classes) if cls.pinned is not None}
    for length in range(p.max_stages, 0, -1):
        for order in _arrange(counts, length):
            if required <= set(order):
                yield order


def _arrange(counts: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    if length == 0:
        yield ()
        return
    for index, count in enumerate(counts):
        if count:
            rest = [c - (k == index) for k, c in enumerate(counts)]
            for tail in _arrange(rest, length - 1):
                yield (index, *tail)
