"""The search of the highest rate, on limits that are known, and on an engine of a simple clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from llmpq.planner.evaluate.engine_simulation import EngineModel, StepRows, simulate
from llmpq.planner.traffic.rate_grid import (
    MOST_TRIES,
    RATE_STEP,
    BestOf,
    RateSearch,
    lasts,
    rate_number,
    rate_of_number,
)
from llmpq.planner.traffic.rates import (
    missed_share,
    requests_at_once,
    too_late_alone,
    uncached_prompts,
)
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.simulate.step_times import TimedStage
from llmpq.service_measures import ATTAINMENT, ServedRequest, ServiceLimits
from llmpq.traffic import Arrival, at_rate, poisson_traffic

pytestmark = pytest.mark.pure


SHARES: dict[str, Callable[[float], float]] = {
    "as the root": lambda u: 0.1 * u**0.5,
    "as the square": lambda u: 0.1 * u**2,
    "steeply": lambda u: min(1.0, 0.1 * u**8),
    "at once": lambda u: 0.08 if u <= 1 else 0.125,
    "hardly": lambda u: 0.099 if u <= 1 else 0.11,
}
"""How many requests miss the limits at so many times the highest rate that lasts."""


class _Known(RateSearch):
    """A search of a rate that is known."""

    def __init__(
        self,
        missed: Callable[[float], float],
        most: float = 10.0,
        *,
        apart: Callable[[float], float] | None = None,
    ) -> None:
        super().__init__()
        self._missed, self._most, self._apart = missed, most, apart or missed
        self.asked: list[float] = []

    def missed(self, rate: float) -> float:
        self.asked.append(rate)
        return self._missed(rate)

    def most(self) -> float:
        return self._most

    def kept_apart(self, rate: float) -> bool:
        return self._apart(1e-9 * rate) <= 0.1


def _shape(name: str, highest: float) -> Callable[[float], float]:
    return lambda rate: SHARES[name](rate / highest)


def _highest(search: RateSearch, first: float) -> float:
    return rate_of_number(search.low or 0) if search.close(rate_number(first)) else 0.0


@pytest.mark.parametrize("shape", SHARES)
@pytest.mark.parametrize("highest", [0.001, 0.02, 0.3, 0.6, 0.9, 1.1, 1.5, 3.0, 50.0])
def test_the_highest_rate_is_found_from_any_guess(shape: str, highest: float) -> None:
    """Engines have the same one wherever the search for it began."""
    rates = set()
    for first, most in ((1.0, 10.0), (10.0, 10.0), (highest, 11.0), (0.02, 10.2)):
        search = _Known(_shape(shape, highest), most)
        found = _highest(search, first)
        assert (1 - RATE_STEP) * min(highest, most) < found <= min(highest, most)
        assert len(search.asked) <= (10 if 0.6 <= highest / first <= 1.1 else 18)
        rates.add(found)
    assert len(rates) == 1 or highest > 10


def test_no_rate_is_found_where_none_lasts() -> None:
    search = _Known(lambda _: 1.0)
    assert _highest(search, 1.0) == 0 and not search.asked
    search = _Known(lambda _: 0.11, apart=lambda _: 0.09)
    assert _highest(search, 1.0) == 0 and len(search.asked) == MOST_TRIES
    assert 9.5 < _highest(_Known(lambda _: 0.0), 11.0) <= 10.0


def test_what_was_simulated_is_not_simulated_again() -> None:
    search = _Known(_shape("as the square", 0.7))
    found = _highest(search, 1.0)
    asked = list(search.asked)
    assert len(set(asked)) == len(asked) and _highest(search, 0.1) == found
    assert not search.lasts(rate_number(9.0)) and search.lasts(rate_number(0.1))
    assert search.asked == asked


@pytest.mark.parametrize(
    "rates",
    [[0.5], [0.3, 0.5], [0.5, 0.3], [0.5, 0.5, 0.5], [0.0, 0.4], [0.002, 0.02, 4.0], [0.4, 90.0]],
)
@pytest.mark.parametrize("shape", SHARES)
@pytest.mark.parametrize("above", [None, 0.05, 0.44, 0.7])
def test_of_several_engines_the_best_is_found(
    rates: list[float], shape: str, above: float | None
) -> None:
    searches = [_Known(_shape(shape, rate or 1e-30)) for rate in rates]
    beside = BestOf(searches, [0] * len(rates))
    beside.find(rate_number(1.0), None if above is None else rate_number(above))
    best = rate_number(min(10.0, max(rates)))
    if above is not None and rate_number(above) >= best:
        assert beside.winner is None and all(len(one.asked) == 1 for one in searches)
        return
    assert beside.winner is not None and not beside.cut
    assert beside.best == searches[beside.winner].low == best
    assert rate_number(min(10.0, rates[beside.winner])) == best


def test_a_worse_one_has_to_be_quicker_by_as_many_steps() -> None:
    for offset, winner in ((0, 1), (2, 1), (30, 0)):
        searches = [_Known(_shape("as the square", rate)) for rate in (0.5, 1.0)]
        beside = BestOf(searches, [0, offset])
        beside.find(rate_number(0.8))
        assert beside.winner == winner
        assert beside.best == (searches[winner].low or 0) - winner * offset


@pytest.mark.parametrize("late_at", [1, 2, 3, 4, 5, 6])
def test_a_search_that_is_late_has_the_best_rate_so_far_or_none(late_at: int) -> None:
    asked = []

    def missed(rate: float) -> float:
        asked.append(rate)
        if len(asked) >= late_at:
            raise TimeoutError
        return SHARES["as the square"](rate / 0.5)

    beside = BestOf([_Known(missed), _Known(missed)], [0, 0])
    if late_at < 4:  # the first of all is of requests far apart
        with pytest.raises(TimeoutError):
            beside.find(rate_number(1.0))
    else:
        beside.find(rate_number(1.0))
        assert beside.cut and beside.winner == 0
        assert 0.0 < rate_of_number(beside.best) <= 0.5


class _TenMsAToken(TimedStage):
    """A stage that takes 10 ms a token, of a prompt or of an answer."""

    def seconds(self, rows: StepRows) -> float:
        return 0.01 * rows.tokens


def _engine(*, blocks: int = 100, rows: int = 8) -> EngineModel:
    limits = PoolLimits(
        num_blocks=blocks, max_rows=rows, max_len=4096, step_tokens=4096, decode_rows=rows
    )
    stage = _TenMsAToken(layers=(), embedding=None, head=None, factor=1.0, link=None, row_bytes=0)
    return EngineModel(limits=limits, stages=(stage,))


@pytest.mark.parametrize(
    ("prompts", "ttft_s", "late"),
    [
        # Of ten requests one may be late: that of 300 tokens (3 s). The next longest takes 2 s.
        ([300, 200, *[100] * 8], 2.5, False),
        ([300, 200, *[100] * 8], 1.9, True),
        # Of nine none may be: 0.9 of 9 is above 8.
        ([300, *[100] * 8], 2.5, True),
        ([300, *[100] * 8], 3.5, False),
        # Of twenty two may be.
        ([300, 300, *[100] * 18], 1.5, False),
        ([300, 300, 300, *[100] * 17], 1.5, True),
        ([300], 2.5, True),
        ([300], None, False),
    ],
)
def test_no_rate_is_kept_where_too_many_prompts_take_too_long_alone(
    prompts: list[int], ttft_s: float | None, late: bool
) -> None:
    traffic = [Arrival(float(at), tokens, 4) for at, tokens in enumerate(prompts)]
    assert too_late_alone([_engine()], traffic, ServiceLimits(ttft_s=ttft_s)) is late


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.4, 1.0, 5.0])
@pytest.mark.parametrize("ttft_s", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("tpot_s", [0.05, 0.5])
@pytest.mark.parametrize("engines", [1, 2])
def test_what_is_attained_is_what_a_whole_simulation_says(
    rate: float, ttft_s: float, tpot_s: float, engines: int
) -> None:
    """Though it ends where enough are known to be late, or in time."""
    traffic = at_rate(poisson_traffic([20, 60, 150], [2, 9], requests=60, seed=3), rate)
    limits, models = ServiceLimits(ttft_s=ttft_s, tpot_s=tpot_s), [_engine()] * engines
    served = simulate(models, traffic)[10:]
    whole = sum(map(limits.keeps, served)) / len(served) >= ATTAINMENT
    assert lasts(missed_share(models, traffic, limits, 10, math.inf)) is whole


@pytest.mark.parametrize(
    "limits", [ServiceLimits(ttft_s=2.0), ServiceLimits(tpot_s=0.03), ServiceLimits()]
)
def test_what_is_late_is_told_before_it_ends(limits: ServiceLimits) -> None:
    """Of each request that ends beyond the limits, once, and of no other one."""
    traffic = at_rate(poisson_traffic([20, 60, 150], [2, 90], requests=60, seed=3), 5.0)
    missed, late, early = list[int](), list[int](), list[int]()

    def ended(one: ServedRequest) -> None:
        if not limits.keeps(one):
            late.append(one.number)
            if one.number not in missed:
                early.append(one.number)

    simulate([_engine()], traffic, ended=ended, within=limits, missed=missed.append)
    assert len(set(missed)) == len(missed) and set(missed) <= set(late)
    assert len(early) <= len(late) // 2 and bool(late) is (limits != ServiceLimits())


def test_what_a_prefix_cache_may_have_does_not_make_a_prompt_late() -> None:
    """The second request finds the first one's prompt in the prefix cache, the third half of it."""
    traffic = [
        Arrival(0.0, 1024, 4, (1, 2)),
        Arrival(100.0, 1024, 4, (1, 2)),
        Arrival(200.0, 1100, 4, (1, 3, 4)),
    ]
    assert uncached_prompts(traffic) == [1024, 1, 588]
    assert uncached_prompts([replace(one, blocks=()) for one in traffic]) == [1024, 1024, 1100]
    many = [traffic[0], *[traffic[1]] * 9]
    assert not too_late_alone([_engine()], many, ServiceLimits(ttft_s=1.0))
    assert too_late_alone([_engine()], traffic, ServiceLimits(ttft_s=1.0))


@pytest.mark.parametrize(
    ("blocks", "rows", "running"),
    [
        (100, 8, 8),  # rows
        (4, 8, 2),  # 4 blocks of 128 tokens hold two requests of 256
        (1, 8, 1),  # one at least
    ],
)
def test_requests_at_once_are_bounded_by_rows_and_by_the_pool(
    blocks: int, rows: int, running: int
) -> None:
    traffic = [Arrival(0.0, 192, 64)] * 5
    engine = _engine(blocks=blocks, rows=rows)
    assert requests_at_once([engine], traffic) == running
    assert requests_at_once([engine, engine], traffic) == 2 * running
