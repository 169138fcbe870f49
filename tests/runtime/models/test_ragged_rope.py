"""Dynamic rope of a GPU's steps: every row, or place of packed rows, turns by its own length."""

from types import SimpleNamespace

import pytest
import torch

from llmpq.families.common.spec_values import RopeScaling
from llmpq.runtime.models.rotary import Rotary
from llmpq.runtime.steps.paged_step import PagedStep
from llmpq.runtime.steps.step import Step

pytestmark = pytest.mark.cpu
TRAINED = 8
DYNAMIC = RopeScaling(kind="dynamic", factor=2.0, original_max_positions=TRAINED)
LIKE = torch.zeros(1)


def rotary() -> Rotary:
    return Rotary(16, 10000.0, DYNAMIC, torch.device("cpu"))


def on_a_gpu(positions_BQ, ends, *, by_place):
    """Return what rope asks of a step whose lengths are on a GPU."""
    return SimpleNamespace(
        start_B=SimpleNamespace(is_cuda=True),
        positions_BQ=positions_BQ,
        ends=ends,
        ends_by_place=by_place,
        memo={},
        once=lambda _, make: make(),
    )


def angles_of(length, position):
    """Return cosines and sines of one token of a request of so many."""
    step = Step.of([0], [position], [length - position])
    return [part[:, :1] for part in rotary().angles(step, LIKE)]


@pytest.mark.parametrize("starts", [(40, 0, 7), (1, 9, 30)])
@pytest.mark.parametrize("counts", [(3, 1, 2), (3, 3, 3), (1, 1, 1), (2, 1, 2)])
def test_rows_turn_by_their_own_length(starts, counts):
    """As many rows as the longest has tokens, too: [B, Q] does not say which is which."""
    step = Step.of([0, 1, 2], starts, counts)
    given = on_a_gpu(step.positions_BQ, step.ends, by_place=step.ends_by_place)
    for got, want in zip(rotary().angles(given, LIKE), rotary().angles(step, LIKE), strict=True):
        for row, count in enumerate(counts):
            torch.testing.assert_close(got[row, :count], want[row, :count])


@pytest.mark.parametrize("counts", [(3, 1, 2), (1, 1, 1), (4, 4, 4)])
def test_places_turn_by_the_length_of_their_request(counts):
    starts = (40, 0, 7)
    places = [(start + i, start + n) for start, n in zip(starts, counts, strict=True)
              for i in range(n)]  # fmt: skip
    positions, ends = (torch.tensor(x) for x in zip(*places, strict=True))
    by_place = PagedStep.ends_by_place.fget(None)
    got = rotary().angles(on_a_gpu(positions[None], ends, by_place=by_place), LIKE)
    for i, (position, end) in enumerate(places):
        for part, want in zip(got, angles_of(end, position), strict=True):
            torch.testing.assert_close(part[0, i], want[0, 0])
