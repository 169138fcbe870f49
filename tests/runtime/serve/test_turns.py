"""Requests that come together begin one in a round of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from llmpq.runtime.serve.gate import Turns

pytestmark = pytest.mark.cpu


def rounds_of(count: int, *, gone: int | None = None) -> list[int]:
    """Return in which round of the loop each of several waits ended; one's client may go."""

    async def work() -> list[int]:
        turns, ended, now = Turns(), dict[int, int](), 0

        async def one(number: int) -> None:
            await turns.wait()
            ended[number] = now

        tasks = [asyncio.ensure_future(one(number)) for number in range(count)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            now += 1
            if gone is not None and now == 2:
                tasks[gone].cancel()
            assert now < 100, "somebody waits for ever"
        await turns.wait()  # nobody before it: at once
        return [ended[number] for number in sorted(ended)]

    return asyncio.run(work())


def test_one_begins_in_a_round():
    rounds = rounds_of(9)
    assert rounds == sorted(set(rounds)), "each in a later round"


def test_who_has_gone_holds_nobody_up():
    assert len(rounds_of(6, gone=3)) == 5
