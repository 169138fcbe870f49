"""Which way to serve is taken: of ways that are names here, with what they are worth in tables."""

from __future__ import annotations

import pytest

from llmpq.planner.traffic.choose import best_under_all, best_variant, is_far_below

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


@pytest.mark.parametrize(
    ("by_few", "by_all", "best", "simulated"),
    [
        # The first stays as good: what is worth less by the few cannot be shown to be better.
        ([5, 4, 3], [5, 9, 9], 0, [0]),
        # All requests lower the first to 3.5: the second, 4 by the few, is simulated and stays 4.
        ([5, 4, 3], [3.5, 4, 9], 1, [0, 1]),
        # The second is lowered as well; the third is worth no more than the best by now.
        ([5, 4, 3], [3.5, 2, 9], 0, [0, 1]),
        # Everything is lowered: all are simulated, and the third is best.
        ([5, 4, 3], [1, 2, 2.5], 2, [0, 1, 2]),
        # As good is not better: the first, simpler one stays.
        ([5, 5, 4], [4, 4, 4], 0, [0, 1]),
        ([5], [1], 0, [0]),
    ],
)
def test_ways_are_simulated_under_all_requests_until_no_other_can_be_better(
    by_few: list[float], by_all: list[float], best: int, simulated: list[int]
) -> None:
    asked = []

    def under_all(way: tuple[int, float]) -> tuple[int, float]:
        asked.append(way[0])
        return way[0], by_all[way[0]]

    few, found = best_under_all(
        list(enumerate(by_few)), under_all, lambda way: way[1], lambda: True
    )
    assert few == (best, by_few[best]) and found == (best, by_all[best]) and asked == simulated


def test_without_time_the_best_by_few_requests_is_taken() -> None:
    few, best = best_under_all([5.0, 4.0], lambda way: way / 5, lambda way: way, lambda: False)
    assert (few, best) == (5.0, 1.0)
