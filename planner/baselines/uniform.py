"""Plans that people make without a solver: the `uniform` baseline.

One precision for all layers and an even split over all devices in the order given, at the highest
precision that fits, and then the micro-batches that are fastest (the paper's own code kept the last
feasible one, which is up to 30 % slower).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from llmpq.planner.evaluate.fits import fitting, spare_bytes
from llmpq.planner.evaluate.objective import job_time, value
from llmpq.planner.problem.outcome import (
    BUDGET_ROUNDING,
    Assignment,
    Infeasible,
    Outcome,
    Stage,
    Unfinished,
)
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import Timer, now_s
from llmpq.units import format_size


def solve_uniform(
    p: Problem, *, time_limit_s: float = math.inf, budget: float | None = None
) -> Outcome:
    """Return the even split at the highest precision that fits, with its fastest micro-batches.

    With a `budget` of the sum of omega, at the precision within it that is the fastest.
    """
    timer, deadline = Timer(), now_s() + time_limit_s
    order = [index for index, cls in enumerate(p.classes) for _ in cls.devices][: p.max_stages]
    found: list[Assignment] = []
    for b in by_precision(p, budget):
        if not found or budget is not None:
            found += fitting(p, _even(p, order, b), deadline)
    if best := fastest_of("uniform", p, found, timer, time_limit_s):
        return best
    least = by_precision(p, budget)[-1]
    raise Infeasible(
        f"uniform: an even split of {p.spec.num_layers} layers over {len(order)} devices does not "
        f"fit at {p.choices[least].value}: {_shortage(p, order, least)}; use --method exact"
    )


def fastest_of(
    method: str, p: Problem, found: Sequence[Assignment], timer: Timer, time_limit_s: float
) -> Outcome | None:
    """Return the fastest of a baseline's plans; None where none fits, `Unfinished` out of time."""
    if not found and timer.work_s > time_limit_s:
        raise Unfinished(f"{method}: no plan within {time_limit_s:g} s; give a longer --time-limit")
    if not found:
        return None
    best = min(found, key=lambda a: job_time(p, a).total_s)
    return Outcome(
        method=method,
        status="baseline",
        assignment=best,
        value=value(p, best),
        bound=None,
        seconds=timer.seconds,
    )


def _shortage(p: Problem, order: Sequence[int], b: int) -> str:
    """`T4-0 is short by 1.3 GiB` where the even split that is nearest to fitting lacks most."""
    smallest = next(_even(p, order, b))  # larger micro-batches leave no more room
    spare = [spare_bytes(p, smallest, position) for position in range(len(order))]
    if min(spare) >= 0:
        return "a --pin forbids it"
    devices = [device for cls in p.classes for device in cls.devices]
    return f"{devices[spare.index(min(spare))].name} is short by {format_size(-min(spare))}"


def by_precision(p: Problem, budget: float | None = None) -> list[int]:
    """Return the choices that all layers may have, from the most bits to the fewest.

    With a `budget`, those whose sum of omega is within it.
    """
    bits = [(c.weight_bits, c.activation_bits) for c in p.choices]
    common = [b for b in range(len(p.choices)) if p.open[:, b].all()]
    if not common:
        raise Infeasible(
            f"no precision is one that all layers of {p.spec.name} are stored at, which methods "
            "of one precision need; use --method exact"
        )
    losses = {b: float(p.omega[:, b].sum()) for b in common}
    within = [b for b in common if budget is None or losses[b] <= budget * (1 + BUDGET_ROUNDING)]
    if not within:
        raise Infeasible(
            f"no precision that all layers may have loses at most {budget:g}: the least is "
            f"{min(losses.values()):.6g}; give a larger --quality-budget, or use --method exact"
        )
    return sorted(within, key=lambda b: bits[b], reverse=True)


def _even(p: Problem, order: Sequence[int], b: int) -> Iterator[Assignment]:
    count, total = len(order), p.num_layers
    bounds = p.nearest_cuts([total * j // count for j in range(count + 1)])
    stages = tuple(
        Stage(cls=cls, start=low, end=high, choices=(b,) * (high - low))
        for cls, low, high in zip(order, bounds, bounds[1:], strict=False)
    )
    for eta, xi in p.pairs:
        yield Assignment(prefill_microbatch=eta, decode_microbatch=xi, stages=stages)
