"""What stands beside a plan: other bits, and the devices that are left out.

The next better and the next faster choice of bits are plans of one precision for all layers, as
people think of them. Each alternative is solved, to one percent, and its rate is what that plan is
predicted to give.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from llmpq.errors import DoesNotFitError
from llmpq.planner.answer import Answer, solved
from llmpq.planner.cli.speeds import Speed
from llmpq.planner.evaluate.objective import sum_omega
from llmpq.planner.evaluate.step_by_step import reported_time
from llmpq.planner.solving.methods import SolveOptions

GAP = 0.01
"""Relative gap to which an alternative is solved."""
LONGEST_S = 2.0
"""Seconds it may take."""
SAME = 1e-6
"""Relative difference below which two sums of omega are taken as equal."""


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A plan's speed and quality loss."""

    speed: Speed
    omega: float


def bits_lines(best: Answer, options: SolveOptions) -> list[str]:
    """Return the next better and the next faster choice of bits, one line each."""
    p, a = best.problem, best.outcome.assignment
    predicted = best.plan.predicted
    assert predicted is not None, "the planner always predicts"
    own = Rated(speed=Speed.of_plan(best.plan), omega=predicted.sum_omega)
    omegas = {
        b: float(p.omega[:, b].sum())
        for b in range(len(p.choices))
        if p.open[:, b].all() and any(b != choice for choice in a.choices)
    }
    lines = []
    better = [b for b in omegas if omegas[b] < own.omega * (1 - SAME)]
    if better:
        line, _ = _line(best, options, max(better, key=lambda b: omegas[b]), own)
        lines.append(f"better quality: {line}")
    faster = [b for b in omegas if omegas[b] > own.omega * (1 + SAME)]
    for b in sorted(faster, key=lambda b: omegas[b]):
        line, found = _line(best, options, b, own)
        if found is not None and found.speed.total_s < own.speed.total_s / (1 + GAP):
            lines.append(f"faster: {line}")
            break
    return lines


def _line(best: Answer, options: SolveOptions, b: int, own: Rated) -> tuple[str, Rated | None]:
    """Return what one precision everywhere would give, and its plan's rate where one fits."""
    precision = best.problem.choices[b]
    problem = best.problem.with_changes(choices=(precision,), theta=0.0)
    how = _quickly(options)
    everywhere = f"{precision.title} everywhere"
    try:
        priced, outcome = solved(problem, how)
    except DoesNotFitError:
        return f"{everywhere} does not fit", None
    rated = Rated(
        speed=Speed.of(priced.workload, reported_time(priced, outcome.assignment)),
        omega=sum_omega(priced, outcome.assignment),
    )
    return (
        f"{everywhere}: {rated.speed.beside(own.speed)}, "
        f"quality loss {rated.omega:.4g} instead of {own.omega:.4g}",
        rated,
    )


def left_out_lines(best: Answer, options: SolveOptions) -> list[str]:
    """Return what a plan would take that uses a device which this one leaves out, a kind a line."""
    p, used = best.problem, {stage.device for stage in best.plan.stages}
    predicted = best.plan.predicted
    assert predicted is not None, "the planner always predicts"
    lines = []
    for cls in p.classes:
        if any(d.name in used for d in cls.devices) or len(used) >= p.max_stages:
            continue
        name, layers = cls.first.name, p.spec.num_layers
        times = []
        for pin in ((0, 1), (layers - 1, layers)):
            with suppress(DoesNotFitError):
                priced, outcome = solved(
                    p.with_changes(pins={**p.pins, name: pin}),
                    replace(_quickly(options), budget=options.budget),
                )
                times.append(reported_time(priced, outcome.assignment).total_s)
        if times:
            longer = min(times) / predicted.total_s - 1
            lines.append(
                f"with a layer on {name} as well: {min(times):.3f} s instead of "
                f"{predicted.total_s:.3f} s ({longer:+.1%})"
            )
    return lines


def _quickly(options: SolveOptions) -> SolveOptions:
    return replace(
        options,
        method="exact",
        prefer=None,
        budget=None,
        gap=max(GAP, options.gap),
        time_limit_s=min(LONGEST_S, options.time_limit_s),
    )
