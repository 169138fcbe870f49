"""Requests on their way from an event loop into an engine, and news on their way back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from llmpq.runtime.entrypoints import response_stream
from llmpq.runtime.entrypoints.response_stream import AsyncSubmitter, DeltaQueue, OutputQueue
from llmpq.runtime.requests.request import Finished, Request, RequestOutputDelta

pytestmark = pytest.mark.cpu
SHARE, LONGEST_S = response_stream._NEWS_SHARE, response_stream._LONGEST_WAIT_S


class ByHand:
    """An event loop whose calls, and two clocks that, go on when the test says so."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.now_s = self.computed_s = 100.0
        self.closed = False

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.soon.append(call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.later.append((delay_s, call))

    def round(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()

    def wait(self) -> float:
        """Let what is called later be called; return how long it has waited."""
        ((delay_s, call),) = self.later
        self.later = []
        self.now_s += delay_s
        call()
        return delay_s

    def compute(self, seconds: float) -> None:
        self.now_s += seconds
        self.computed_s += seconds


@pytest.fixture
def by_hand(monkeypatch) -> ByHand:
    made = ByHand()
    clocks = SimpleNamespace(
        perf_counter=lambda: made.now_s, thread_time=lambda: made.computed_s - 100.0
    )
    monkeypatch.setattr(response_stream, "time", clocks)
    return made


def inbox_of(loop: Any) -> OutputQueue:
    return OutputQueue(loop)


def delivered(queue: DeltaQueue) -> list[list[Any]]:
    """Tokens, or "end", of each batch that a queue has got."""
    batches = []
    while not queue.empty():
        batch = queue.get_nowait()
        batches.append([*(n.tokens[0] if n.finished is None else "end" for n in batch)])
    return batches


def token(number: int, value: int) -> RequestOutputDelta:
    return RequestOutputDelta(id=number, tokens=[value])


def end(number: int) -> RequestOutputDelta:
    finished = Finished(id=number, tokens=[], finish_reason="stop", first_token_s=0.0, total_s=0.0)
    return RequestOutputDelta(id=number, finished=finished)


def test_a_loop_with_time_is_told_at_once(by_hand):
    inbox, queue = inbox_of(by_hand), asyncio.Queue()
    for value in range(4):
        inbox.put(queue, token(0, value))
        by_hand.round()
        by_hand.compute(0.001)
        by_hand.now_s += 0.010
    assert delivered(queue) == [[0], [1], [2], [3]] and not by_hand.later


def test_what_comes_in_one_round_goes_together_and_is_asked_for_once(by_hand):
    inbox, first, second = inbox_of(by_hand), asyncio.Queue(), asyncio.Queue()
    for value in range(3):
        inbox.put(first, token(0, value))
        inbox.put(second, token(1, 10 + value))
    inbox.put(second, end(1))
    assert len(by_hand.soon) == 1
    by_hand.round()
    assert delivered(first) == [[0, 1, 2]] and delivered(second) == [[10, 11, 12, "end"]]


def test_a_busy_loop_is_told_less_often_and_nothing_is_lost_or_reordered(by_hand):
    inbox, queue = inbox_of(by_hand), asyncio.Queue()
    inbox.put(queue, token(0, 0))
    by_hand.round()
    by_hand.compute(0.045)  # nothing but the loop's own work since
    inbox.put(queue, token(0, 1))
    by_hand.round()
    assert delivered(queue) == [[0]]
    inbox.put(queue, token(0, 2))
    inbox.put(queue, end(0))
    assert not by_hand.soon, "one call waits already"
    assert by_hand.wait() == pytest.approx(0.045 / SHARE - 0.045)
    assert delivered(queue) == [[1, 2, "end"]]
    by_hand.now_s += 1.0
    inbox.put(queue, token(1, 3))
    by_hand.round()
    assert delivered(queue) == [[3]], "a loop that has rested gets them at once again"


def test_an_end_waits_no_longer_than_the_longest(by_hand):
    inbox, queue = inbox_of(by_hand), asyncio.Queue()
    inbox.put(queue, token(0, 0))
    by_hand.round()
    by_hand.compute(60.0)
    inbox.put(queue, end(0))
    by_hand.round()
    assert by_hand.wait() == LONGEST_S
    assert delivered(queue) == [[0], ["end"]]


def test_a_loop_that_is_closed_is_told_nothing(by_hand):
    by_hand.closed = True
    inbox_of(by_hand).put(asyncio.Queue(), token(0, 0))


def test_threads_that_tell_a_busy_loop_lose_nothing():
    async def work() -> list[list[int]]:
        inbox = inbox_of(asyncio.get_running_loop())
        queues: list[DeltaQueue] = [asyncio.Queue() for _ in range(4)]

        def put(queue: DeltaQueue, number: int) -> None:
            for value in range(200):
                inbox.put(queue, token(number, value))
            inbox.put(queue, end(number))

        async def read(queue: DeltaQueue) -> list[int]:
            got: list[RequestOutputDelta] = []
            while not got or got[-1].finished is None:
                got += await queue.get()
                busy_until_s = time.thread_time() + 0.0002
                while time.thread_time() < busy_until_s:
                    pass
            return [news.tokens[0] for news in got[:-1]]

        threads = [threading.Thread(target=put, args=(q, i)) for i, q in enumerate(queues)]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(30):
            return await asyncio.gather(*map(read, queues))

    assert asyncio.run(work()) == [[*range(200)]] * 4


class Doorkeeper:
    """An engine that notes what enters; may be held, and may refuse."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.begun, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()
        self.error: BaseException | None = None
        self.refused: int | None = None

    def submit_all(self, asked: Any) -> None:
        self.calls.append([request.id for own, _ in asked for request in own])
        self.begun.set()
        assert self.may_go.wait(30)
        if self.error is not None:
            raise self.error
        if self.refused in self.calls[-1]:
            raise ValueError("not this one")


def request(number: int) -> Request:
    return Request(id=number, prompt=(1,), max_new=1, stop_ids=frozenset())


def entering(engine: Doorkeeper, work: Callable[[Callable[[int], Any]], Any]) -> Any:
    """Run what submits requests by number, in a loop of its own."""

    async def run() -> Any:
        door = AsyncSubmitter(asyncio.get_running_loop(), engine)  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            return await work(lambda number: door.submit([request(number)], print))

    return asyncio.run(run())


async def begun(engine: Doorkeeper) -> None:
    assert await asyncio.to_thread(engine.begun.wait, 30)


def test_many_who_come_in_one_round_cost_one_call():
    engine = Doorkeeper()

    async def work(submit):
        await asyncio.gather(*(submit(number) for number in range(50)))
        await submit(50)

    entering(engine, work)
    assert engine.calls == [[*range(50)], [50]]


def test_who_comes_while_a_call_is_under_way_goes_in_the_next():
    engine = Doorkeeper()
    engine.may_go.clear()

    async def work(submit):
        first = asyncio.ensure_future(submit(0))
        await begun(engine)
        others = [asyncio.ensure_future(submit(number)) for number in (1, 2)]
        await asyncio.sleep(0)
        others.append(asyncio.ensure_future(submit(3)))
        await asyncio.sleep(0)
        assert engine.calls == [[0]] and not first.done()
        engine.may_go.set()
        await asyncio.gather(first, *others)

    entering(engine, work)
    assert engine.calls == [[0], [1, 2, 3]]


def test_an_error_reaches_every_waiter_and_the_next_call_is_made():
    engine = Doorkeeper()
    engine.error = ValueError("no room")

    async def work(submit):
        ends = await asyncio.gather(*(submit(i) for i in range(3)), return_exceptions=True)
        engine.error = None
        await submit(3)
        return ends

    ends = entering(engine, work)
    assert [str(one) for one in ends] == ["no room"] * 3
    assert engine.calls == [[0, 1, 2], [0], [1], [2], [3]]


def test_nobody_is_refused_for_what_another_asked():
    engine = Doorkeeper()
    engine.refused = 1

    async def work(submit):
        return await asyncio.gather(*(submit(i) for i in range(3)), return_exceptions=True)

    first, second, third = entering(engine, work)
    assert first is None and third is None and isinstance(second, ValueError)


def test_a_waiter_that_is_cancelled_harms_nobody():
    engine = Doorkeeper()
    engine.may_go.clear()

    async def work(submit):
        gone, stays = asyncio.ensure_future(submit(0)), asyncio.ensure_future(submit(1))
        await begun(engine)
        later = asyncio.ensure_future(submit(2))
        also_gone = asyncio.ensure_future(submit(3))
        await asyncio.sleep(0)
        gone.cancel()
        also_gone.cancel()
        await asyncio.sleep(0)
        engine.may_go.set()
        await asyncio.gather(stays, later)
        await submit(4)
        assert gone.cancelled() and also_gone.cancelled()

    entering(engine, work)
    assert engine.calls[0] == [0, 1] and engine.calls[-1] == [4]
    assert 2 in engine.calls[1]
