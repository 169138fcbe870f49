"""The highest rate of a traffic that engines keep within limits, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from llmpq.planner.evaluate.engine_simulation import EngineModel, simulate
from llmpq.planner.problem.work_clock import now_s, spend_s
from llmpq.planner.traffic.rate_grid import RateSearch, lasts, rate_number, rate_of_number
from llmpq.service_measures import ATTAINMENT, ServedRequest, ServiceLimits, ServiceMeasures
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.traffic import BLOCK_OF_TRACE, Arrival, at_rate, repeated

STEP_S = 2e-4
"""Seconds of work of a simulated step (0.11 to 0.17 ms of a core, by its other load, 2026-12)."""
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
    settling: int = 0,
    deadline_s: float = math.inf,
) -> bool:
    """Whether requests are within the limits where each is served alone; if not, at no rate.

    `settling`: how many of the first do not count.
    """
    far = at_rate(traffic, APART * rate_per_s)
    return lasts(missed_share(models, far, limits, settling, deadline_s))


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
    search = EngineRates(models, traffic, limits, guess_per_s=guess_per_s)
    search.deadline_s = deadline_s
    return search.above(above_per_s)


class EngineRates(RateSearch):
    """The search of engines' highest rate by simulation, which remembers what was simulated."""

    def __init__(
        self,
        models: Sequence[EngineModel],
        traffic: Sequence[Arrival],
        limits: ServiceLimits,
        *,
        guess_per_s: float | None = None,
    ) -> None:
        """Arguments are those of `highest_rate`, of which one limit at least is given."""
        super().__init__()
        self._models, self._traffic, self._limits = models, traffic, limits
        self._guess_per_s = guess_per_s
        self._running = requests_at_once(models, traffic)
        self._long = repeated(traffic, GENERATIONS * self._running)
        self.deadline_s = math.inf
        """Of the clock of searches: when simulations end by a `TimeoutError`."""

    @cached_property
    def _too_late(self) -> bool:
        return too_late_alone(self._models, self._traffic, self._limits)

    @cached_property
    def _most(self) -> float:
        return _full_rate(self._models, self._long, self._running, self.deadline_s)

    @cached_property
    def _apart(self) -> bool:
        rate = self._guess_per_s or self._most
        return not self._too_late and kept_apart(
            self._models,
            self._long,
            self._limits,
            rate,
            settling=self._running,
            deadline_s=self.deadline_s,
        )

    def most(self) -> float:
        """Return the rate at which requests end in full engines."""
        return self._most

    def kept_apart(self, rate: float) -> bool:
        """Whether requests are within the limits where each is served alone."""
        return self._apart

    def missed(self, rate: float) -> float:
        """Return the share of the requests that is beyond the limits at a rate."""
        if self._too_late:
            return 1.0
        moved = at_rate(self._long, rate)
        return missed_share(self._models, moved, self._limits, self._running, self.deadline_s)

    def above(self, above_per_s: float = 0.0) -> RateFound:
        """Return the highest rate, if it is above one; `TimeoutError` where none is found."""
        cut = False
        try:
            if above_per_s:
                found = self.lasts(rate_number(above_per_s) + 1) and self.close(self.low or 0)
            else:
                found = self.close(rate_number(self._guess_per_s or self._most))
        except TimeoutError:
            if self.low is None:
                raise
            found = cut = True
        return self.found(cut=cut) if found else self.none(above_per_s)

    def found(self, *, cut: bool) -> RateFound:
        """Return the highest rate that is known to last."""
        assert self.low is not None, "one does"
        return self._at(rate_of_number(self.low), cut=cut)

    def none(self, above_per_s: float) -> RateFound:
        """Return that no rate lasts, or none above one."""
        tried = min(self.tried, default=None)
        rate = above_per_s or (self._guess_per_s if tried is None else rate_of_number(tried))
        return replace(self._at(rate, cut=False), rate_per_s=0.0)

    def _at(self, rate: float | None, *, cut: bool) -> RateFound:
        models, traffic, limits = self._models, self._traffic, self._limits
        return RateFound(
            rate_per_s=rate or 0.0,
            measure=lambda: measured_at(models, traffic, limits, rate),
            cut=cut,
        )


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
