"""What stands beside a plan: other bits, and the devices that are left out.

The next better and the next faster choice of bits are plans of one precision for all layers, as
people think of them. Each alternative is solved, to one percent, and its rate is what that plan is
predicted to give.

Speeds are said in words that people compare. One request at a time is a chat: what counts is how
long its first token takes, and its rate from then on. Of several at once it is the tokens/s of all
of them, prompts included.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

from llmpq.errors import DoesNotFitError
from llmpq.planner.evaluate.objective import PhaseTimes, sum_omega
from llmpq.planner.evaluate.simulator import reported_time
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.answer import Answer, solved
from llmpq.planner.solving.methods import SolveOptions, anew
from llmpq.planner.solving.topology_search import TOPOLOGY_GAP
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.units import shown, shown_loss
from llmpq.workload import Workload

GAP = 0.01
"""Relative gap to which an alternative is solved."""
LONGEST_S = 2.0
"""Seconds it may take."""
PROVEN_GAP = TOPOLOGY_GAP * 1.01
"""Share that a plan may be better by, up to which it is said to be proven the best."""
SAME = 1e-6
"""Relative difference below which two sums of omega are taken as equal."""


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A plan's speed and quality loss."""

    speed: Speed
    omega: float


def bits_lines(
    best: Answer, options: SolveOptions, job: Problem, *, of_one: bool = False
) -> list[str]:
    """Return the next better and the next faster choice of bits, one line each.

    `job`: what was to be planned; the plan's own problem may have devices in groups, which a choice
    of more bits may not fit. `of_one`: say that they are of one pipeline, as several engines may be
    better.
    """
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
        line, _ = _line(best, options, job, max(better, key=lambda b: omegas[b]), own, of_one)
        lines.append(f"better quality: {line}")
    faster = [b for b in omegas if omegas[b] > own.omega * (1 + SAME)]
    for b in sorted(faster, key=lambda b: omegas[b]):
        line, found = _line(best, options, job, b, own, of_one)
        if found is not None and found.speed.total_s < own.speed.total_s / (1 + GAP):
            lines.append(f"faster: {line}")
            break
    return lines


def _line(
    best: Answer, options: SolveOptions, job: Problem, b: int, own: Rated, of_one: bool
) -> tuple[str, Rated | None]:
    """Return what one precision everywhere would give, and its plan's rate where one fits."""
    precision = best.problem.choices[b]
    how = _quickly(options)
    everywhere = f"{precision.title} everywhere"
    grouped = any(device.joined for device in best.problem.cluster.devices)
    for problem in (best.problem, job)[: 1 + grouped]:
        try:
            priced, outcome = solved(problem.with_changes(choices=(precision,), theta=0.0), how)
            break
        except DoesNotFitError:
            of_one = of_one or problem is not job
    else:
        return f"{everywhere} does not fit", None
    rated = Rated(
        speed=Speed.of(priced.workload, reported_time(priced, outcome.assignment)),
        omega=sum_omega(priced, outcome.assignment),
    )
    return (
        f"{everywhere}{' as one pipeline' * of_one}: {rated.speed.beside(own.speed)}, "
        f"quality loss {shown_loss(rated.omega)} instead of {shown_loss(own.omega)}",
        rated,
    )


def not_used(devices: Sequence[str], gap: float | None) -> list[str]:
    """Return which devices a plan leaves out, a line if any, and why as far as `gap` proves it."""
    proven = gap is not None and gap <= PROVEN_GAP
    why = "faster without" if proven else "nothing faster with them was found"
    return [f"left out, {why}: {', '.join(devices)}"] if devices else []


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
    own = replace(options, method="exact", prefer=None, budget=None, gap=max(GAP, options.gap))
    return anew(own, LONGEST_S)


ALIKE = 1e-3
"""Relative difference below which two numbers may round alike."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a plan does its job."""

    batch: int
    total_s: float
    first_token_s: float
    """Until the last request has its first token."""
    request_per_s: float | None
    """Tokens/s of one request while it decodes; None where the first token is the only one."""
    job_per_s: float
    """Tokens/s of the whole job, prompts included."""

    @classmethod
    def of(cls, work: Workload, times: PhaseTimes) -> Self:
        """Return the speed of a job that takes these times."""
        steps = work.gen_len - 1
        return cls(
            batch=work.batch,
            total_s=times.total_s,
            first_token_s=times.prefill_s,
            request_per_s=steps / times.decode_s if steps and times.decode_s else None,
            job_per_s=work.batch * work.gen_len / times.total_s,
        )

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        """Return what a plan predicts."""
        assert plan.predicted is not None, "the planner always predicts"
        found = plan.predicted
        times = PhaseTimes(prefill_s=found.prefill_s, decode_s=found.decode_s)
        return cls.of(plan.workload, times)

    @classmethod
    def of_found(cls, found: Plan | Topology) -> Self:
        """Return what a plan of one engine or of several predicts."""
        if isinstance(found, Plan):
            return cls.of_plan(found)
        assert found.predicted is not None, "the planner always predicts"
        first = [plan.predicted.prefill_s for plan in found.plans if plan.predicted is not None]
        return cls(
            batch=found.workload.batch,
            total_s=found.predicted.total_s,
            first_token_s=max(first),
            request_per_s=None,
            job_per_s=found.predicted.output_tokens_per_s,
        )

    def beside(self, other: Speed) -> str:
        """Return the speed and the other one: `22.4 instead of 17.1 tokens/s`."""
        if self.batch > 1 or self.request_per_s is None or other.request_per_s is None:
            return f"{_pair(self.job_per_s, other.job_per_s)} tokens/s"
        first = _pair(self.first_token_s, other.first_token_s)
        rate = _pair(self.request_per_s, other.request_per_s)
        return f"first token after {first} s, then {rate} tokens/s"

    @property
    def text(self) -> str:
        """Return the speed alone."""
        if self.batch > 1 or self.request_per_s is None:
            return f"{shown(self.job_per_s)} tokens/s"
        first, rate = shown(self.first_token_s), shown(self.request_per_s)
        return f"first token after {first} s, then {rate} tokens/s"


def _pair(new: float, old: float) -> str:
    """Return `new instead of old`, with more digits where they differ and round alike."""
    digits = 3
    while digits < 6 and shown(new, digits) == shown(old, digits) and abs(new - old) > ALIKE * old:
        digits += 1
    return f"{shown(new, digits)} instead of {shown(old, digits)}"


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """What a method found; `exact_s` is None where the exact method found nothing in time."""

    bits: str
    omega: float
    time_s: float
    tokens_per_s: float
    solved_in_s: float | None = None
    exact_s: float | None = None
