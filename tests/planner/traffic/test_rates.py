"""The search of the highest rate, on limits that are known, and on an engine of a simple clock."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from llmpq.planner.evaluate.engine_simulation import EngineModel, StepRows, simulate
from llmpq.planner.traffic.rates import (
    RATE_STEP,
    attained,
    highest_lasting,
    requests_at_once,
    too_late_alone,
    uncached_prompts,
)
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.simulate.step_times import TimedStage
from llmpq.service_measures import ATTAINMENT, ServiceLimits
from llmpq.traffic import Arrival, at_rate, poisson_traffic

pytestmark = pytest.mark.pure


STEP = 1 / (1 - RATE_STEP)


@pytest.mark.parametrize(
    ("first", "most", "highest", "tried"),
    [
        # As many as full engines end last: nothing more to look for.
        (0, 0, 9, [0]),
        # Too high: 7, 14, 28 steps lower; then halves of what is between.
        (0, 0, -47, [0, -7, -21, -49, -35, -42, -46, -48, -47]),
        # The guess lasts: up by 7 steps, not above the most there can be.
        (0, 5, 9, [0, 5]),
        (0, 50, 3, [0, 7, 3, 5, 4]),
    ],
)
def test_rates_are_tried_in_this_order(
    first: int, most: int, highest: int, tried: list[int]
) -> None:
    asked = []

    def lasts(rate: float) -> bool:
        asked.append(math.log(rate, STEP))
        return rate <= 1.001 * STEP**highest

    found, _ = highest_lasting(lasts, lambda _: True, first=STEP**first, most=STEP**most)
    assert asked == pytest.approx(tried)
    assert found == pytest.approx(STEP ** min(highest, most))


def test_engines_have_the_same_rate_wherever_the_search_for_it_began() -> None:
    """And none that others have, too, is looked for above it."""
    found = {
        highest_lasting(
            lambda rate: rate <= 3.3, lambda _: True, first=first, most=most, is_near=near
        )[0]
        for first in (0.01, 0.5, 3.2, 3.3, 3.4, 7.0, 90.0)
        for most in (3.4, 20.0, 1000.0)
        for near in (False, True)
    }
    assert len(found) == 1 and (1 - RATE_STEP) * 3.3 < min(found) <= 3.3
    lasts = lambda rate: rate <= 3.3  # noqa: E731
    for above, rate in ((min(found), 0.0), (0.99 * min(found), min(found)), (2.0, min(found))):
        own = highest_lasting(lasts, lambda _: True, first=9.0, most=9.0, above=above)[0]
        assert own == rate


@pytest.mark.parametrize("apart", [True, False])
def test_requests_far_apart_are_asked_once_where_three_rates_are_too_high(apart: bool) -> None:
    asked, rates = [], []

    def kept_far_apart(rate: float) -> bool:
        asked.append(rate)
        return apart

    def lasts(rate: float) -> bool:
        rates.append(rate)
        return False

    assert highest_lasting(lasts, kept_far_apart, first=1.0, most=1.0)[0] == 0
    assert asked == pytest.approx([STEP**-21]) and len(rates) == (14 if apart else 3)


@pytest.mark.parametrize(("late_at", "found"), [(1, None), (2, 10)])
def test_a_search_that_is_late_has_the_best_rate_so_far_or_none(
    late_at: int, found: float | None
) -> None:
    asked = []

    def lasts(rate: float) -> bool:
        asked.append(rate)
        if len(asked) == late_at:
            raise TimeoutError
        return True

    if found is None:
        with pytest.raises(TimeoutError):
            highest_lasting(lasts, lambda _: True, first=10, most=20)
    else:
        rate, _ = highest_lasting(lasts, lambda _: True, first=10, most=20)
        assert (1 - RATE_STEP) * found < rate <= found


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
def test_what_is_attained_is_what_a_whole_simulation_says(rate: float, ttft_s: float) -> None:
    traffic = at_rate(poisson_traffic([20, 60, 150], [2, 9], requests=60, seed=3), rate)
    limits, models = ServiceLimits(ttft_s=ttft_s, tpot_s=0.5), [_engine(), _engine()]
    served = simulate(models, traffic)[10:]
    whole = sum(map(limits.keeps, served)) / len(served) >= ATTAINMENT
    assert attained(models, traffic, limits, 10, math.inf) is whole


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
