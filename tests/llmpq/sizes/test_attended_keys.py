"""The keys that tokens see through windows, against counting them one by one."""

from dataclasses import replace

import numpy as np
import pytest

from llmpq.models.model_spec import ModelSpec
from llmpq.sizes.attended_keys import (
    attended_keys,
    keys_before_chunk,
    twice_the_pairs,
    windows_of,
)

pytestmark = pytest.mark.pure
WINDOWS = ((64, 0.5), (500, 0.25))


def counted(first: int, last: int, windows: tuple[tuple[int, float], ...]) -> float:
    """Return the keys that tokens first+1 .. last see, the mean over layers."""
    shares = [*windows, (10**9, 1 - sum(share for _, share in windows))]
    return sum(
        share * min(i, window) for i in range(first + 1, last + 1) for window, share in shares
    )


@pytest.mark.parametrize("windows", [WINDOWS, ((128, 1.0),), ((1, 0.5),)])
@pytest.mark.parametrize("start, length", [(0, 40), (0, 900), (30, 50), (700, 512), (5000, 32)])
def test_pairs_are_those_counted(
    windows: tuple[tuple[int, float], ...], start: int, length: int
) -> None:
    within = twice_the_pairs(float(length), windows) / 2
    before = length * keys_before_chunk(float(start), float(length), windows)
    # A token sees itself: half a pair more than T^2 / 2 counts.
    assert within + before == pytest.approx(counted(start, start + length, windows), abs=length)
    ends = np.arange(1.0, 800.0)
    expected = [counted(int(t) - 1, int(t), windows) for t in ends]
    assert np.allclose(attended_keys(ends, windows), expected)


def test_without_windows_every_key_is_seen() -> None:
    assert attended_keys(1000.0, ()) == 1000.0
    assert twice_the_pairs(1000.0, ()) == 1e6
    assert keys_before_chunk(300.0, 50.0, ()) == 300.0


def test_windows_of_a_model_are_shares_of_the_layers_that_cache() -> None:
    gemma = ModelSpec.by_name("gemma-3-27b")
    assert windows_of(gemma) == ((1024, pytest.approx(52 / 62)),)
    assert windows_of(gemma, range(4)) == ((1024, 1.0),)
    assert windows_of(ModelSpec.by_name("llama-3.1-8b")) == ()
    mixers = ("recurrent", "attention") * 31
    hybrid = replace(gemma, mixers=mixers, windows=(0, 1024, 1024, 0) * 15 + (0, 0))
    assert windows_of(hybrid) == ((1024, pytest.approx(15 / 31)),)
