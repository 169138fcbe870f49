"""The thread that hands news out: who hears what, and who nothing more."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from llmpq.runtime.launch.engine_thread import EngineThread
from llmpq.runtime.launch.pipeline_client import EngineOutputs
from llmpq.runtime.requests.request import Progress, Request, RequestOutputDelta
from llmpq.runtime.requests.token_rules import LogitsConstraints

pytestmark = pytest.mark.cpu


class Scripted:
    """An engine that says what the test has it say, and may refuse requests."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[EngineOutputs | None] = queue.SimpleQueue()
        self.submitted: list[list[int]] = []
        self.error: BaseException | None = None

    def submit(self, requests: Sequence[Request], *, more: bool) -> None:
        if not more:
            self.said.put(None)
            return
        self.submitted.append([request.id for request in requests])
        if self.error is not None:
            raise self.error

    def abort(self, ids: Sequence[int]) -> None:
        pass

    def updates(self) -> Iterator[EngineOutputs]:
        while (update := self.said.get()) is not None:
            yield update

    def say(self, tokens: dict[int, list[int]]) -> None:
        self.said.put(EngineOutputs(finished=[], progress=Progress(), tokens=tokens))


@pytest.fixture
def engine() -> Scripted:
    return Scripted()


@pytest.fixture
def thread(engine) -> Iterator[EngineThread]:
    made = EngineThread(engine, ExitStack())  # type: ignore[arg-type]
    yield made
    made.close()


def request(number: int, **more: Any) -> Request:
    return Request(id=number, prompt=(1,), max_new=4, **more)


def test_several_callers_enter_in_one_call_and_each_hears_its_own(engine, thread):
    first: queue.SimpleQueue[RequestOutputDelta] = queue.SimpleQueue()
    second: queue.SimpleQueue[RequestOutputDelta] = queue.SimpleQueue()
    thread.submit_all([([request(0), request(1)], first.put), ([request(2)], second.put)])
    assert engine.submitted == [[0, 1, 2]]
    engine.say({2: [7], 1: [5], 0: [3]})
    heard = [first.get(timeout=10) for _ in range(2)]
    assert [(news.id, news.tokens) for news in heard] == [(1, [5]), (0, [3])]
    assert second.get(timeout=10).tokens == [7] and second.empty() and first.empty()


def test_a_call_that_fails_leaves_no_listener_and_the_others_theirs(engine, thread):
    kept: queue.SimpleQueue[RequestOutputDelta] = queue.SimpleQueue()
    refused: queue.SimpleQueue[RequestOutputDelta] = queue.SimpleQueue()
    thread.submit([request(0)], kept.put)
    engine.error = ValueError("no room")
    ruled = request(2, rules=LogitsConstraints(prompt=(1,)))
    with pytest.raises(ValueError, match="no room"):
        thread.submit_all([([request(1)], refused.put), ([ruled], refused.put)])
    engine.say({1: [4], 2: [4], 0: [9]})
    assert kept.get(timeout=10).tokens == [9]
    assert refused.empty() and not thread._ruled and set(thread._records) == {0}
    thread.close()
    assert kept.get(timeout=10).error is not None and refused.empty()
