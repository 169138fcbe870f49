"""The highest rate of a traffic that engines keep within limits, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property

from llmpq.planner.evaluate.engine_simulation import EngineModel, simulate
from llmpq.planner.problem.work_clock import now_s, spend_s
from llmpq.service_measures import ATTAINMENT, ServedRequest, ServiceLimits, ServiceMeasures
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.traffic import BLOCK_OF_TRACE, Arrival, at_rate, repeated

MAY_MISS = 1 - ATTAINMENT
"""Share of the requests that may be beyond the limits at a rate that is kept."""
RATE_STEP = 0.05
"""Relative distance of the rates that are tried: all are powers of the same number, so that engines
have the same rate wherever the search for it began."""
MOST_TRIES = 18
"""Rates that are simulated at most."""
FARTHEST = 56
"""Steps from one rate to the next at most: 0.06 times as much."""
LEAST_SHARE = 3e-3
"""What a smaller share of requests beyond the limits counts as."""
STEP_S = 2e-4
"""Seconds of work of a simulated step (0.22 ms of a core, 2026-11)."""
GENERATIONS = 3
"""Requests by which a rate is found, in those that run at once: fewer show no queue."""

Tried = tuple[float, float]
"""The number of a rate, and the share of the requests that is beyond the limits at it."""


@dataclass(frozen=True, kw_only=True)
class RateFound:
    """The highest rate that was seen within the limits, and how requests are served at it."""

    rate_per_s: float
    """0 where not even requests far apart are within the limits, or no rate of interest lasts."""
    measure: Callable[[], ServiceMeasures]
    """Simulates the traffic, as long as it is, at the rate; where none lasts at the last tried."""
    cut: bool = False
    """Whether the time was over before higher rates had been tried."""

    @cached_property
    def measures(self) -> ServiceMeasures:
        """How requests are served."""
        return self.measure()


APART = 1e-4
"""Of a rate: requests at it are alone."""


def kept_apart(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    rate_per_s: float,
    *,
    settling: int = 0,
    deadline_s: float = math.inf,
) -> bool:
    """Whether requests are within the limits where each is served alone; if not, at no rate.

    `settling`: how many of the first do not count.
    """
    far = at_rate(traffic, APART * rate_per_s)
    return lasts(missed_share(models, far, limits, settling, deadline_s))


def lasts(missed: float) -> bool:
    """Whether a rate at which such a share of the requests is beyond the limits is kept."""
    return missed <= MAY_MISS + 1e-9


def too_late_alone(
    models: Sequence[EngineModel], traffic: Sequence[Arrival], limits: ServiceLimits
) -> bool:
    """Whether more first tokens are late than may be, though each request is served alone.

    Longer prompts take longer: it is so if the shortest of the longest prompts, one more than may
    be late, is. What a prefix cache may have of a prompt is left out, and whatever reads it.
    """
    if limits.ttft_s is None:
        return False
    longest_first = sorted(uncached_prompts(traffic), reverse=True)
    may_be_late = int((1 - ATTAINMENT) * len(traffic) + 1e-9)
    tokens = longest_first[min(may_be_late, len(traffic) - 1)]
    alone = measured_at(models, [Arrival(0.0, tokens, 1)], limits)
    return alone.ttft_s.mean > limits.ttft_s


def uncached_prompts(traffic: Sequence[Arrival]) -> list[int]:
    """Return the tokens of each prompt that no prefix cache has of those before; at least 1."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for one in traffic:
        prefixes = [one.blocks[: n + 1] for n in range(len(one.blocks))]
        hits = sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
        found.append(max(1, one.prompt_tokens - hits * BLOCK_OF_TRACE))
    return found


def measured_at(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    rate_per_s: float | None = None,
    *,
    deadline_s: float = math.inf,
) -> ServiceMeasures:
    """Return how engines serve a traffic, at another rate than its own if one is given."""
    moved = traffic if rate_per_s is None else at_rate(traffic, rate_per_s)
    return ServiceMeasures.of(simulate(models, moved, late=_late_after(deadline_s)), limits)


