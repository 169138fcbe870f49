"""A mixed-integer linear program with names, small enough to read and to hand to any backend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """lower <= sum coefficient * variable <= upper."""

    name: str
    terms: tuple[tuple[int, float], ...]
    lower: float
    upper: float


@dataclass(kw_only=True)
class LinearModel:
    """Variables and rows, in the order they were added; minimises the sum of costs."""

    names: list[str] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    binary: list[bool] = field(default_factory=list)
    rows: list[Constraint] = field(default_factory=list)
    constant: float = 0.0

    def variable(self, name: str, *, cost: float = 0.0, binary: bool = False) -> int:
        """Add a variable >= 0 (0 or 1 if binary) and return its index."""
        self.names.append(name)
        self.costs.append(cost)
        self.uppers.append(1.0 if binary else math.inf)
        self.binary.append(binary)
        return len(self.names) - 1

    def fix(self, variable: int, value: float) -> None:
        """Fix a binary variable to zero."""
        assert value == 0.0, "only zero is needed"
        self.uppers[variable] = 0.0

    def at_most(self, name: str, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Add sum <= bound."""
        self.rows.append(Constraint(name=name, terms=tuple(terms), lower=-math.inf, upper=bound))

    def at_least(self, name: str, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Add sum >= bound."""
        self.rows.append(Constraint(name=name, terms=tuple(terms), lower=bound, upper=math.inf))

    def equal(self, name: str, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Add sum == bound."""
        self.rows.append(Constraint(name=name, terms=tuple(terms), lower=bound, upper=bound))
