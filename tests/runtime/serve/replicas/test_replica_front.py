"""Before several engines: a replica that dies takes no request, or loses the answer it gives."""

from __future__ import annotations

import asyncio

import pytest

from llmpq.child import CallFailed
from llmpq.runtime.serve.errors import ApiError
from llmpq.runtime.serve.gate import TALLIED, TALLY
from llmpq.runtime.serve.replicas import replica_front
from llmpq.runtime.serve.replicas.plain_messages import to_plain
from llmpq.runtime.serve.replicas.replica_front import ReplicaFront, ReplicaHandle
from llmpq.runtime.serve.settings import ServeSettings

pytestmark = pytest.mark.pure
START = {"type": "http.response.start", "status": 200}
STREAM = START | {"headers": [(b"content-type", b"text/event-stream")]}
JSON = START | {"headers": [(b"content-type", b"application/json")]}


def part(text: bytes, more: bool) -> dict:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Replica:
    """A replica's process: what it says, as it comes; then it dies, where that is asked for."""

    def __init__(self, *said: list, dies: bool = False) -> None:
        self.said, self.dies, self.asked, self.num_started = said, dies, False, 1
        self.obituary = "its process died" if dies else None
        self.lost: str | None = None

    async def stream(self, method: str, *args: object):
        self.asked = True
        for messages in self.said:
            yield messages if messages is None else [to_plain(one) for one in messages]
        if self.dies:
            raise CallFailed("its process died")

    async def ask(self, method: str):
        if self.dies:
            raise CallFailed("its process died")
        return {"ready": self.lost is None, "lost": self.lost, "failure": None}

    def restart(self) -> None:
        self.dies, self.obituary, self.num_started = False, None, self.num_started + 1


def front_of(*replicas: Replica) -> ReplicaFront:
    handles = [ReplicaHandle(number, one, 1.0) for number, one in enumerate(replicas)]
    for handle in handles:
        handle.ready = True
    front = ReplicaFront(ServeSettings(model_names=("m",)), handles)
    front._turn = len(replicas) - 1  # the first comes first
    return front


def answered(front: ReplicaFront) -> list:
    """Return what a client is sent."""
    sent: list = []

    async def ask() -> None:
        first = True

        async def receive() -> dict:
            nonlocal first
            if not first:
                await asyncio.Event().wait()
            first = False
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": [],
                 "query_string": b"", "http_version": "1.1", "raw_path": b"/v1/completions",
                 "scheme": "http", "client": ("::1", 1), "server": ("::1", 2)}  # fmt: skip
        await asyncio.wait_for(front(scope, receive, send), 10)

    asyncio.run(ask())
    return sent


WHOLE = ([], [JSON], [part(b"all", False)])


@pytest.mark.parametrize("first", [Replica(dies=True), Replica(None)], ids=["dead", "no engine"])
def test_another_replica_takes_what_one_does_not(first):
    front = front_of(first, Replica(*WHOLE))
    assert answered(front) == [JSON, part(b"all", False)]
    assert first.asked and [one.ready for one in front.replicas] == [False, True]
    assert [one.num_under_way for one in front.replicas] == [0, 0] and front.num_under_way == 0


def test_a_stream_whose_replica_dies_ends_with_an_error():
    front = front_of(Replica([], [STREAM, part(b"data: a\n\n", True)], dies=True), Replica(*WHOLE))
    *begun, last = answered(front)
    assert begun == [STREAM, part(b"data: a\n\n", True)]
    assert b"was lost; try again" in last["body"] and not last.get("more_body")
    assert [one.ready for one in front.replicas] == [False, True], "and is not chosen again"


def test_what_a_replica_counts_is_for_the_log_not_for_the_client():
    counts = [{"completion_tokens": count, "first_token_s": 0.5} for count in (1, 2)]
    tallies = [{"type": TALLIED, "tally": one} for one in counts]
    said = ([], [tallies[0], STREAM, part(b"a", True)], [tallies[1], part(b"", False)])
    tally: dict = {}
    given = TALLY.set(tally)
    try:
        assert answered(front_of(Replica(*said))) == [STREAM, part(b"a", True), part(b"", False)]
    finally:
        TALLY.reset(given)
    assert tally == counts[1]


