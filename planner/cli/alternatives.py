"""What stands beside a plan: other bits, several engines, and the devices that are left out.

The next better and the next faster choice of bits are plans of one precision for all layers, as
people think of them. Several engines are equal shares of the devices, each with its share of the
batch: one of them is planned. Each alternative is solved, to one percent, and its rate is what that
plan is predicted to give.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

from llmpq.errors import DoesNotFitError
from llmpq.planner.answer import Answer, solved
from llmpq.planner.cli.speeds import Speed
from llmpq.planner.cli.what_if import share_of
from llmpq.planner.evaluate.objective import sum_omega
from llmpq.planner.evaluate.step_by_step import reported_time
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
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


def engines_line(best: Answer, request: PlanRequest, options: SolveOptions) -> list[str]:
    """Return what several engines would give, each on an equal share of the devices.

    Nothing where none are faster at no more quality loss, by more than the gap.
    """
    p, predicted = best.problem, best.plan.predicted
    assert predicted is not None, "the planner always predicts"
    shares = math.gcd(*(cls.count for cls in p.classes))
    if shares < 2 or request.pin:
        return []
    found: list[tuple[float, int, Problem]] = []
    for engines in range(2, min(shares, p.workload.batch) + 1):
        if shares % engines:
            continue
        batch = -(-p.workload.batch // engines)
        asked = replace(
            request,
            batch=batch,
            prefill_microbatch=_at_most(request.prefill_microbatch, batch),
            decode_microbatch=_at_most(request.decode_microbatch, batch),
        )
        one, _, _ = make_problem(asked, share_of(p, engines))
        how = replace(_quickly(options), budget=predicted.sum_omega)
        with suppress(DoesNotFitError):
            priced, outcome = solved(one, how)
            found.append(
                (_rate(p, reported_time(priced, outcome.assignment).total_s), engines, one)
            )
    rate, engines, one = max(found, key=lambda each: each[0], default=(0.0, 0, p))
    if rate <= predicted.output_tokens_per_s * (1 + GAP):
        return []
    batch = one.workload.batch
    return [
        f"several engines: {engines}, each on {one.cluster.name} with {batch} requests at once: "
        f"{rate:.1f} instead of {predicted.output_tokens_per_s:.1f} tokens/s, no more "
        "quality loss; this plan is of one engine"
    ]


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


def _at_most(microbatch: int | None, batch: int) -> int | None:
    return None if microbatch is None else min(microbatch, batch)


def _rate(p: Problem, seconds: float) -> float:
    return p.workload.batch * p.workload.gen_len / seconds
