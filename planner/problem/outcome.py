"""A solver's result: an assignment of layers to devices, and how good it is known to be.

Choices are indices into `Problem.choices`, classes into `Problem.classes`; layers count groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llmpq.errors import DoesNotFitError

OPTIMAL_GAP = 2e-6
"""Relative gap up to which a plan is called optimal; a looser proof is a bound."""
BUDGET_ROUNDING = 1e-9
"""Share of a budget by which a sum of omega may exceed it: sums round as their order is."""

Status = Literal["optimal", "feasible", "heuristic", "baseline"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: a class of device, the half-open range of groups, a choice for each."""

    cls: int
    start: int
    end: int
    choices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A complete plan in the solver's numbers."""

    prefill_microbatch: int
    decode_microbatch: int
    stages: tuple[Stage, ...]

    @property
    def choices(self) -> tuple[int, ...]:
        """The choice of every group, in order."""
        return tuple(b for stage in self.stages for b in stage.choices)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A solver's answer; `bound` is a proven lower bound of the objective, None if it has none."""

    method: str
    status: Status
    assignment: Assignment
    value: float
    bound: float | None
    seconds: float
    version: str = ""
    note: str = ""
    work_s: float = 0.0
    """Of the whole search, by the clock that counts its work (planner/problem/work_clock.py)."""

    @property
    def gap(self) -> float | None:
        """How far the value is above the bound, relative to it; None where it says nothing."""
        if self.bound is None:
            return None
        above = max(0.0, self.value - self.bound)
        if self.bound <= 0.0:
            return None if above else 0.0
        return above / self.bound


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """What is known of a problem before it is solved."""

    ceiling: float = math.inf
    """Value of a plan of another problem: plans that are not below it need not be found."""
    enough: float = -math.inf
    """The search ends, without a bound, once it has a plan below this value."""
    known: Assignment | None = None
    """A plan to start from, which need not fit."""
    resumed: bool = False
    """Whether the exact method has looked for good first plans of the problem before."""


COLD = WarmStart()
"""Nothing is known."""


class Infeasible(DoesNotFitError):
    """No plan fits; the command explains it with `planner/check/refusal.py`.

    `least`: the sum of omega that a budget would have to be, where that is why.
    """

    def __init__(self, message: str, least: float = math.inf) -> None:
        super().__init__(message)
        self.least = least


class Unfinished(Infeasible):
    """No plan was found in the time given; there may be one, not below `bound`."""

    def __init__(self, message: str, bound: float = -math.inf) -> None:
        super().__init__(message)
        self.bound = bound