def test_an_answer_not_begun_is_refused_and_one_half_sent_is_cut():
    with pytest.raises(ApiError, match="was lost; try again") as refused:
        answered(front_of(Replica([], dies=True), Replica(*WHOLE)))
    assert refused.value.status == 503
    with pytest.raises(ConnectionError, match="was lost"):
        answered(front_of(Replica([], [JSON, part(b"al", True)], dies=True)))


def test_a_replica_that_dies_once_all_is_said_has_answered():
    front = front_of(Replica(*WHOLE, dies=True))
    assert answered(front) == [JSON, part(b"all", False)] and front.replicas[0].ready


def test_nobody_left_is_a_refusal():
    with pytest.raises(ApiError, match="try again in a moment"):
        answered(front_of(Replica(dies=True), Replica(dies=True)))


def test_a_replica_is_ready_once_it_says_so_and_not_where_it_is_dead():
    dead, other = front_of(Replica(dies=True), Replica()).replicas
    other.ready = False
    for one in (dead, other):
        asyncio.run(one.look())
    assert [one.ready for one in (dead, other)] == [False, True]
    assert [one.silent for one in (dead, other)] == [True, False]


def test_the_server_is_ready_from_when_all_are_until_none_is():
    front = front_of(Replica(), Replica())

    def ready(*states: bool) -> bool:
        for one, state in zip(front.replicas, states, strict=True):
            one.ready = state
        try:
            front.check_ready()
        except ApiError as refused:
            assert refused.status == 503 and f"{sum(states)} of 2" in refused.message
            return False
        return True

    async def watched() -> None:
        begun = asyncio.Event()
        for one in front.replicas:
            await one.look()
        assert [ready(True, False), ready(False, True)] == [False, False], "one has not loaded"
        watch = asyncio.ensure_future(front.watch(begun.set, lambda *_: None))
        await begun.wait()
        watch.cancel()
        assert [ready(True, True), ready(False, True), ready(True, False)] == [True] * 3
        assert not ready(False, False)

    asyncio.run(watched())


def test_the_log_says_why_a_replica_that_answered_is_lost(caplog):
    caplog.set_level("INFO", "llmpq.serve")
    replica = Replica([], [STREAM, part(b"data: a\n\n", True)])
    front = front_of(replica)
    (handle,) = front.replicas
    asyncio.run(handle.look())
    replica.dies, replica.obituary = True, "killed by SIGKILL"
    answered(front)
    for _ in range(2):
        asyncio.run(handle.look())
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "replica 0 is ready",
        "replica 0 lost an answer: its process died",
        "replica 0 is lost: killed by SIGKILL",
    ]


def test_the_log_says_why_a_replica_has_no_engine_any_more(caplog):
    caplog.set_level("INFO", "llmpq.serve")
    replica = Replica(*WHOLE)
    (handle,) = front_of(replica).replicas
    asyncio.run(handle.look())
    replica.lost = "stage 1 was lost: killed by SIGKILL"
    for _ in range(2):
        asyncio.run(handle.look())
    assert [record.getMessage() for record in caplog.records] == [
        "replica 0 is ready",
        "replica 0 has lost its engine: stage 1 was lost: killed by SIGKILL",
    ]
    assert not handle.ready


def test_a_dead_replica_is_started_again_after_a_pause(monkeypatch):
    monkeypatch.setattr(replica_front, "_PAUSE_S", 0.01)
    dead = Replica(dies=True)
    (handle,) = front_of(dead).replicas

    async def look() -> list[bool]:
        seen = []
        for _ in range(3):
            await handle.look()
            seen.append(handle.ready)
            await asyncio.sleep(0.02)
        return seen

    assert asyncio.run(look()) == [False, False, True] and dead.num_started == 2
    assert handle.failure is None
