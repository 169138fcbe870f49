"""Which way to serve is taken, where each simulation of one costs time: what is simulated, and when
that is enough. Knows nothing of engines and simulators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Way = TypeVar("Way")
Variant = TypeVar("Variant")
FAR_BELOW = 0.85
"""Share of the rate of a steady state below which a rate that lasts says that the steady state, of
mean lengths, is of little use to choose the tokens of a step."""


def is_far_below(rate_per_s: float, steady_per_s: float) -> bool:
    """Whether a simulated rate is so far below that of the steady state that it says little."""
    return rate_per_s <= FAR_BELOW * steady_per_s


def best_variant(
    way: Way,
    variants: Iterable[Variant],
    simulated: Callable[[Variant, Way], Way | None],
    worth: Callable[[Way], Any],
) -> Way:
    """Return the best of a way and its variants: of other steps, of other requests at once.

    `simulated`: a variant, beside the best way so far; None where there is no such plan, or it is
    no better than that. A `TimeoutError` ends the search.
    """
    best = way
    for variant in variants:
        try:
            other = simulated(variant, best)
        except TimeoutError:
            break
        if other is not None and worth(other) > worth(best):
            best = other
    return best