def requests_at_once(models: Sequence[EngineModel], traffic: Sequence[Arrival]) -> int:
    """Return how many requests of a traffic engines run at once: by their rows, by their pools."""
    mean = sum(one.prompt_tokens + one.output_tokens for one in traffic) / len(traffic)
    pools = (one.limits.num_blocks * BLOCK_TOKENS / mean for one in models)
    return sum(
        max(1, min(one.limits.max_rows, int(room))) for one, room in zip(models, pools, strict=True)
    )


def highest_rate(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    *,
    guess_per_s: float | None = None,
    above_per_s: float = 0.0,
    deadline_s: float = math.inf,
) -> RateFound:
    """Return the highest rate at which `ATTAINMENT` of the requests are within the limits.

    Without limits it is the rate at which requests end that all arrive at once. With limits it is
    a rate that lasts: a traffic that ends before engines are full says nothing of it, so it is
    repeated to `GENERATIONS` times the requests that run at once, of which the first are left out,
    and no rate counts that is above the one at which requests end in full engines. Looked for from
    `guess_per_s` on, a guess of that highest rate, or from just above `above_per_s`, if only rates
    above that are of interest. `deadline_s`: of the clock of searches, from when on the best rate
    so far is returned, or `TimeoutError` is raised where none was found.
    """
    if limits.ttft_s is None and limits.tpot_s is None:
        at_once = measured_at(models, traffic, limits, math.inf, deadline_s=deadline_s)
        return RateFound(rate_per_s=at_once.requests_per_s, measure=lambda: at_once)
    if too_late_alone(models, traffic, limits):
        return RateFound(
            rate_per_s=0.0, measure=lambda: measured_at(models, traffic, limits, guess_per_s)
        )
    running = requests_at_once(models, traffic)
    long = repeated(traffic, GENERATIONS * running)

    cut = False

    @cache
    def missed(rate: float) -> float:
        nonlocal cut
        try:
            return missed_share(models, at_rate(long, rate), limits, running, deadline_s)
        except TimeoutError:
            cut = True
            raise

    def apart(rate: float) -> bool:
        return kept_apart(models, long, limits, rate, settling=running, deadline_s=deadline_s)

    none = RateFound(
        rate_per_s=0.0,
        measure=lambda: measured_at(models, traffic, limits, above_per_s or guess_per_s),
    )
    above = rate_of_number(rate_number(above_per_s) + 1) if above_per_s else 0.0
    if above:
        if not lasts(missed(above)):
            return none
    elif guess_per_s is not None and not apart(guess_per_s):
        return none
    most = _full_rate(models, long, running, deadline_s)
    if above > most:
        return none
    first = above or min(most, guess_per_s or most)
    if not above and guess_per_s is None and not apart(first):
        return none
    low, rate = highest_lasting(missed, first=first, most=most)
    return RateFound(
        rate_per_s=low, measure=lambda: measured_at(models, traffic, limits, rate), cut=cut
    )


def highest_lasting(
    missed: Callable[[float], float], *, first: float, most: float
) -> tuple[float, float]:
    """Return the highest rate that lasts and itself, or 0 and the last tried where none was found.

    `missed`: the share of requests beyond the limits at a rate. Of rates that are RATE_STEP apart,
    from near `first` on (`_next_number`); none above `most` is tried. A `TimeoutError` ends the
    search if there is a rate by then.
    """
    top = rate_number(most)
    at, high = min(top, rate_number(first)), top + 1
    low: int | None = None
    tried: dict[int, float] = {}
    for _ in range(MOST_TRIES):
        try:
            tried[at] = max(missed(rate_of_number(at)), LEAST_SHARE)
        except TimeoutError:
            if low is not None:
                break
            raise
        low, high = (at, high) if lasts(tried[at]) else (low, at)
        if low is not None and high - low == 1:
            break
        at = min(_next_number(tried, low, high), top)
    if low is None:
        return 0.0, rate_of_number(at)
    return rate_of_number(low), rate_of_number(low)


