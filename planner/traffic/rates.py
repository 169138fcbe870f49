"""The highest rate of a traffic that engines keep within limits, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property

from llmpq.planner.evaluate.engine_simulation import EngineModel, simulate
from llmpq.planner.problem.work_clock import now_s, spend_s
from llmpq.service_measures import ATTAINMENT, ServedRequest, ServiceLimits, ServiceMeasures
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.traffic import BLOCK_OF_TRACE, Arrival, at_rate, repeated

RATE_STEP = 0.05
"""Relative distance of the rates that are tried: all are powers of the same number, so that engines
have the same rate wherever the search for it began."""
MOST_TRIES = 14
NEXT, FARTHEST = 7, 56
"""Steps from the first rate to the next to try (0.7 times as much), then twice as many each, at
most so many (0.06 times), until one lasts and one does not."""
FIRST_TRIES = 2
"""Rates that are tried before requests far apart are."""
STEP_S = 2e-4
"""Seconds of work of a simulated step (0.22 ms of a core, 2026-11)."""
GENERATIONS = 3
"""Requests by which a rate is found, in those that run at once: fewer show no queue."""


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
    deadline_s: float = math.inf,
) -> bool:
    """Whether requests are within the limits where each is served alone; if not, at no rate."""
    return attained(models, at_rate(traffic, APART * rate_per_s), limits, 0, deadline_s)


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
    is_near: bool = False,
    above_per_s: float = 0.0,
    deadline_s: float = math.inf,
) -> RateFound:
    """Return the highest rate at which `ATTAINMENT` of the requests are within the limits.

    Without limits it is the rate at which requests end that all arrive at once. With limits it is
    a rate that lasts: a traffic that ends before engines are full says nothing of it, so it is
    repeated to `GENERATIONS` times the requests that run at once, of which the first are left out,
    and no rate counts that is above the one at which requests end in full engines. Found by
    bisection that begins at `guess_per_s`, a guess of that highest rate (`is_near`: to a few
    percent), or just above `above_per_s`, if only rates above that are of interest. `deadline_s`:
    of the clock of searches, from when on the best rate so far is returned, or `TimeoutError` is
    raised where none was found.
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
    def lasts(rate: float) -> bool:
        nonlocal cut
        try:
            return attained(models, at_rate(long, rate), limits, running, deadline_s)
        except TimeoutError:
            cut = True
            raise

    if above_per_s and not lasts(_rate(_number(above_per_s) + 1)):
        return RateFound(
            rate_per_s=0.0, measure=lambda: measured_at(models, traffic, limits, above_per_s)
        )
    most = _full_rate(models, long, running, deadline_s)
    low, rate = highest_lasting(
        lasts,
        lambda rate: kept_apart(models, traffic, limits, rate, deadline_s=deadline_s),
        first=most if guess_per_s is None else min(most, guess_per_s),
        most=most,
        is_near=is_near,
        above=above_per_s,
    )
    return RateFound(
        rate_per_s=low, measure=lambda: measured_at(models, traffic, limits, rate), cut=cut
    )


def highest_lasting(
    lasts: Callable[[float], bool],
    kept_far_apart: Callable[[float], bool],
    *,
    first: float,
    most: float,
    is_near: bool = False,
    above: float = 0.0,
) -> tuple[float, float]:
    """Return the highest rate that lasts and itself, or 0 and the last tried where none was found.

    Of rates that are RATE_STEP apart, by bisection that begins near `first`; none above `most` is
    tried. `kept_far_apart`: whether requests are within the limits far apart, asked once where the
    first rates are too high: if not, no rate is. A `TimeoutError` of either ends the search if
    there is a rate by then.

    `is_near`: `first` is thought to be near that rate, so steps up or down are short at first.
    `above`: only rates above it are of interest. The next one is tried first, and none more if that
    does not last.
    """
    top = _number(most)
    at, step = min(top, _number(first)), 1 if above or is_near else NEXT
    if above:
        at = _number(above) + 1
        if at > top:
            return 0.0, most
    low: int | None = None
    high = top + 1
    for tries in range(MOST_TRIES):
        try:
            found = lasts(_rate(at))
            if not (found or low is not None) and (
                above or (tries == FIRST_TRIES and not kept_far_apart(_rate(at)))
            ):
                break
        except TimeoutError:
            if low is not None:
                break
            raise
        low, high = (at, high) if found else (low, at)
        if low is None:
            at = high - step
        elif high - low == 1:
            break
        else:
            at = min(low + step, high - 1 if high > top else (low + high) // 2)
        step = min(FARTHEST, 2 * step)
    return (0.0, _rate(at)) if low is None else (_rate(low), _rate(low))


def _rate(number: int) -> float:
    """Return one of the rates that are tried."""
    return float((1 - RATE_STEP) ** -number)


def _number(rate: float) -> int:
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


def attained(
    models: Sequence[EngineModel],
    traffic: Sequence[Arrival],
    limits: ServiceLimits,
    settling: int,
    deadline_s: float,
) -> bool:
    """Whether `ATTAINMENT` of the requests are within the limits, the `settling` first left out.

    The first ones find engines empty. Simulated until enough of them are, or too many are not.
    """
    count = len(traffic) - settling
    good = bad = 0

    def ended(one: ServedRequest) -> None:
        nonlocal good, bad
        if one.number < settling:
            return
        if limits.keeps(one):
            good += 1
        else:
            bad += 1
        if good / count >= ATTAINMENT or (count - bad) / count < ATTAINMENT:
            raise _Known

    with suppress(_Known):
        simulate(models, traffic, late=_late_after(deadline_s), ended=ended)
    return good / count >= ATTAINMENT


def _late_after(deadline_s: float) -> Callable[[], bool]:
    """Return what counts a simulated step, and says whether the time is over."""

    def late() -> bool:
        spend_s(STEP_S)
        return now_s() > deadline_s

    return late
