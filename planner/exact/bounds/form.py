"""The objective of one pair of micro-batch sizes, as coefficients.

    F = A P + Bd D + sum tp + wS S + theta sum omega + Z max(md D, S + rd) + constants

makespan: wS = 1, Z = n-2, hops inside the sums; with md = 1 the maximum is S + rd, so it moves into
wS. paper (eq. 4): wS = n-1, Z = 0, Bd = (n-1)(md-1), hops bound P and D only.
For any kappa in [0, 1], max(md D, S) >= kappa md D + (1-kappa) S: each kappa gives a linear lower
bound of F, and F is the larger of those of kappa = 0 and kappa = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmpq.planner.problem.numbers import PairNumbers
from llmpq.planner.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Form:
    """Coefficients of F for one pair."""

    numbers: PairNumbers
    a: float
    """A, of the slowest prefill stage."""
    bd: float
    """Bd, of the slowest decode stage outside the maximum."""
    ws: float
    """wS, of the sum of decode times outside the maximum."""
    z: float
    """Z, of max(md D, S + rd); zero when F is linear."""
    md: int
    back: float
    """Of the decode hop back, where F is linear but tokens still travel back."""
    hops_in_sums: bool
    first_back: bool
    """Whether the first tokens travel back: their hop bounds P."""
    back_bounds: bool
    """Whether the hop back bounds D."""

    def d_weight(self, kappa: float) -> float:
        """Coefficient of D in the linear bound of kappa."""
        return self.bd + kappa * self.z * self.md

    def s_weight(self, kappa: float) -> float:
        """Coefficient of S in the linear bound of kappa."""
        return self.ws + (1 - kappa) * self.z


@dataclass(frozen=True, kw_only=True)
class Box:
    """A range of P and D in seconds: what a part of the search may assume of the slowest stages."""

    p_low: float = 0.0
    p_high: float = math.inf
    d_low: float = 0.0
    d_high: float = math.inf
    island: int | None = None
    """The island on which plans stay (planner/exact/bounds/islands.py)."""
    fewest: int = 1
    """Smallest number of stages."""
    most: int | None = None
    """Largest number of stages, None for any."""
    hops_prefill_s: float = 0.0
    """What all hops of prefill take together at least."""
    hops_decode_s: float = 0.0

    def with_limits(self, limits: dict[str, float]) -> Box:
        """Return the box with some limits of P and D replaced."""
        return replace(self, **limits)  # type: ignore[arg-type]


EVERYWHERE = Box()


def make_form(p: Problem, eta: int, xi: int) -> Form:
    """Return the coefficients of a pair."""
    mp, md = p.counts(eta, xi)
    n = p.workload.gen_len
    numbers = p.numbers(eta, xi)
    if p.objective == "paper":
        return Form(
            numbers=numbers,
            a=mp - 1.0,
            bd=(n - 1.0) * (md - 1),
            ws=n - 1.0,
            z=0.0,
            md=md,
            back=0.0,
            hops_in_sums=False,
            first_back=False,
            back_bounds=False,
        )
    later = max(0.0, n - 2.0)
    linear = md == 1 or later == 0
    return Form(
        numbers=numbers,
        a=mp - 1.0,
        bd=(md - 1.0) if n > 1 else 0.0,
        ws=(1.0 + (later if md == 1 else 0.0)) if n > 1 else 0.0,
        z=0.0 if linear else later,
        md=md,
        back=later if md == 1 else 0.0,
        hops_in_sums=True,
        first_back=n > 1,
        back_bounds=n > 2,
    )