def _next_number(tried: Mapping[int, float], low: int | None, high: int) -> int:
    """Return the number of the rate to try after others, of which it is to be above `low` alone.

    A straight line of the logarithms of rate and share through the last two says where as many miss
    the limits as may be. Where both last, or both do not, it leads from the last one on, at most
    twice as far as from one to the other; with rates on either side the middle is as good then.
    """
    (at, share), others = list(tried.items())[-1], list(tried.items())[:-1]
    below, before = lasts(share), others[-1] if others else None
    alike = before is not None and lasts(before[1]) is below
    if low is not None and high in tried:
        line = _line((low, tried[low]), (high, tried[high]), MAY_MISS)
        part = 0.5 if alike else min(0.75, max(0.25, (line - low) / (high - low)))
        return min(high - 1, max(low + 1, round(low + part * (high - low))))
    if before is None:
        step = abs(math.log(share / MAY_MISS) * (0.25 if below else 0.5) / math.log(1 - RATE_STEP))
    else:
        aim = MAY_MISS * (1.05 if below else 0.95)
        rises = share > before[1] if below else share < before[1]
        most = 2 * abs(at - before[0])
        step = min(most, abs(_line(before, (at, share), aim) - at)) if rises else most
    return at + (1 if below else -1) * min(FARTHEST, max(1, round(step)))


def _line(one: Tried, other: Tried, share: float) -> float:
    """Return where a share is on the line through two that were tried."""
    (x, y), (x_other, y_other) = ((at, math.log(own)) for at, own in (one, other))
    return x + (x_other - x) * (math.log(share) - y) / (y_other - y)


def rate_of_number(number: float) -> float:
    """Return one of the rates that are tried."""
    return float((1 - RATE_STEP) ** -number)


def rate_number(rate: float) -> int:
    """Return the number of the highest of the rates that are tried that is not above a rate."""
    return math.floor(-math.log(rate) / math.log(1 - RATE_STEP) + 1e-6)


class _Known(Exception):  # noqa: N818
    """Ends a simulation whose rest changes nothing."""


def _full_rate(
    models: Sequence[EngineModel], long: Sequence[Arrival], running: int, deadline_s: float
) -> float:
    """Return the rate at which requests end while engines are full: none lasts above it."""
    ends: list[float] = []
    last = running * (len(long) // running - 1)

    def ended(one: ServedRequest) -> None:
        ends.append(one.end_s)
        if len(models) == 1 and len(ends) > last:  # in order of time
            raise _Known

    with suppress(_Known):
        simulate(models, at_rate(long, math.inf), late=_late_after(deadline_s), ended=ended)
    ends.sort()
    return (last - running) / max(ends[last] - ends[running], 1e-9)


def missed_share(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    settling: int,
    deadline_s: float,
) -> float:
    """Return the share of the requests beyond the limits, the `settling` first left out.

    The first ones find engines empty. Simulated until as many are within the limits as have to be
    (`ATTAINMENT`), or too many are not: it is the share of those of which that is known by then,
    and above what may be just where that of all is.
    """
    count, missed = len(traffic) - settling, set[int]()
    good = 0

    def miss(number: int) -> None:
        if number >= settling:
            missed.add(number)
            if (count - len(missed)) / count < ATTAINMENT:
                raise _Known

    def ended(one: ServedRequest) -> None:
        nonlocal good
        if one.number < settling or one.number in missed:
            return
        if not limits.keeps(one):
            miss(one.number)
            return
        good += 1
        if good / count >= ATTAINMENT:
            raise _Known

    with suppress(_Known):
        simulate(
            models, traffic, late=_late_after(deadline_s), ended=ended, within=limits, missed=miss
        )
    return len(missed) / (good + len(missed))


def _late_after(deadline_s: float) -> Callable[[], bool]:
    """Return what counts a simulated step, and says whether the time is over."""

    def late() -> bool:
        spend_s(STEP_S)
        return now_s() > deadline_s

    return late
