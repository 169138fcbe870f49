"""Why this plan: the bottleneck, what each stage waits for, and how sure the choice is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmpq.planner.cli.alternatives import not_used
from llmpq.planner.evaluate.fits import spare_bytes
from llmpq.planner.evaluate.objective import stage_times, value
from llmpq.planner.problem.outcome import Assignment, Outcome, Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.worker import plan_in_child
from llmpq.units import format_size


def explain_plan(p: Problem, a: Assignment, names: list[str], gap: float | None = 0.0) -> list[str]:
    """Return sentences: who bounds each phase, who waits how long, what limits the choice.

    `gap`: how far the plan may be from the best.
    """
    times = stage_times(p, a)
    mp, md = p.counts(a.prefill_microbatch, a.decode_microbatch)
    count = len(names)
    held_p, held_d = times.paces()
    steps = _batches(mp) if p.chunks_of_prompt == 1 else f"{mp} steps of chunks"
    lines = [_prefill_line(held_p[:count], held_p[count:], names, steps)]
    n = p.workload.gen_len
    if n > 1:
        once = sum(times.decode_s) + sum(times.hop_decode_s) + times.back_decode_s
        slowest = max(held_d)
        j = max(range(count), key=lambda k: held_d[k])
        full = md * slowest
        if full >= once:
            lines.append(
                f"decode is bound by {names[j]}: {_batches(md)} x {_ms(slowest)} = {_ms(full)} "
                f"per token of every request; a token's own way takes {_ms(once)}"
            )
        else:
            lines.append(
                f"decode is bound by a token's own way through {len(names)} stages, {_ms(once)}; "
                f"{_batches(md)} keep{'s' * (md == 1)} the slowest stage, {names[j]}, busy for "
                f"{_ms(full)} of it"
            )
        period = max(full, once)
        for k, name in enumerate(names):
            waits = 1 - md * held_d[k] / period
            whom = "its next token" if full < once else names[j]
            if waits > 0.01:
                lines.append(f"{name} waits {waits:.0%} of decode for {whom}")
    lines += _memory_lines(p, a, names)
    unused = [d.name for d in p.cluster.devices if d.name not in names]
    return lines + not_used(unused, gap)


def _prefill_line(
    stages: tuple[float, ...], hops: tuple[float, ...], names: list[str], steps: str
) -> str:
    j = max(range(len(names)), key=lambda k: stages[k])
    if hops and max(hops) > stages[j]:
        k = max(range(len(hops)), key=lambda i: hops[i])
        return (
            f"prefill is bound by the link {names[k]} -> {names[k + 1]}: {_ms(hops[k])} a message"
        )
    return f"prefill is bound by {names[j]}: {steps} x {_ms(stages[j])}"


def _memory_lines(p: Problem, a: Assignment, names: list[str]) -> list[str]:
    """Name the stages whose memory is what keeps them from more layers or bits."""
    x = p.numbers(a.prefill_microbatch, a.decode_microbatch)
    lines = []
    for j, name in enumerate(names):
        spare = spare_bytes(p, a, j)
        if spare < int(x.layer_bytes.min()):
            lines.append(f"{name} is full: {format_size(spare)} free, less than one more layer")
    return lines


NEAR = 0.9
"""Share of the slowest stage's time above which a stage is taken to be as slow."""


@dataclass(frozen=True, kw_only=True)
class Regret:
    """What a wrong cost of one device kind would cost."""

    kind: str
    factor: float
    loss: float
    """Relative loss of this plan against the best one under the changed costs."""


def cost_error_study(
    p: Problem,
    outcome: Outcome,
    *,
    budget: float | None = None,
    error: float = 0.1,
    time_limit_s: float = 5.0,
) -> list[Regret]:
    """Re-plan with each device kind slower and faster by `error`; compare with this plan.

    Under a budget of the sum of omega, plans are compared by their time only.
    """
    options = SolveOptions(time_limit_s=time_limit_s, gap=1e-3, budget=budget)
    p = p if budget is None else p.with_changes(theta=0.0)
    found = []
    for kind in sorted({d.profile_kind for d in p.cluster.devices}):
        for factor in (1 - error, 1 + error):
            scale = {**p.costs.scale, kind: p.costs.scale.get(kind, 1.0) * factor}
            changed = p.with_changes(costs=replace(p.costs, scale=scale))
            try:
                best = plan_in_child(changed, options).outcome
            except Unfinished:  # says nothing of this plan
                continue
            kept = value(changed, outcome.assignment)
            loss = max(0.0, kept / best.value - 1)
            found.append(Regret(kind=kind, factor=factor, loss=loss))
    return found


def is_balanced(p: Problem, a: Assignment) -> bool:
    """Whether stages of two kinds of device are planned to take about as long for prompts."""
    times = stage_times(p, a).paces()[0][: len(a.stages)]
    slowest = max(times)
    near = [s for s, taken in zip(a.stages, times, strict=True) if taken > NEAR * slowest]
    return len({p.classes[s.cls].first.profile_kind for s in near}) > 1


def regret_lines(study: list[Regret], *, balanced: bool = False) -> list[str]:
    """Return the study as sentences; `balanced`: which shares of the work decide."""
    if not study:
        return ["how much a cost error loses is not known: no plan was found in time"]
    worst = max(study, key=lambda r: r.loss)
    lines = [
        f"costs of {r.kind} x {r.factor:.2f}: this plan is {r.loss:.2%} above the best one"
        for r in study
    ]
    why = ": stages that are to take equally long wait for one that does not" if balanced else ""
    lines.append(
        f"a cost error of 10 % on one device kind loses at most {worst.loss:.2%} "
        f"({worst.kind}){why}"
    )
    return lines


def _batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
