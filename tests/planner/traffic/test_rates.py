"""The search of the highest rate, on limits that are known, and on an engine of a simple clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from llmpq.planner.evaluate.engine_simulation import EngineModel, StepRows, simulate
from llmpq.planner.traffic.rates import (
    RATE_STEP,
    highest_lasting,
    lasts,
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


def _found(shape: str, highest: float, first: float, most: float) -> float:
    asked = []

    def missed(rate: float) -> float:
        asked.append(rate)
        return SHARES[shape](rate / highest)

    found, rate = highest_lasting(missed, first=first, most=most)
    assert found == rate == max(rate for rate in asked if rate <= highest)
    assert found > (1 - RATE_STEP) * min(highest, most) and max(asked) <= most
    assert len(asked) <= (10 if 0.6 <= highest / first <= 1.1 else 18)
    return found


@pytest.mark.parametrize("shape", SHARES)
@pytest.mark.parametrize("highest", [0.001, 0.02, 0.3, 0.6, 0.9, 1.1, 1.5, 3.0, 50.0])
def test_the_highest_rate_is_found_from_any_guess(shape: str, highest: float) -> None:
    """Engines have the same one wherever the search for it began."""
    tried = ((1.0, 10.0), (10.0, 10.0), (highest, 11.0), (0.02, 10.2))
    rates = {_found(shape, highest, first, most) for first, most in tried}
    assert len(rates) == 1 or highest > 10


def test_no_rate_is_found_where_none_lasts() -> None:
    assert highest_lasting(lambda _: 1.0, first=1.0, most=10.0)[0] == 0
    assert 9.5 < highest_lasting(lambda _: 0.0, first=11.0, most=10.0)[0] <= 10.0


@pytest.mark.parametrize(("late_at", "found"), [(1, None), (2, 10)])
def test_a_search_that_is_late_has_the_best_rate_so_far_or_none(
    late_at: int, found: float | None
) -> None:
    asked = []

    def missed(rate: float) -> float:
        asked.append(rate)
        if len(asked) == late_at:
            raise TimeoutError
        return 0.0

    if found is None:
        with pytest.raises(TimeoutError):
            highest_lasting(missed, first=10, most=20)
    else:
        rate, _ = highest_lasting(missed, first=10, most=20)
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
