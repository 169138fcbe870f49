"""Which way to serve is taken: of ways that are names here, with what they are worth in tables."""

from __future__ import annotations

import pytest

from llmpq.planner.traffic.choose import best_variant, is_far_below

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("rate", "steady", "far"),
    [(0.1, 1.0, True), (0.85, 1.0, True), (0.86, 1.0, False), (0, 0, True)],
)
def test_a_rate_of_85_percent_of_the_steady_one_or_less_is_far_below_it(
    rate: float, steady: float, far: bool
) -> None:
    assert is_far_below(rate, steady) is far


@pytest.mark.parametrize(
    ("rates", "best", "tried"),
    [
        ({512: 2.0, 256: 3.0, 1024: 1.0}, 256, [512, 256, 1024]),
        ({512: 1.0, 256: 1.0, 1024: 1.0}, 0, [512, 256, 1024]),  # none is better than what is there
        ({512: None, 256: None, 1024: 1.5}, 1024, [512, 256, 1024]),  # no plan of such steps
        ({512: 2.0, 256: "late", 1024: 9.0}, 512, [512, 256]),  # the time is over: what there is
        ({512: "late", 256: 9.0, 1024: 9.0}, 0, [512]),
    ],
)
def test_steps_of_other_tokens_are_tried_while_there_is_time(
    rates: dict[int, float | str | None], best: int, tried: list[int]
) -> None:
    """0 stands for the way as it is, worth 1."""
    asked, given = [], []

    def simulated(tokens: int, so_far: int) -> int | None:
        asked.append(tokens)
        given.append(so_far)
        if rates[tokens] == "late":
            raise TimeoutError
        return None if rates[tokens] is None else tokens

    found = best_variant(0, rates, simulated, lambda tokens: {0: 1.0, **rates}[tokens])
    assert found == best and asked == tried
    assert given[0] == 0 and all(one in (0, *asked[:n]) for n, one in enumerate(given))
