"""What stands beside a plan: the next better and the next faster choice of bits.

Both are plans of one precision for all layers, as people think of them; each is solved, to one
percent, and its rate is what that plan is predicted to give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmpq.errors import DoesNotFitError
from llmpq.planner.answer import Answer, Wish, solved
from llmpq.planner.formulation.problem import Problem
from llmpq.planner.predict.pipeline_time import sum_omega
from llmpq.planner.predict.step_by_step import told_time

GAP = 0.01
"""Relative gap to which an alternative is solved."""
LONGEST_S = 2.0
"""Seconds it may take."""
SAME = 1e-6
"""Relative difference below which two sums of omega are taken as equal."""


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A plan's rate and quality loss."""

    tokens_per_s: float
    omega: float


def bits_lines(best: Answer, wish: Wish) -> list[str]:
    """Return the next better and the next faster choice of bits, one line each."""
    p, a = best.problem, best.outcome.assignment
    predicted = best.plan.predicted
    assert predicted is not None, "the planner always predicts"
    own = Rated(tokens_per_s=predicted.output_tokens_per_s, omega=predicted.sum_omega)
    omegas = {
        b: float(p.omega[:, b].sum())
        for b in range(len(p.choices))
        if p.open[:, b].all() and any(b != choice for choice in a.choices)
    }
    lines = []
    better = [b for b in omegas if omegas[b] < own.omega * (1 - SAME)]
    if better:
        line, _ = _line(best, wish, max(better, key=lambda b: omegas[b]), own)
        lines.append(f"better quality: {line}")
    faster = [b for b in omegas if omegas[b] > own.omega * (1 + SAME)]
    for b in sorted(faster, key=lambda b: omegas[b]):
        line, found = _line(best, wish, b, own)
        if found is not None and found.tokens_per_s > own.tokens_per_s * (1 + GAP):
            lines.append(f"faster: {line}")
            break
    return lines


def _line(best: Answer, wish: Wish, b: int, own: Rated) -> tuple[str, Rated | None]:
    """Return what one precision everywhere would give, and its plan's rate where one fits."""
    precision = best.problem.choices[b]
    problem = best.problem.with_changes(choices=(precision,), theta=0.0)
    how = replace(
        wish,
        method="exact",
        prefer=None,
        budget=None,
        gap=max(GAP, wish.gap),
        time_limit_s=min(LONGEST_S, wish.time_limit_s),
    )
    everywhere = f"{precision.title} everywhere"
    try:
        priced, outcome = solved(problem, how)
    except DoesNotFitError:
        return f"{everywhere} does not fit", None
    rated = Rated(
        tokens_per_s=_rate(priced, told_time(priced, outcome.assignment).total_s),
        omega=sum_omega(priced, outcome.assignment),
    )
    return (
        f"{everywhere}: {rated.tokens_per_s:.1f} instead of {own.tokens_per_s:.1f} tokens/s, "
        f"quality loss {rated.omega:.4g} instead of {own.omega:.4g}",
        rated,
    )


def _rate(p: Problem, seconds: float) -> float:
    return p.workload.batch * p.workload.gen_len / seconds
