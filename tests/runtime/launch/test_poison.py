"""Which request ends the stages: found among many, and never one that stages were lost beside."""

from __future__ import annotations

import random

import pytest

from llmpq.runtime.launch.poison import MOST_POISON, STRIKES, PoisonHunt
from llmpq.runtime.launch.request_record import RequestRecord
from llmpq.runtime.requests.request import Request

pytestmark = pytest.mark.pure
MOST_LOSSES = 40


def records(count: int) -> list[RequestRecord]:
    """Requests in the order in which they came."""
    return [
        RequestRecord(
            request=Request(id=number, prompt=(1,), max_new=9),
            listener=lambda news: None,
            submitted_s=float(number),
        )
        for number in range(count)
    ]


def submit(chosen: list[RequestRecord], all_of_them: list[RequestRecord]) -> None:
    for record in all_of_them:
        record.begun, record.held = False, record not in chosen
    for record in chosen:
        record.resumed(1e3)


def hunted(
    count: int, poison: set[int], max_rows: int, *, others_get_on: bool, raised: bool = False
) -> tuple[set, int]:
    """Return who is failed by engines that some requests end, and how many engines that took."""
    left, hunt, failed = records(count), PoisonHunt(max_rows), set()
    submit(left, left)
    for num_lost in range(MOST_LOSSES):
        running = sorted((r for r in left if r.begun), key=lambda r: r.order)
        while True:  # one engine: rows in order, as many as there are slots
            rows = running[:max_rows]
            if any(record.request.id in poison for record in rows):
                break
            for record in rows:  # each gets a token and is over
                record.take([5], None, 2e3)
                left.remove(record)
            running = running[max_rows:]
            for record in hunt.released(left):
                record.resumed(2e3)
                running.append(record)
            if not running:
                return failed, num_lost
        if others_get_on:
            for record in rows:
                if record.request.id not in poison:
                    record.take([5], None, 2e3)
        for record in hunt.note_loss(left, raised=raised):
            failed.add(record.request.id)
            left.remove(record)
        if hunt.broken():
            return failed, num_lost
        submit(hunt.chosen(left), left)
    return failed, MOST_LOSSES


@pytest.mark.parametrize("others_get_on", [True, False])
@pytest.mark.parametrize(
    ("count", "poison", "max_rows"),
    [(1, {0}, 4), (3, {1}, 8), (50, {0}, 8), (50, {31}, 8), (50, {49}, 64), (20, {3, 4}, 8)],
)
def test_the_requests_that_end_every_stage_are_failed_and_no_other(
    count, poison, max_rows, others_get_on
):
    failed, num_lost = hunted(count, poison, max_rows, others_get_on=others_get_on)
    assert failed == poison
    # It is suspected, halved out of what runs beside it, and seen alone.
    assert num_lost <= len(poison) * (2 * STRIKES + max_rows.bit_length())


@pytest.mark.parametrize(("count", "poison", "most"), [(1, {0}, 2), (3, {1}, 5), (9, {4}, 7)])
def test_an_error_that_a_step_raises_again_is_seen_sooner(count, poison, most):
    """Two losses of one request are enough; of several, they are halved as ever."""
    failed, num_lost = hunted(count, poison, 16, others_get_on=False, raised=True)
    assert failed == poison and num_lost <= most
    _, slower = hunted(count, poison, 16, others_get_on=False)
    assert num_lost < slower


def test_an_engine_in_which_every_step_raises_is_given_up():
    failed, num_lost = hunted(3, {0, 1, 2}, 8, others_get_on=False, raised=True)
    assert len(failed) == MOST_POISON and num_lost <= STRIKES + MOST_POISON


def test_an_engine_that_every_request_ends_is_given_up():
    failed, num_lost = hunted(30, set(range(30)), 8, others_get_on=False)
    assert len(failed) == MOST_POISON and num_lost < MOST_LOSSES


@pytest.mark.parametrize("seed", range(20))
def test_losses_at_random_moments_fail_nobody(seed):
    rng, hunt, left = random.Random(seed), PoisonHunt(8), records(60)
    submit(left, left)
    for _ in range(200):
        steps = rng.randrange(1, 6)  # one engine lasts at least for a token of each row
        for _ in range(steps):
            rows = sorted((r for r in left if r.begun), key=lambda r: r.order)[:8]
            for record in rows:
                record.take([5], None, 2e3)
                if len(record.tokens) == 9:
                    left.remove(record)
            for record in hunt.released(left):
                record.resumed(2e3)
        assert hunt.note_loss(left) == []
        submit(hunt.chosen(left), left)
    assert not left
