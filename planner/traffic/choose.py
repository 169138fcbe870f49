"""Which way to serve is taken, where each simulation of one costs time: what is simulated, and when
that is enough. Knows nothing of engines and simulators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Way = TypeVar("Way")
FAR_BELOW = 0.85
"""Share of the rate of a steady state below which a rate that lasts says that the steady state, of
mean lengths, is of little use to choose the tokens of a step."""


def is_far_below(rate_per_s: float, steady_per_s: float) -> bool:
    """Whether a simulated rate is so far below that of the steady state that it says little."""
    return rate_per_s <= FAR_BELOW * steady_per_s


def best_variant(
    way: Way,
    sizes: Iterable[int],
    simulated: Callable[[int, Way], Way | None],
    worth: Callable[[Way], Any],
) -> Way:
    """Return the best of a way and of the same with other sizes: of steps, of requests at once.

    `simulated`: the way with a size, beside the best so far; None where there is no such plan, or
    it is no better than that. A `TimeoutError` ends the search.
    """
    best = way
    for size in sizes:
        try:
            other = simulated(size, best)
        except TimeoutError:
            break
        if other is not None and worth(other) > worth(best):
            best = other
    return best


def best_under_all(
    by_few: Sequence[Way],
    under_all: Callable[[Way], Way],
    worth: Callable[[Way], Any],
    has_time: Callable[[], bool],
) -> tuple[Way, Way]:
    """Return the way that serves all requests best, as it serves few of them, and all.

    `by_few`: ways as they serve few requests, the best first; `under_all`: one as it serves all.
    Of few requests within narrow limits a rate says little, so ways are simulated under all, in
    this order, until the next is no better by the few than the best is by all.
    """
    few, best = by_few[0], under_all(by_few[0])
    for way in by_few[1:]:
        if worth(way) <= worth(best) or not has_time():
            break
        whole = under_all(way)
        if worth(whole) > worth(best):
            few, best = way, whole
    return few, best
