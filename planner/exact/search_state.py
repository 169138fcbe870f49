"""What a search has open: parts of the problem, and what is known of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmpq.planner.exact.bounds.completion import Completion
from llmpq.planner.exact.bounds.form import EVERYWHERE, Box, Form
from llmpq.planner.exact.bounds.relaxation import Prices
from llmpq.planner.problem.problem import Floats


@dataclass(kw_only=True)
class Part:
    """A pair of micro-batch sizes, all of it or a box of P and D, and what is known of it."""

    form: Form
    bound: float
    prices: Prices
    box: Box = EVERYWHERE
    depth: int = 0
    completions: list[Completion] = field(default_factory=list)
    window: int = 0


@dataclass(kw_only=True)
class Open:
    """What is left to search: parts, and pairs of which only a bound is known."""

    bounds: Floats
    """[I, E, X] by case."""
    solved: NDArray[np.bool_]
    """[I, E, X] whether a pair has its part."""
    heap: list[tuple[float, int, Part]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
